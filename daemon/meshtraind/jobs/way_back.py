"""This device's way back to a job that others go on with: where they are, and what has come of it so far."""

from dataclasses import dataclass, field

from meshwire.membership.lineage import rank_of
from meshwire.messages.generation import Where
from meshwire.messages.job import End


@dataclass
class WayBack:
    """One way back, until the job goes on here, or is over.

    Attributes:
        own: this device.
        device: who has told of the others last.
        where: they are.
        why_not: what has come of the last try; empty before that.
        failed: devices whose part has failed since they told last.
    """

    own: str
    device: str
    where: Where
    why_not: str = ""
    failed: set[str] = field(default_factory=set)

    def told(self, device: str, where: Where) -> None:
        """Notes where the others are now, for the next try. Who tells is in the job, whatever it has said before."""
        self.device, self.where = device, where
        self.failed.discard(device)

    def is_over(self, device: str, end: End) -> bool:
        """Whether the job is over when it has ended so on a device: a failure is the end of that one's part alone, as
        long as others go on (G10)."""
        generation = self.where.generation
        if rank_of(generation, device) is None:
            return False
        if end.outcome == "failed":
            self.failed.add(device)
            return {member.device for member in generation.live.values()} <= {self.own, *self.failed}
        return True

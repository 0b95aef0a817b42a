"""A membership machine whose inputs and effects are written to DATA/jobs/ID, to be decided again (`submit --trace`).

One line an input, with its time and all effects. A daemon that comes back to the job begins a file of its own, so that
what it did before its end stays there to be read: membership.jsonl, membership-2.jsonl, ...
"""

from pathlib import Path

from meshtraind.rounds.trace import Trace
from meshwire.membership.effects import Effect
from meshwire.membership.inputs import Input
from meshwire.membership.machine import Membership
from meshwire.membership.record import FORMAT, MembershipStart, plain

FILES_MAX = 100  # of one job on one device: a daemon that is started again and again fills no disk


class RecordedMembership(Membership):
    """A membership machine that writes every input to `trace`, with all that followed from it."""

    def __init__(self, start: MembershipStart, trace: Trace) -> None:
        super().__init__(
            start.me,
            start.job,
            start.timeouts,
            start.now_s,
            generation=start.generation,
            known=start.known,
            members_max=start.members_max,
        )
        self._trace = trace
        trace.write("membership", format=FORMAT, start=plain(start))

    def handle(self, input_: Input, now_s: float) -> list[Effect]:
        """As the machine does it; an input that breaks the machine is written, for it is the one to look at."""
        effects: list[Effect] = []
        try:
            effects = super().handle(input_, now_s)
        finally:
            self._trace.write("input", now_s=now_s, input=plain(input_), effects=[plain(each) for each in effects])
        return effects


def membership_trace(folder: Path) -> Trace:
    """The next file of a job's folder; past the last of them that one is written anew."""
    names = ["membership.jsonl", *(f"membership-{number}.jsonl" for number in range(2, FILES_MAX + 1))]
    return Trace(folder / next((name for name in names if not (folder / name).exists()), names[-1]))

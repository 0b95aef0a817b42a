"""A job that all of its devices have lost, as in a power cut: who goes on with it from its checkpoints, and when (J5).

Each daemon that comes up again, or has no base of it any more (J3), tells the others which generation of the job it
entered last. The newest of these decides: the job begins again when more than half of its electorate are there, or half
with the lowest rank, each device for itself and whatever it has on its disk. Nobody begins it provisionally: others may
still come up with more.

Pure: inputs change the machine, `due` says when this device is to propose the generation in which the job goes on.
"""

from collections.abc import Collection, Mapping

from meshwire import limits
from meshwire.membership.lineage import rank_of
from meshwire.membership.proposal_checks import list_wrong, number_wrong
from meshwire.membership.quorum import electorate_of, has_quorum
from meshwire.messages.generation import Where
from meshwire.messages.job import Generation, Member, without_hubs
from meshwire.timeouts import Timeouts

TURN_S = 60.0  # between the proposals of one rank and of the next: a submission that gets nowhere is given up by then


class Revival:
    """One job's on one daemon that found it in its data folder.

    Args:
        me: this daemon as it is now; `entered` lists its device in the incarnation of before.
        entered: the newest generation that it was in.
        rests_until_s: it proposes none before, for it has begun the job again and again, and come no further.
    """

    def __init__(
        self, me: Member, entered: Generation, timeouts: Timeouts, rests_until_s: float = float("-inf")
    ) -> None:
        self._me = me.device
        self._timeouts = timeouts
        self._told: dict[str, tuple[Member, Generation]] = {me.device: (me, entered)}
        self._enough_since_s: float | None = None
        self._tries = 0
        self._rests_until_s = rests_until_s
        self._not_before_s = float("-inf")
        self._refusing: set[str] = set()  # devices: it begins without them, if the others are enough

    @property
    def entered(self) -> Generation:
        """That this device was in last."""
        return self._told[self._me][1]

    def counts(self, device: str) -> bool:
        """Whether the device is known to have lost the job."""
        return device in self._told

    def told(self, member: Member, entered: Generation, now_s: float) -> str | None:
        """A linked device has lost the job, too. Returns what is wrong with what it tells, or None."""
        known = max(entered.number for _, entered in self._told.values())
        wrong = list_wrong(entered) or number_wrong(entered.number, known)
        if wrong is None and (entered.job != self.entered.job or rank_of(entered, member.device) is None):
            wrong = "it does not list the sender, or is of another job"
        if wrong is None:
            self._told[member.device] = member, entered
            self._look(now_s)
        return wrong

    def lost(self, device: str, now_s: float) -> None:
        """Its link is gone, or it has the job again."""
        self._told.pop(device, None)
        self._look(now_s)

    def failed(self, now_s: float, by: str | None = None) -> None:
        """What was proposed came to nothing, by the refusal of a device or not: the next time is later."""
        if by is not None and by != self._me:
            self._refusing.add(by)
        self._tries += 1
        self._not_before_s = now_s + self._timeouts.ask_s(self._tries)

    @property
    def _newest(self) -> Generation:
        """That decides. Of one number those have parted, and any of them does: their electorate is that of the root."""
        return max(
            (entered for _, entered in self._told.values()), key=lambda one: (one.root, one.number, one.hash64())
        )

    @property
    def _here(self) -> Mapping[int, Member]:
        """Who is there, by rank."""
        newest = self._newest
        ranks = {rank_of(newest, device): member for device, (member, _) in self._told.items()}
        here = {rank: ranks[rank] for rank in sorted(rank for rank in ranks if rank is not None)}
        willing = {rank: member for rank, member in here.items() if member.device not in self._refusing}
        return willing if self._are_enough(newest, willing) else here

    def _are_enough(self, newest: Generation, here: Collection[int]) -> bool:
        """A device that is there has the vote of the incarnation that its electorate names."""
        part = {rank: newest.members[rank].incarnation for rank in here}
        if not without_hubs(newest.members, here):
            return False  # nobody is there who would train (H3)
        return has_quorum(electorate_of(newest, entered=True), part)

    def _look(self, now_s: float) -> None:
        if not self._are_enough(self._newest, self._here):
            self._enough_since_s = None
        elif self._enough_since_s is None:
            self._enough_since_s = now_s

    def deadline(self, now_s: float) -> float | None:
        """When this device is to propose; None: not by itself. It may be over."""
        self._look(now_s)
        newest, here = self._newest, self._here
        ranks = list(here)
        mine = rank_of(newest, self._me)
        if self._enough_since_s is None or mine is None or mine not in here:
            return None
        complete = {*newest.ranks} <= here.keys()
        # who is missed may be on its way; or it lives, and says so as soon as there is a link
        wait_s = (0.0 if complete else self._timeouts.patience_s) + ranks.index(mine) * TURN_S
        since_s = max(self._enough_since_s, self._rests_until_s)
        return max(since_s + wait_s, self._not_before_s)

    def due(self, now_s: float) -> Generation | None:
        """The generation in which the job goes on, if this device is to propose it now."""
        deadline_s = self.deadline(now_s)
        return None if deadline_s is None or now_s < deadline_s else self._next()

    def _next(self) -> Generation:
        newest, here = self._newest, self._here
        number = 1 + max(entered.number for _, entered in self._told.values())
        ranks = tuple(here)
        return Generation(
            job=newest.job,
            number=number,
            proposer=self._me,
            parent=newest.digest(),
            members=tuple(here.get(rank, member) for rank, member in enumerate(newest.members)),
            ranks=ranks,
            learning=(),
            root=number,
            counted=without_hubs(newest.members, ranks),
        )

    def waiting(self) -> str:
        """For people: who is waited for, and how to go on without."""
        newest, here = self._newest, self._here
        counted = newest.counted or newest.ranks
        missing = [newest.members[rank].name for rank in counted if rank not in here]
        if self._enough_since_s is not None:
            return "the start from its newest checkpoint, for all of its devices had lost its state"
        if not without_hubs(newest.members, here):
            laptops = [newest.members[rank].name for rank in without_hubs(newest.members, range(len(newest.members)))]
            return (
                f"a laptop that was in it ({', '.join(laptops)}): this hub keeps its state; from another one: "
                f"meshtrain submit --resume {newest.job}"
            )
        return (
            f"{' or '.join(missing)}, for all of its devices have lost its state, and of the {len(counted)} laptops "
            f"that decide {len(counted) - len(missing)} are here; to go on without: meshtrain submit --resume "
            f"{newest.job}"
        )


def is_older(where: Where, own: Generation) -> bool:
    """Others are in a job that this device was in: is `own`, which it has entered before, no part of their history but
    a later decision? Then what was made in it is not given up for theirs."""
    other = where.generation
    if other.root != own.root:
        return other.root < own.root
    known = {other.hash64(), *where.ancestors}
    return not own.provisional and own.hash64() not in known and len(where.ancestors) < limits.ANCESTORS_MAX

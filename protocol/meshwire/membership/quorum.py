"""Which part of a generation's members is entitled to go on, so that never two parts go on apart (G4, dynamic voting).

When the network splits, each side asks this question with what its own members know, and at most one side may hear
"yes". The idea is a majority, not of all devices there ever were, but of those that took part last:

1. Each generation has an *electorate*: the ranks that are counted in it. A part may follow that generation if it holds
   more than half of its electorate, or half with its lowest rank (`has_quorum`).
2. Which generation is the newest? A member knows the newest one that is *settled*: it has entered it, and so has
   everybody who counts in it. But it may also have *promised* a later one and not heard how that ended: others may have
   entered it and gone on with its majority. So the part needs a quorum of the newest settled electorate and of every
   later one that any of its members has promised and that may have been entered (`is_entitled`).
3. A promised generation came to nothing if one of this part had to promise it and did not: all members have to promise
   before anybody may enter (`_came_to_nothing`).
4. A device whose process is *gone* for good is not waited for. But it may have voted elsewhere before it went, where
   nobody here could see it; so being gone helps a part only if nobody is silent, when there is nobody left that could
   have gone on with the gone one's vote.

After Lotem, Keidar and Dolev, "Dynamic voting for consistent primary components" (1997); points 3 and 4 are not theirs.
Theirs is settled for a member once it has entered it itself. With point 4 that is too soon: whoever counts in it may
have promised another one instead, to some that it leaves out, and be gone.
"""

from collections.abc import Collection, Iterator, Mapping

from meshwire import limits
from meshwire.messages.generation import Electorate, Standing
from meshwire.messages.job import Generation

Incarnations = Mapping[int, int]
"""The members of a part: rank to incarnation. A device that was started again is another voter (G1)."""


def electorate_of(generation: Generation, *, entered: bool) -> Electorate:
    """The part of a generation that decides what follows it, as members tell each other of it.

    `entered`: whether the member that tells of it has entered it, or has only promised it.
    """
    return Electorate(
        generation=generation.hash64(),
        number=generation.root,
        entered=entered,
        counted=tuple((rank, generation.members[rank].incarnation) for rank in generation.counted),
        gone=generation.gone,
        listed=tuple((rank, member.incarnation) for rank, member in generation.live.items()),
    )


class Votes:
    """What one process of a device has entered and promised, to be told with each promise (`Standing.votes`).

    It is remembered as long as the process lives, whether the device is in the job or was left out: the others may
    need the vote that it gave, even if its history is not kept.
    """

    def __init__(self, generation: Generation | None) -> None:
        self._entered = None if generation is None else electorate_of(generation, entered=True)
        self._root = self._entered  # the newest entitled one that is settled
        self._attempts: tuple[Electorate, ...] = ()  # entitled, promised since the root and not entered
        self.forgot = 0  # number of the newest attempt that is not remembered

    @property
    def told(self) -> tuple[Electorate, ...]:
        """For `Standing.votes`."""
        if self._entered is None:
            return self._attempts
        root = self._root
        # A provisional one may count others than its root: its proposer went by those that counted before, for it had
        # not heard that all have entered the root. Who has heard so goes on to tell of the root, too.
        apart = root is not None and root.number == self._entered.number and _all_of(root) != _all_of(self._entered)
        return (self._entered, *((root,) if root is not None and apart else ()), *self._attempts)

    def promise(self, generation: Generation) -> None:
        """From now on somebody may enter it, and needs not tell. A provisional one yields anyway."""
        if not generation.provisional:
            self._attempts = (*self._attempts, electorate_of(generation, entered=False))
            for oldest in self._attempts[: -limits.ATTEMPTS_MAX]:
                self.forgot = max(self.forgot, oldest.number)
            self._attempts = self._attempts[-limits.ATTEMPTS_MAX :]

    def withdraw(self, generation: Generation) -> None:
        """Its proposer, this member, has told nobody to enter it and never will."""
        key = generation.hash64()
        self._attempts = tuple(attempt for attempt in self._attempts if attempt.generation != key)

    def settle(self, generation: Generation) -> None:
        """A generation is entered by this member and, if it is entitled, by all that count in it, as they have said.

        An entitled one settles all earlier promises: what follows needs its majority now. Before all have said so,
        one that is gone may have promised another generation instead, to some that this one leaves out. So until then
        those decide that counted before, and with them those that count in it, as of any promise.

        A provisional one settles only those that are older than its root, whose electorate it goes on with. If it
        counts others than the root that is settled here, both decide.
        """
        electorate = electorate_of(generation, entered=True)
        if not generation.provisional:
            self._entered, self._root, self._attempts = electorate, electorate, ()
        elif self._entered is None or self._entered.number <= electorate.number:
            self._entered = electorate
            self._attempts = tuple(attempt for attempt in self._attempts if attempt.number >= electorate.number)

    def history(self, entered: Generation) -> Electorate:
        """Who decides what follows the generation that this member has entered, for `Standing.history`: as long as it
        is not settled those that counted before."""
        electorate = electorate_of(entered, entered=True)
        unsettled = any(attempt.generation == electorate.generation for attempt in self._attempts)
        if self._entered is None or not unsettled:
            return electorate
        return electorate.model_copy(update={"counted": self._entered.counted, "gone": self._entered.gone})


def _all_of(vote: Electorate) -> set[int]:
    """Those of which half is needed: being gone changes nothing in it."""
    return {rank for rank, _ in vote.counted} | {*vote.gone}


def newest_history(standings: Collection[Standing]) -> Electorate | None:
    """Whose electorate decides, as far as these members know: that of the history that is kept (G4), of the newest
    generation entered, then of who knows it to be settled, then of the most rounds. None if nobody brings a history."""
    brought = [standing for standing in standings if standing.history is not None]
    newest = max(
        brought,
        key=lambda standing: (standing.number, standing.history in standing.votes, standing.complete),
        default=None,
    )
    return None if newest is None else newest.history


def is_entitled(part: Incarnations, standings: Mapping[int, Standing], gone: Collection[tuple[int, int]]) -> bool:
    """Whether this part may go on at once, and no other part can be told the same.

    Args:
        part: those that would go on together.
        standings: by rank, of all of the part, or before they have promised of those that are known: then it is "yes"
            if what the others say can make it so.
        gone: ranks with incarnations.
    """
    votes = [vote for standing in standings.values() for vote in standing.votes]
    # The newest entitled generation that anybody of the part was in. If nobody brings its history, others have it.
    root = max((vote.number for vote in votes if vote.entered), default=0)
    history = newest_history(standings.values())
    if history is None or history.number < root:
        return False
    # A member has made more promises since than it can tell: one of them may have been entered.
    if any(standing.forgot >= root for standing in standings.values()):
        return False
    # Everything older than the root is settled by it; of the rest each needs a quorum, unless it came to nothing.
    asked = [vote for vote in (history, *votes) if vote.number >= root]
    return all(
        has_quorum(vote, part, gone) for vote in asked if vote.entered or not _came_to_nothing(vote, part, standings)
    )


def _came_to_nothing(attempt: Electorate, part: Incarnations, standings: Mapping[int, Standing]) -> bool:
    """Whether nobody can have entered it, or ever will: a member of this part, in the incarnation that it lists, does
    not tell of it. It has never promised it, and now promises another; or it has proposed it and given it up."""
    return any(
        rank not in standings or attempt.generation not in _names(standings[rank])
        for rank, incarnation in attempt.listed
        if part.get(rank) == incarnation
    )


def _names(standing: Standing) -> Iterator[int]:
    return (vote.generation for vote in standing.votes)


def has_quorum(vote: Electorate, part: Incarnations, gone: Collection[tuple[int, int]] = ()) -> bool:
    """More than half of the electorate, or half with its lowest rank, or all that are not gone.

    Where all of the electorate is gone its members decide: nobody can be missed of none, so every part would have it.
    """
    voters = still_there(vote, part, gone)
    # Those that are gone count among the many of which half is needed, for they may have voted elsewhere before.
    everybody = {rank for rank, _ in voters} | {*vote.gone}
    here = {rank for rank, incarnation in voters if part.get(rank) == incarnation}
    if 2 * len(here) > len(everybody) or (2 * len(here) == len(everybody) and min(everybody, default=-1) in here):
        return True
    return all(rank in here or is_gone(part, rank, incarnation, gone) for rank, incarnation in voters)


def still_there(vote: Electorate, part: Incarnations, gone: Collection[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranks with incarnations: those that are counted, or all members of before, where none of them is left."""
    left = any(not is_gone(part, rank, incarnation, gone) for rank, incarnation in vote.counted)
    return vote.counted if left else vote.listed


def is_gone(part: Incarnations, rank: int, incarnation: int, gone: Collection[tuple[int, int]]) -> bool:
    """Is it known to be, or is its device in the part as another incarnation?"""
    return (rank, incarnation) in gone or part.get(rank, incarnation) != incarnation

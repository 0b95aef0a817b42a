"""Which part of a generation's members is entitled to go on, so that never two of them go on apart (dynamic voting).

After Lotem, Keidar and Dolev, "Dynamic voting for consistent primary components" (1997). Those that were counted in the
newest generation decide, and those of every later one that a member has promised, for somebody else may have entered it
and gone on with its majority. Two differences to the paper: members of a generation all have to promise it, so one that
has not, and goes on elsewhere, proves that nobody entered it; and who is gone for good is not waited for.

Who is gone may have voted elsewhere before, where nobody who is here could see it. So being gone helps a part only if
nobody is silent: with all others accounted for, there is nobody left who could have gone on with the gone one's vote.
"""

from collections.abc import Collection, Iterator, Mapping

from meshwire import limits
from meshwire.messages.generation import Electorate, Standing
from meshwire.messages.job import Generation

Incarnations = Mapping[int, int]  # of the members of a part, by rank


def electorate_of(generation: Generation, *, entered: bool) -> Electorate:
    """Who decides what follows it."""
    return Electorate(
        generation=generation.hash64(),
        number=generation.root,
        entered=entered,
        counted=tuple((rank, generation.members[rank].incarnation) for rank in generation.counted),
        gone=generation.gone,
        listed=tuple((rank, member.incarnation) for rank, member in generation.live.items()),
    )


class Votes:
    """What one incarnation has entered and promised: it is remembered as long as that lives, in the job or not."""

    def __init__(self, generation: Generation | None) -> None:
        self._entered = None if generation is None else electorate_of(generation, entered=True)
        self._attempts: tuple[Electorate, ...] = ()  # entitled, promised since the root and not entered
        self.forgot = 0  # number of the newest attempt that is not remembered

    @property
    def told(self) -> tuple[Electorate, ...]:
        """For `Standing.votes`."""
        return self._attempts if self._entered is None else (self._entered, *self._attempts)

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

    def enter(self, generation: Generation) -> None:
        """An entitled one settles all promises of before: what follows has its majority, or is nothing."""
        electorate = electorate_of(generation, entered=True)
        if not generation.provisional:
            self._entered, self._attempts = electorate, ()
        elif self._entered is None or self._entered.number <= electorate.number:
            self._entered = electorate
            self._attempts = tuple(attempt for attempt in self._attempts if attempt.number >= electorate.number)


def newest_history(standings: Collection[Standing]) -> Electorate | None:
    """G4: the history that is kept is of this electorate; None if nobody brings one."""
    brought = [standing for standing in standings if standing.history is not None]
    newest = max(brought, key=lambda standing: (standing.number, standing.complete), default=None)
    return None if newest is None else newest.history


def is_entitled(part: Incarnations, standings: Mapping[int, Standing], gone: Collection[tuple[int, int]]) -> bool:
    """Is this part entitled to go on?

    Args:
        standings: by rank, of all of the part, or before they have promised of those that are known: then it is "yes"
            if what the others say can make it so.
        gone: ranks with incarnations.
    """
    votes = [vote for standing in standings.values() for vote in standing.votes]
    root = max((vote.number for vote in votes if vote.entered), default=0)
    history = newest_history(standings.values())
    if history is None or history.number < root:
        return False  # what was decided there is not known here
    if any(standing.forgot >= root for standing in standings.values()):
        return False
    asked = [vote for vote in (history, *votes) if vote.number >= root]
    return all(
        has_quorum(vote, part, gone) for vote in asked if vote.entered or not _came_to_nothing(vote, part, standings)
    )


def _came_to_nothing(attempt: Electorate, part: Incarnations, standings: Mapping[int, Standing]) -> bool:
    """One of the part had to promise it and has not, or has made and given it up: nobody can enter it any more."""
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

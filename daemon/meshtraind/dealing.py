"""One daemon's part in the deal of samples: what its learner is granted, when an epoch is over, whose share changes."""

from collections.abc import Callable

from meshwire.claims import Ledger, first_batches
from meshwire.messages.learner import EpochOver, Grant, SampleSpace
from meshwire.roundevents import RoundComplete
from meshwire.shares import sizes_by_speed
from meshwire.syncmode import Shares
from meshwire.wiretypes import Wire

LOOK_EVERY_BINDS = 10  # so that the speeds that are looked at were measured with the sizes in force


class Dealing:
    """Feeds the ledger with complete rounds and tells the learner what follows from it (X2, X4, X4a).

    Args:
        notify: sends the learner a notice.
    """

    def __init__(
        self,
        space: SampleSpace,
        members: int,
        rank: int,
        staleness: int,
        shares: Shares,
        notify: Callable[[Wire], None],
    ) -> None:
        self._ledger = Ledger(space, members, first_batches(staleness))
        self._space = space
        self._rank = rank
        self._decides = rank == 0 and shares == "speed" and not space.whole_batches
        self._notify = notify
        self._speeds = [0.0] * members
        self._binds = 0
        self._finished: set[int] = set()
        self._in_barrier: set[int] = set()
        self._epoch = 0  # the oldest that is not over

    def begin(self) -> None:
        """Round 1 may begin: the learner gets its first blocks."""
        self._notify(Grant(blocks=self._ledger.initial(self._rank)))

    def complete(self, done: RoundComplete) -> str | None:
        """Takes the next complete round. Returns what is wrong with one of its binds, or None."""
        granted = self._ledger.complete(done.binds)
        if isinstance(granted, str):
            return granted
        if blocks := granted.get(self._rank):
            self._notify(Grant(blocks=blocks))
        self._tell_over()
        return None

    def finished(self, rank: int) -> None:
        """This member's learner takes no further step: what it holds will not be used."""
        self._finished.add(rank)
        self._tell_over()

    def in_barrier(self, rank: int, inside: bool) -> None:
        """This member's learner waits for all others, so nobody may wait for it: it uses what it holds later."""
        if inside:
            self._in_barrier.add(rank)
            self._tell_over()
        else:
            self._in_barrier.discard(rank)

    def measured(self, rank: int, samples_per_s: float) -> None:
        """A member's speed while it computes; 0: not known yet."""
        self._speeds[rank] = samples_per_s

    def sizes(self) -> tuple[int, ...]:
        """The sizes that the own bind, which is made now, puts in force; empty: they stay. Only rank 0 decides."""
        self._binds += 1
        if not self._decides or self._binds % LOOK_EVERY_BINDS:
            return ()
        return sizes_by_speed(self._speeds, self._space.batch, self._ledger.sizes) or ()

    @property
    def batch(self) -> int:
        """Units of a batch that is granted to this learner now: samples, or 1 with whole batches."""
        return self._ledger.sizes[self._rank]

    def _tell_over(self) -> None:
        """Each epoch once and in order, whether the learner waits for it or not."""
        while (unused := self._ledger.over(self._epoch, self._finished | self._in_barrier)) is not None:
            self._notify(EpochOver(epoch=self._epoch, unused=unused))
            self._epoch += 1

"""One daemon's part in the deal of samples: what its learner is granted, when an epoch is over, whose share changes."""

from collections.abc import Iterable, Mapping

from meshwire.messages.generation import DealState
from meshwire.messages.learner import EpochOver, Grant, SampleSpace
from meshwire.messages.rounds import Bind
from meshwire.samples.ledger import NO_SPEEDS, Ledger, by_speed
from meshwire.sync_modes.batch_sizes import sizes_by_speed
from meshwire.sync_modes.mode import SyncSettings

LOOK_EVERY_BINDS = 10  # so that the speeds that are looked at were measured with the sizes in force


class SampleGrants:
    """What follows for one learner from the ledger of samples (X2 to X4a): the ledger is fed here with complete rounds
    and entered generations, and what the learner is to be told gathers in `notices`, in order.

    Args:
        rank: this member's.
        learning: ranks whose learners compute.
        state: of the ledger at the cut at which this generation is entered, taken before or after the ranks of the
            generation were entered in it; None: before round 1.
        speeds: as of `Ledger`.

    Attributes:
        notices: for the learner, until its owner takes them out.

    Raises:
        ValueError: when an epoch is too short for these ranks.
    """

    def __init__(
        self,
        space: SampleSpace,
        rank: int,
        learning: Iterable[int],
        sync: SyncSettings,
        state: DealState | None = None,
        *,
        speeds: Mapping[int, float] = NO_SPEEDS,
    ) -> None:
        if state is None:
            self._ledger = Ledger(space, learning, sync, speeds)
        else:
            self._ledger = Ledger.restored(space, sync, state, speeds)
            self._ledger.enter(learning)
        self._space = space
        self._rank = rank
        self._by_speed = by_speed(space, sync)
        self.notices: list[Grant | EpochOver] = []
        self._speeds: dict[int, float] = {}
        self._binds = 0
        self._finished: set[int] = set()
        self._in_barrier: set[int] = set()
        self._begun = False
        self._told = False  # the learner knows what it holds
        self._epoch = 0  # the oldest that is not over
        self._tell_over()

    def state(self) -> DealState:
        """What a member that enters the generation needs, between two rounds."""
        return self._ledger.state()

    def begin(self) -> None:
        """The learner is ready: it is told what it holds, once it is one of those that compute."""
        self._begun = True
        self._tell_start()

    def learner_lost(self) -> None:
        """The next one knows nothing."""
        self._begun = self._told = False

    def enter(self, learning: Iterable[int]) -> None:
        """A generation is entered, at its cut, in which these ranks' learners compute (X3)."""
        before = set(self._ledger.sizes)
        granted = self._ledger.enter(learning)
        newcomers = set(self._ledger.sizes) - before
        self._finished -= newcomers
        self._in_barrier -= newcomers
        if self._rank in before and self._rank not in self._ledger.sizes:
            self._begun = self._told = False  # that learner is given up: another one will begin
        elif self._told and (batches := granted.get(self._rank)):
            self.notices.append(Grant(batches=batches))
        else:
            self._tell_start()
        self._tell_over()

    def complete(self, binds: Mapping[int, Bind], least: int = 0) -> Mapping[int, str]:
        """Takes the binds of the next complete round. Returns by rank what is wrong with a bind of it, which covers and
        claims nothing then: all members find the same. `least`: as of `Ledger.complete`."""
        wrong = self._ledger.wrong(binds)
        granted = self._ledger.complete({rank: bind for rank, bind in binds.items() if rank not in wrong}, least)
        assert not isinstance(granted, str), granted
        if self._told and self._rank in granted:
            self.notices.append(Grant(batches=granted[self._rank], step=binds[self._rank].step))
        self._tell_over()
        return wrong

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
        """The sizes that the own bind, which is made now, puts in force, by learning rank; empty: they stay.

        Only the lowest learning rank decides.
        """
        self._binds += 1
        sizes = self._ledger.sizes
        if not self._by_speed or self._rank != min(sizes, default=None) or self._binds % LOOK_EVERY_BINDS:
            return ()
        speeds = [self._speeds.get(rank, 0.0) for rank in sizes]
        return sizes_by_speed(speeds, self._space.batch, tuple(sizes.values())) or ()

    @property
    def epochs(self) -> float:
        """How many epochs' units are in complete rounds, or will be in none."""
        return self._ledger.epochs_used

    @property
    def epochs_over(self) -> int:
        """How many epochs are over."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Units of a batch that is granted to this learner now: samples, or 1 with whole batches; 0: none is."""
        return self._ledger.sizes.get(self._rank, 0)

    def _tell_start(self) -> None:
        """To a learner that knows nothing: which epochs are over, and what it holds, in one notice."""
        if not self._begun or self._told or self._rank not in self._ledger.sizes:
            return
        self._told = True
        if self._epoch:
            self.notices.append(EpochOver(epoch=self._epoch - 1, unused=0))
        self.notices.append(Grant(batches=self._ledger.batches(self._rank)))

    def _tell_over(self) -> None:
        """Each epoch once and in order, whether the learner waits for it or not."""
        while (unused := self._ledger.over(self._epoch, self._finished | self._in_barrier)) is not None:
            if self._told:
                self.notices.append(EpochOver(epoch=self._epoch, unused=unused))
            self._epoch += 1

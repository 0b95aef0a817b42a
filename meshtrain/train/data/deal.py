"""The batches that the daemon has granted to this learner, on their way into the script.

All members agree on who is granted which batch (X1, exactly once; X2, claims; X4, epochs). Here a batch is first
queued; then in hand, from when the DataLoader draws it, which its workers' prefetch does early, until the script gets
it; then unbound, until a step binds it, and with that a round covers it.

The sampler never waits for the daemon: it ends when the queue is empty, and the loader starts another pass over it when
there is more. If it waited inside the DataLoader, batches that its workers have prepared already would wait with it,
and so would the peers whose round lacks them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, Sampler

from meshtrain.errors import UsageError
from meshtrain.train.data.ordering import ALONE, LearnerPlace, LoaderOrder
from meshwire import limits
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from meshwire.samples.pool import Batch
from meshwire.sync_modes.mode import SyncSettings

RECENT_PERIODS = 4


class SampleWaits(Protocol):
    """How the loader waits for the daemon when it has no batch to hand out. The learner's engine does it in a job."""

    def wait_samples(self, until: Callable[[], bool]) -> None:
        """Takes what the daemon says until `until()` is true. The learner counts as computing: rounds wait for it."""

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        """Waits where only the other peers' steps can bring what is waited for: rounds go on without this learner
        meanwhile, by R5 (absent), and are applied. Afterwards a step may begin.

        Args:
            reason: why this learner does nothing, for whoever watches the job.
            what: is waited for, for the error.
        """

    def end_period(self) -> bool:
        """Local steps that no round has covered become a round, by R9 (period). Returns whether there were any."""

    def begin_rehearsal(self) -> None:
        """The script gets a batch that no step needs: until `end_rehearsal`, what it computes counts for nothing."""

    def leave_rehearsal(self) -> None:
        """The script has left its loop: of what it computes, only the next `optimizer.step()` counts for nothing, too.
        Does nothing where none is rehearsed."""

    def end_rehearsal(self) -> None:
        """What the script computes counts. Does nothing where it did already."""


class _Bound(NamedTuple):
    step: int
    batches: tuple[Batch, ...]


class Deal(Sampler[list[Any]]):
    """The part of the samples that this learner is dealt, epoch by epoch. To the DataLoader it is a batch sampler.

    Args:
        devices: to which samples are dealt.
        seed: the job's.
        place: of this learner on its device, with which it shares each batch that is granted (R6).

    Raises:
        NotSupported, UsageError: for loaders that cannot be dealt, as `LoaderOrder` says.

    Attributes:
        epoch: the one whose samples are handed out now.
        begun: whether any of this epoch have been.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        devices: int,
        seed: int,
        sync: SyncSettings,
        place: LearnerPlace = ALONE,
    ) -> None:
        self._order = LoaderOrder(loader, devices, seed, place)
        self._space = self._order.space()
        self._prefetch = (loader.prefetch_factor or 0) * loader.num_workers
        self._sync = sync
        self._orders: dict[int, Sequence[Any]] = {}
        self._queue: deque[Batch] = deque()
        self._in_hand: deque[Batch] = deque()
        self._unbound: list[Batch] = []  # handed to the script since the last bind
        self._sizes = deque([1], RECENT_PERIODS)  # in batches, of what counts for the next claim
        self._granted = False
        self._bound: _Bound | None = None  # the newest step that a round may be on the way for
        self._over = -1  # the newest epoch that is over
        self._rehearses = False
        self.epoch = 0
        self.begun = False

    def describe(self) -> str:
        """The settings in words, for the comparison between peers."""
        return self._order.describe()

    def space(self) -> SampleSpace:
        """How many samples an epoch has, and in which batches: what the daemon must know to deal them."""
        return self._space

    # What the daemon says

    def grant(self, batches: Sequence[Batch], step: int) -> None:
        """More batches: what it holds when it begins, what a bind of `step` has claimed, or what a lost peer held."""
        self._granted = True
        self._queue = deque(sorted([*self._queue, *batches], key=_epoch))
        if self._bound is not None and self._bound.step <= step:
            self._bound = None

    def epoch_over(self, epoch: int) -> None:
        """Whether all samples of this epoch, and of those before, are covered by rounds, on all members: X4
        (epochs)."""
        self._over = max(self._over, epoch)

    @property
    def behind(self) -> bool:
        """Whether the epoch whose samples are handed out is over."""
        return self._is_over()

    def step_lost(self, step: int, retry: bool) -> None:
        """The newest bound step is in no round. `retry`: it was in no bind either, so its samples come again, by R5
        (absent)."""
        bound = self._bound
        if retry and bound is not None and bound.step == step:
            self._queue.extendleft(reversed(bound.batches))
            self._bound = None

    # What a step says

    def bind(self, step: int) -> int:
        """A step binds and covers what was handed out. Returns its claim, by X2 (claims): how many batches this learner
        wants to hold once that round is complete.

        These are: what the loader prefetches; as many as the largest step so far has used, for each of the s+1 rounds
        that may be in flight and of the s+1 steps that may begin before the next round is complete; and one to begin
        with. Of periods that others end (R9) the last few count, for who is slower must not hold what the others could
        use up sooner.
        """
        self._bound = _Bound(step, tuple(self._unbound))
        if self._sync.ends_early:
            self._sizes.append(len(self._unbound))
        else:
            self._sizes[0] = max(len(self._unbound), self._sizes[0])
        self._unbound = []
        wanted = self._prefetch + 2 * (self._sync.staleness + 1) * max(self._sizes) + 1
        return min(wanted, limits.CLAIM_BATCHES_MAX)

    # What the loader does

    def more(self, waits: SampleWaits) -> bool:
        """Waits until there is a batch of this epoch to draw. False: there will be none.

        Nobody waits for the end of an epoch who owes a bind himself: batches handed out that no step has used yet are
        part of the next one. Nor with s>0 in lockstep: there, every learner steps on into the next epoch with the
        others, and what a lost peer held comes first in it. A period of local steps ends with the epoch (R9, period).

        Raises:
            UsageError: when no batch is there and none will come before the next bind.
        """
        self._wait_for_grant(waits)
        while not self._drawable() and waits.end_period():
            self._wait_for_grant(waits)
        if self._starves() and not self._is_over():
            raise UsageError(
                f"one step has taken {len(self._unbound)} batches from the prepared loader, which are all that this "
                "peer holds: it is dealt more when it steps. Accumulate over fewer batches, let --sync "
                "bsp,accumulate=A do it, which knows how many there are, or evaluate on a loader of its own"
            )
        if not self._drawable() and not self._is_over() and self._waits():
            waits.wait_idle(
                f"the samples of epoch {self.epoch + 1} are used up", self.settled, f"the end of epoch {self.epoch + 1}"
            )
        return self._drawable()

    def _wait_for_grant(self, waits: SampleWaits) -> None:
        waits.wait_samples(lambda: bool(self._queue) or self._is_over() or self._starves())

    def settled(self) -> bool:
        """Whether there is more of this epoch, or it is over."""
        return self._drawable() or self._is_over()

    def handed_out(self) -> tuple[Batch, int]:
        """The batch drawn first is handed to the script: its blocks, and how many samples it has."""
        batch = self._in_hand.popleft()
        self._unbound.append(batch)
        self.begun = True
        return batch, len(self._indices(batch))

    def give_back(self) -> None:
        """What the DataLoader has drawn and the script did not get (an iteration that was left) comes first again."""
        self._queue.extendleft(reversed(self._in_hand))
        self._in_hand.clear()

    def next_epoch(self) -> None:
        """This one has nothing more for this learner."""
        self.epoch += 1
        self.begun = False

    def rehearse(self) -> None:
        """The next pass of the DataLoader draws one batch, the first of this epoch, which counts for nothing."""
        self._rehearses = True

    def __iter__(self) -> Iterator[list[Any]]:
        if self._rehearses:
            self._rehearses = False
            yield self._indices((SampleBlock(epoch=self.epoch, first=0, end=self._order.batch),))
            return
        while self._drawable():
            batch = self._queue.popleft()
            self._in_hand.append(batch)
            yield self._indices(batch)

    def __len__(self) -> int:
        """The number of batches of an epoch with equal shares, in rounds; how many of them this learner gets may follow
        from its speed."""
        return self._order.rounds(self._space.total)

    def _drawable(self) -> bool:
        return bool(self._queue) and _epoch(self._queue[0]) <= self.epoch

    def _is_over(self) -> bool:
        return self._over >= self.epoch

    def _starves(self) -> bool:
        """Whether nothing is left, and no round is on the way that would bring more."""
        return self._granted and not self._queue and self._bound is None

    def _waits(self) -> bool:
        return not self._unbound and (self._sync.staleness == 0 or not self._sync.lockstep)

    def _indices(self, batch: Batch) -> list[Any]:
        units = [unit for block in batch for unit in self._order.dealt(self._order_of(block.epoch), block)]
        return self._order.part(units)

    def _order_of(self, epoch: int) -> Sequence[Any]:
        if epoch not in self._orders:
            order = self._order.of(epoch)
            self._orders = {known: self._orders[known] for known in self._orders if known >= self.epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]


def _epoch(batch: Batch) -> int:
    return batch[0].epoch

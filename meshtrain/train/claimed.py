"""The prepared loader where samples are claimed as learners go: it hands out the blocks that the daemon grants (X2).

Blocks lie in a queue until the DataLoader draws them, which its workers' prefetch does early, and are in hand from then
until their batch is handed to the script. The sampler never waits: it ends when the queue is empty, and the loader goes
on with a new pass over it when there is more. So nobody ever waits while a batch is in hand.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.device import moved
from meshtrain.train.loader import OnBatch, kept_settings
from meshtrain.train.ordering import LoaderOrder
from meshwire import limits
from meshwire.claims import PREFETCH_MAX, first_batches
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock

log = logging.getLogger("meshtrain")

Wait = Callable[[Callable[[], bool], str], None]  # until when, and what for in words


class _Bound(NamedTuple):
    step: int
    blocks: tuple[SampleBlock, ...]
    claim: int


class ClaimedDeal(Sampler[list[Any]]):
    """This learner's granted blocks, and what is to be claimed; for the DataLoader a batch sampler.

    Args:
        staleness: the bound s.

    Raises:
        NotSupported, UsageError: for loaders that cannot be dealt, as `LoaderOrder` says.

    Attributes:
        epoch: the one whose samples are handed out now.
    """

    def __init__(self, loader: DataLoader[Any], world_size: int, seed: int, staleness: int) -> None:
        self._order = LoaderOrder(loader, world_size, seed)
        self._space = self._order.space()
        self._prefetch = _prefetch_factor(loader) * loader.num_workers
        self._staleness = staleness
        self._orders: dict[int, Sequence[Any]] = {}
        self._queue: deque[SampleBlock] = deque()
        self._in_hand: deque[SampleBlock] = deque()
        self._unbound = 0  # batches handed to the script since the last bind
        self._step_batches = 1  # the most that one step has used
        self._outstanding = first_batches(staleness)  # batches that will be granted without a further claim
        self._bound: _Bound | None = None
        self._over = -1  # the newest epoch that is over
        self.epoch = 0

    def describe(self) -> str:
        """For the comparison between peers."""
        return self._order.describe()

    def space(self) -> SampleSpace:
        """What the daemon is told."""
        return self._space

    # What the daemon says

    def grant(self, blocks: Sequence[SampleBlock]) -> None:
        """More blocks: the first lot, or what was claimed with a step."""
        self._outstanding -= len(blocks)
        self._queue.extend(blocks)

    def epoch_over(self, epoch: int) -> None:
        """X4: this epoch's blocks are covered, those of all members."""
        self._over = max(self._over, epoch)

    def step_lost(self, step: int, retry: bool) -> None:
        """The newest bound step is in no round. `retry`: it was in no bind either, so its samples come again (R5)."""
        bound = self._bound
        if retry and bound is not None and bound.step == step:
            self._queue.extendleft(reversed(bound.blocks))
            self._outstanding -= bound.claim
            self._bound = None

    # What a step says

    def bind(self, step: int, blocks: Sequence[SampleBlock]) -> int:
        """A step binds, covering `blocks`. Returns how many batches it claims (X2).

        Held are to be: what the loader prefetches; for each of the s+1 rounds that may be in flight, and for the step
        in hand, as many as the largest step so far has used; and one to begin with.
        """
        self._unbound = 0
        self._step_batches = max(self._step_batches, len(blocks))
        wanted = self._prefetch + (self._staleness + 2) * self._step_batches + 1
        held = len(self._queue) + len(self._in_hand)
        claim = max(0, min(wanted, limits.CLAIM_BATCHES_MAX) - held - self._outstanding)
        self._outstanding += claim
        self._bound = _Bound(step, tuple(blocks), claim)
        return claim

    # What the loader does

    def ready(self, wait: Wait) -> bool:
        """Waits until there is a block of this epoch to draw. False: this learner has got all that it will get of it.

        Raises:
            UsageError: when no block is there and none will come before the next bind.
        """
        wait(lambda: bool(self._queue) or self.is_over(self.epoch) or not self._outstanding, "samples")
        if not self._queue and not self.is_over(self.epoch):
            raise UsageError(
                f"one step has taken {self._unbound} batches from the prepared loader, which are all that this peer "
                "holds: it is dealt more when it steps. Accumulate over fewer batches, evaluate on a loader of its "
                "own, or submit with --shares equal --straggler wait"
            )
        return self._drawable()

    def handed_out(self) -> tuple[SampleBlock, int]:
        """The batch drawn first is handed to the script: its block, and how many samples it has."""
        block = self._in_hand.popleft()
        self._unbound += 1
        return block, len(self._indices(block))

    def give_back(self) -> None:
        """What is in hand was drawn in vain: it comes first again."""
        self._queue.extendleft(reversed(self._in_hand))
        self._in_hand.clear()

    def end_epoch(self, wait_until_over: Callable[[int], None]) -> None:
        """Waits, unless this learner itself still owes a bind, and turns to the next epoch.

        Batches handed out that no step has used yet are part of the next one; nobody can wait for them here.
        """
        if not self.is_over(self.epoch) and not self._unbound:
            wait_until_over(self.epoch)
        self.epoch += 1

    def is_over(self, epoch: int) -> bool:
        """Whether the daemon has said so."""
        return self._over >= epoch

    def __iter__(self) -> Iterator[list[Any]]:
        while self._drawable():
            block = self._queue.popleft()
            self._in_hand.append(block)
            yield self._indices(block)

    def __len__(self) -> int:
        """With equal shares, in rounds; how many batches this learner gets follows from its speed."""
        return self._order.rounds(self._space.total)

    def _drawable(self) -> bool:
        return bool(self._queue) and self._queue[0].epoch <= self.epoch

    def _indices(self, block: SampleBlock) -> list[Any]:
        order = self._order_of(block.epoch)[block.first : block.end]
        return [item for batch in order for item in batch] if self._order.whole_batches else list(order)

    def _order_of(self, epoch: int) -> Sequence[Any]:
        if epoch not in self._orders:
            order = self._order.of(epoch)
            if len(order) != self._space.total:
                raise NotSupported(
                    f"the loader's sampler gives {len(order)} in epoch {epoch + 1}, and its length was "
                    f"{self._space.total} when the job began, by which all peers deal: give every epoch that length, "
                    "or submit with --shares equal --straggler wait"
                )
            self._orders = {known: self._orders[known] for known in self._orders if known >= self.epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]


class ClaimedLoader(DataLoader[Any]):
    """A DataLoader over the granted blocks. An iteration ends with the epoch, when all peers' samples of it are used.

    One that was left early is gone on with by the next iteration.

    Args:
        on_batch: called with the samples of a batch when the script gets it.
        device: batches come on it.
        wait: takes in what the daemon says until a condition holds.
        end_epoch: returns once the daemon has told that this epoch is over, and that the step may begin.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        claimed: ClaimedDeal,
        on_batch: OnBatch,
        device: torch.device,
        wait: Wait,
        end_epoch: Callable[[int], None],
    ) -> None:
        kept = kept_settings(loader)
        if loader.num_workers and (factor := _prefetch_factor(loader)) != loader.prefetch_factor:
            log.warning(
                "prefetch_factor is %d, not %s: samples are dealt at most %d batches ahead of the %d workers",
                *(factor, loader.prefetch_factor, PREFETCH_MAX, loader.num_workers),
            )
            kept["prefetch_factor"] = factor
        super().__init__(loader.dataset, batch_sampler=claimed, **kept)
        self._deal = claimed
        self._on_batch = on_batch
        self._device = device
        self._wait = wait
        self._end_epoch = end_epoch
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._iterations += 1
        self._deal.give_back()
        return self._batches(self._iterations)

    def _batches(self, iteration: int) -> Iterator[Any]:
        epoch = self._deal.epoch
        try:
            while self._deal.epoch == epoch:
                self._check_newest(iteration)
                if not self._deal.ready(self._wait):
                    self._deal.end_epoch(self._end_epoch)
                    continue
                for batch in super().__iter__():
                    block, samples = self._deal.handed_out()
                    self._on_batch([block], samples)
                    yield batch if self._device.type == "cpu" else moved(batch, self._device)
                    self._check_newest(iteration)
        finally:
            if iteration == self._iterations:
                self._deal.give_back()

    def _check_newest(self, iteration: int) -> None:
        if iteration != self._iterations:
            raise UsageError(
                "this iteration over the prepared loader was ended by a later iter(loader), which goes on with the "
                "same epoch: read the loader in one place at a time"
            )


def _prefetch_factor(loader: DataLoader[Any]) -> int:
    """Batches that each worker prefetches: the loader's own number, or less so that the first lot outlasts them.

    Raises NotSupported when there are too many workers.
    """
    if loader.num_workers > PREFETCH_MAX:
        raise NotSupported(
            f"num_workers={loader.num_workers}: each worker holds a batch, and at most {PREFETCH_MAX} are dealt so far "
            f"ahead: use num_workers={PREFETCH_MAX} or fewer"
        )
    return min(loader.prefetch_factor or 2, PREFETCH_MAX // max(1, loader.num_workers))

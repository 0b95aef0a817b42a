"""The loader that `mt.prepare` returns: a DataLoader over this learner's deal, which counts what it hands out."""

import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.data.deal import Deal, SampleWaits
from meshtrain.train.device import moved
from meshwire.messages.rounds import SampleBlock

log = logging.getLogger("meshtrain")

# What is taken over from the script's loader; samplers and batch sizes are replaced by the deal.
KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class CountsSamples(Protocol):
    """Is told of each batch that the script gets: `StepSamples` in a job."""

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        """A batch of these blocks, with so many samples in them."""


class DealtLoader(DataLoader[Any]):
    """The loader that the script gets back from `mt.prepare`. An iteration over it is an epoch: it ends when all peers
    together have used that epoch's samples.

    After a `break` the next iteration continues the same epoch; if nothing of it is left, it is the next epoch. An
    epoch that was over before this learner had any of it yields one batch, with which a step is rehearsed: so a script
    that starts again in the middle of a job runs through the past epochs at once, and finds its loss behind each.

    Args:
        samples: counts what the script gets.
        device: batches come on it.
        waits: waits for more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        deal: Deal,
        samples: CountsSamples,
        device: torch.device,
        waits: SampleWaits,
    ) -> None:
        kept = {name: getattr(loader, name) for name in KEPT}
        super().__init__(loader.dataset, batch_sampler=deal, **kept)
        self._deal = deal
        self._samples = samples
        self._device = device
        self._waits = waits
        self._iterations = 0
        self._first: Any = None  # batch of an epoch of which there was nothing for this learner
        self._rehearsals = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._iterations += 1
        self._waits.end_rehearsal()
        self._deal.give_back()
        return self._batches(self._iterations)

    def _batches(self, iteration: int) -> Iterator[Any]:
        deal = self._deal
        self._check_newest(iteration)
        if deal.begun and not deal.more(self._waits):
            deal.next_epoch()
        try:
            while deal.more(self._waits):
                for batch in super().__iter__():
                    self._samples.add(*deal.handed_out())
                    yield self._placed(batch)
                    self._check_newest(iteration)
            if not deal.begun:
                batch = self._rehearsed()
                deal.next_epoch()  # however the script leaves its loop
                self._waits.begin_rehearsal()
                try:
                    yield batch
                    self._check_newest(iteration)
                finally:
                    if iteration == self._iterations:
                        self._waits.leave_rehearsal()
                return
            deal.next_epoch()
        finally:
            if iteration == self._iterations:
                deal.give_back()

    def _rehearsed(self) -> Any:
        """The batch for an epoch of which this learner gets nothing. Workers take long to start: they load one for all
        such epochs."""
        if not self._rehearsals:
            log.warning(
                "of epoch %d nothing is left for this device: the script runs through it with one batch, which counts "
                "for nothing, and so through all others that are over",
                self._deal.epoch + 1,
            )
        if not self._rehearsals or not self.num_workers:
            self._deal.rehearse()
            (self._first,) = super().__iter__()
        self._rehearsals += 1
        return self._placed(copy.deepcopy(self._first) if self.num_workers else self._first)

    def _placed(self, batch: Any) -> Any:
        return batch if self._device.type == "cpu" else moved(batch, self._device)

    def _check_newest(self, iteration: int) -> None:
        if iteration != self._iterations:
            raise UsageError(
                "this iteration over the prepared loader was ended by a later iter(loader), which goes on with the "
                "same epoch: read the loader in one place at a time"
            )


def dealable(loader: object) -> DataLoader[Any] | None:
    """The loader, if its samples can be dealt; None when each peer must draw for itself. Raises NotSupported."""
    if not isinstance(loader, DataLoader):
        raise NotSupported(
            f"mt.prepare deals the samples of a torch DataLoader, not of a {type(loader).__name__}: "
            "give it a DataLoader, or none, and every peer draws its own samples"
        )
    if isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise NotSupported(
            f"{type(loader).__name__} iterates in its own way, so its samples cannot be dealt: use a plain DataLoader"
        )
    return loader

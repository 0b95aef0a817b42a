"""The prepared loader: a DataLoader over what this learner is dealt, which counts what it hands out (X1, X4)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.data.deal import Deal, SampleWaits
from meshtrain.train.device import moved
from meshwire.messages.rounds import SampleBlock

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

OnBatch = Callable[[Sequence[SampleBlock], int], None]  # blocks, samples in them


class DealtLoader(DataLoader[Any]):
    """A DataLoader over this learner's deal. An iteration is an epoch, and ends when there is no more of it.

    One that was left early is gone on with by the next iteration; if nothing of it is left by then, that one is the
    next epoch. An epoch that was over before this learner had any of it yields nothing: a script that begins again in
    the middle of the job runs through the epochs that are past at once.

    Args:
        on_batch: called with the samples of a batch when the script gets it.
        device: batches come on it.
        waits: how it waits for more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        deal: Deal,
        on_batch: OnBatch,
        device: torch.device,
        waits: SampleWaits,
    ) -> None:
        kept = {name: getattr(loader, name) for name in KEPT}
        super().__init__(loader.dataset, batch_sampler=deal, **kept)
        self._deal = deal
        self._on_batch = on_batch
        self._device = device
        self._waits = waits
        self._iterations = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._iterations += 1
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
                    self._on_batch(*deal.handed_out())
                    yield batch if self._device.type == "cpu" else moved(batch, self._device)
                    self._check_newest(iteration)
            deal.next_epoch()
        finally:
            if iteration == self._iterations:
                deal.give_back()

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

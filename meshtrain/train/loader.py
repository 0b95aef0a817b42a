"""The prepared loader: every peer gets other samples of one common order, and counts those it hands out (X1, X4)."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from meshtrain.errors import NotSupported
from meshtrain.train.device import moved
from meshtrain.train.ordering import LoaderOrder
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from meshwire.samples import deal

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


class Deal(Sampler[list[Any]]):
    """One rank's batches of every epoch, as a batch sampler.

    With batches of a sampler of the script's own, these are dealt whole: one each, and of a remainder smaller than
    the number of peers some get a second one, joined to the first.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> None:
        self._order = LoaderOrder(loader, world_size, seed)
        self._rank = rank
        self._sizes = [self._order.batch] * world_size
        self._batches: Sequence[tuple[list[Any], SampleBlock]] = ()

    def describe(self) -> str:
        """For the comparison between peers."""
        return self._order.describe()

    def space(self) -> SampleSpace:
        """What the daemon is told."""
        return self._order.space()

    def start_epoch(self, epoch: int) -> Sequence[SampleBlock]:
        """Deals the epoch that is iterated next; the blocks of its batches in their order."""
        order, whole = self._order.of(epoch), self._order.whole_batches
        bounds = list(accumulate(map(len, order), initial=0)) if whole else range(len(order) + 1)
        batches = []
        for index in range(self._order.rounds(len(order))):
            first, end = deal(len(order), self._sizes, index, drop_last=self._order.drop_last)[self._rank]
            dealt = list(order[first:end])
            indices = [item for batch in dealt for item in batch] if whole else dealt
            batches.append((indices, SampleBlock(epoch=epoch, first=bounds[first], end=bounds[end])))
        self._batches = batches
        return [block for _, block in batches]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter([indices for indices, _ in self._batches])

    def __len__(self) -> int:
        return self._order.rounds(self._order.total)


class DealtLoader(DataLoader[Any]):
    """A DataLoader over this rank's deal. Every iteration over it is one epoch.

    Args:
        on_batch: called with the samples of a batch when the script gets it.
        device: batches come on it.
    """

    def __init__(self, loader: DataLoader[Any], dealt: Deal, on_batch: OnBatch, device: torch.device) -> None:
        super().__init__(loader.dataset, batch_sampler=dealt, **kept_settings(loader))
        self._deal = dealt
        self._on_batch = on_batch
        self._device = device
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        blocks = self._deal.start_epoch(self._epoch)
        self._epoch += 1
        return self._counted(super().__iter__(), blocks)

    def _counted(self, batches: Iterator[Any], blocks: Sequence[SampleBlock]) -> Iterator[Any]:
        for batch, block in zip(batches, blocks, strict=True):
            self._on_batch([block], block.end - block.first)
            yield batch if self._device.type == "cpu" else moved(batch, self._device)


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of the DataLoader that takes a script's place."""
    return {name: getattr(loader, name) for name in KEPT}


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

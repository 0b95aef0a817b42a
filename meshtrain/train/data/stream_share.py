"""A stream of samples on several devices: of what an IterableDataset yields each of m takes every m-th item.

No deal is possible, for nobody knows how much a stream holds: each device reads all of it and skips the others' items.
A data set that asks for `mt.rank()` or `mt.world_size()` takes its part itself, and is read as it is.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshtrain.train.data.loader import KEPT

log = logging.getLogger("meshtrain")

_asked = 0  # how often this process was asked for its rank, or how many there are


def note_asked() -> None:
    """The script, or its data set, asks for its rank, or how many devices there are."""
    global _asked
    _asked += 1


class StreamShare(IterableDataset[Any]):
    """The part of a data set's items that one of several devices takes. All else of the data set can be had from this
    one, such as `set_epoch`.

    Args:
        rank: of this device.
        count: of devices that take a part.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, count: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        before, shares = _asked, True
        for number, item in enumerate(self._dataset):
            if not number:
                shares = _asked == before  # later it may be the script's loop that asks, between two items
            if not shares or number % self._count == self._rank:
                yield item

    def __len__(self) -> int:
        return -(-(len(self._dataset) - self._rank) // self._count)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled it has nothing yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


def shared_stream(loader: Any, rank: int, count: int) -> Any:
    """The loader, over this device's part of its stream; itself where its data set takes its part, as far as one sees,
    or where it iterates in its own way."""
    if type(loader) is not DataLoader or not isinstance(loader.dataset, IterableDataset):
        return loader
    if _asked:
        if rank == 0:
            log.warning(
                "mt.rank() or mt.world_size() was asked for before mt.prepare: the IterableDataset is taken to have "
                "its part by that, and is read as it is"
            )
        return loader
    kept = {name: getattr(loader, name) for name in KEPT}
    share = StreamShare(loader.dataset, rank, count)
    return DataLoader(share, batch_size=loader.batch_size, drop_last=loader.drop_last, **kept)

"""The order of an epoch's samples, equal on all peers: it follows from the job's seed and the epoch's number."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from meshtrain.errors import NotSupported, UsageError
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock
from meshwire.samples.epochs import epoch_seed, part_of_learner, rounds_per_epoch


class LearnerPlace(NamedTuple):
    """Which learner of how many of its device (R6)."""

    number: int = 0
    learners: int = 1


ALONE = LearnerPlace()


class Ordering:
    """Runs the script's own sampler once per epoch under a generator that all peers seed alike.

    Args:
        sampler: of samples, or of whole batches.
        seed: the job's.

    Raises:
        NotSupported: for a sampler that draws from a source of its own, or deals already.
    """

    def __init__(self, sampler: Sampler[Any], seed: int) -> None:
        name = type(sampler).__name__
        inner = getattr(sampler, "sampler", None) if isinstance(sampler, BatchSampler) else None
        if isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
            raise NotSupported(
                "DistributedSampler deals the samples, and so does mt.prepare: give it a DataLoader with shuffle=True, "
                "or with the sampler that the DistributedSampler wraps"
            )
        if not hasattr(sampler, "__len__"):
            raise NotSupported(f"{name} has no length, so its samples cannot be dealt: add __len__, or shuffle=True")
        self._sampler = sampler
        self._seed = seed
        if type(sampler) not in (RandomSampler, SequentialSampler) and self._run(0) != self._run(0):
            raise NotSupported(
                f"{name} gives another order each time although torch, numpy and random are seeded alike, so the peers "
                "would not agree on it: draw from torch's generator inside __iter__, or use shuffle=True"
            )

    def __len__(self) -> int:
        length: int = len(self._sampler)
        return length

    def of(self, epoch: int) -> Sequence[Any]:
        """The epoch's indices, or batches of indices."""
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(self))
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            generator = torch.Generator().manual_seed(epoch_seed(self._seed, epoch))
            return torch.randperm(len(self), generator=generator).tolist()
        return self._run(epoch)

    def _run(self, epoch: int) -> list[Any]:
        with _seeded(epoch_seed(self._seed, epoch), self._sampler):
            return list(self._sampler)


class LoaderOrder:
    """What the script's loader reads, epoch by epoch: samples, or the batches of a sampler of its own, whole.

    With several learners on each device (R6) its daemon deals groups of so many, one for each of them, and nothing is
    left over: the last group of an epoch takes what is no whole one.

    Args:
        seed: the job's.
        place: of this learner on its device.

    Raises:
        NotSupported: for a loader without batches, or with a sampler that `Ordering` refuses.
        UsageError: for fewer samples than a round of `members` needs.
    """

    def __init__(self, loader: DataLoader[Any], members: int, seed: int, place: LearnerPlace = ALONE) -> None:
        sampler = loader.batch_sampler
        if sampler is None:
            raise NotSupported(
                "a DataLoader with batch_size=None does not say how many samples its batches hold: give it a "
                "batch_size, or a batch_sampler"
            )
        plain = sampler if type(sampler) is BatchSampler else None  # else its batches are the script's own
        self._ordering = Ordering(plain.sampler if plain is not None else sampler, seed)  # type: ignore[arg-type]
        self.whole_batches = plain is None
        self.batch = plain.batch_size if plain is not None else 1
        self.drop_last = plain is not None and plain.drop_last
        self._length = len(self._ordering)
        self._members = members
        self._place = place
        self.rounds(self.total)

    @property
    def total(self) -> int:
        """Samples of an epoch, or batches of the script's own sampler; of several learners, groups of them."""
        return self._length // self._place.learners

    def describe(self) -> str:
        """The loader in words, for the comparison between peers: the same one must be given on all of them."""
        unit = "batches of its own sampler" if self.whole_batches else f"samples in batches of {self.batch}"
        return f"{self._length} {unit}{', the last short one dropped' if self.drop_last else ''}"

    def space(self) -> SampleSpace:
        """How many samples an epoch has, and in which batches: what the daemon must know to deal them."""
        return SampleSpace(
            total=self.total, batch=self.batch, whole_batches=self.whole_batches, drop_last=self.drop_last
        )

    def rounds(self, total: int) -> int:
        """How many rounds an epoch of `total` has with equal shares."""
        try:
            return rounds_per_epoch(total, [self.batch] * self._members, drop_last=self.drop_last)
        except ValueError as error:
            groups = f" (in groups of {self._place.learners}, a sample for each learner of a device)"
            raise UsageError(f"{error}{groups if self._place.learners > 1 else ''}") from error

    def of(self, epoch: int) -> Sequence[Any]:
        """The epoch's indices, or batches of indices. Raises NotSupported where these are not as many as before."""
        order = self._ordering.of(epoch)
        if len(order) != self._length:
            raise NotSupported(
                f"the loader's sampler gives {len(order)} in epoch {epoch + 1}, and its length was {self._length} when "
                "the job began, by which all peers deal: give every epoch that length"
            )
        return order

    def part(self, units: Sequence[Any]) -> list[Any]:
        """Of what its device has for a batch, the indices of this learner's samples, in one list."""
        first, end = part_of_learner(len(units), *self._place)
        own = units[first:end]
        return [item for unit in own for item in unit] if self.whole_batches else list(own)

    def dealt(self, order: Sequence[Any], block: SampleBlock) -> Sequence[Any]:
        """Of an epoch's order, what its device is dealt with this block."""
        count = self._place.learners
        whole = block.end >= self.total and not self.drop_last
        return order[block.first * count : len(order) if whole else block.end * count]


@contextmanager
def _seeded(seed: int, sampler: object) -> Iterator[None]:
    """Seeds all common sources of randomness, and puts them back."""
    owners = [owner for owner in (sampler, getattr(sampler, "sampler", None)) if _has_generator(owner)]
    before = [(owner, owner.generator) for owner in owners]  # type: ignore[union-attr]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for owner in owners:
            owner.generator = torch.Generator().manual_seed(seed)  # type: ignore[union-attr]
        try:
            yield
        finally:
            for owner, generator in before:
                owner.generator = generator  # type: ignore[union-attr]
            random.setstate(python)
            np.random.set_state(numpy)


def _has_generator(owner: object) -> bool:
    return isinstance(getattr(owner, "generator", None), torch.Generator)

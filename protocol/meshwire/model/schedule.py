"""How much of each tensor travels in which rounds, where that is not all of it: a vector whose length follows from the
round's number alone (T1).

It is part of the manifest, so all members have the same. Rounds that run again, learners that come in later and resumed
jobs find the same lengths without a word.
"""

from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.message_base import Wire
from meshwire.sync_modes.mode import SyncSettings

Counts = tuple[int, ...]
"""By tensor, in the manifest's order: how many of its values travel. 0 for what never does."""


class Stretch(Wire):
    """The rounds from `first` on, until the next stretch begins.

    Attributes:
        counts: see `Counts`.
        whole_every: in the rounds that are multiples of it all values travel; 0: in none.
    """

    first: Annotated[int, Field(ge=1)]
    counts: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=limits.TENSORS_MAX)]
    whole_every: Annotated[int, Field(ge=0)] = 0


class Travel(Wire):
    """All rounds of a job, in stretches.

    Attributes:
        every: after so many rounds the stretches begin again, from the first one on; 0: the last one has no end.
    """

    stretches: Annotated[tuple[Stretch, ...], Field(min_length=1, max_length=limits.STRETCHES_MAX)]
    every: Annotated[int, Field(ge=0, le=limits.STRETCHES_MAX)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        firsts = [stretch.first for stretch in self.stretches]
        if firsts[0] != 1 or any(a >= b for a, b in pairwise(firsts)):
            raise ValueError(f"stretches of rounds begin at {firsts}; the first is 1, and they ascend")
        if self.every and (firsts[-1] > self.every or any(stretch.whole_every for stretch in self.stretches)):
            raise ValueError(f"stretches that begin at {firsts} do not come again every {self.every} rounds")
        return self

    def of(self, number: int) -> Counts | None:
        """Of a round, numbered from 1; None where all values travel."""
        at = turn(number, self.every)
        stretch = next(each for each in reversed(self.stretches) if each.first <= at)
        return None if stretch.whole_every and number % stretch.whole_every == 0 else stretch.counts

    def last(self, counts: Counts | None) -> int | None:
        """The last round that is `counts` long; None if there is no last one, 0 if there is none at all."""
        if self.every:
            return None if any(stretch.counts == counts for stretch in self.stretches) else 0
        newest: int | None = 0
        for stretch, following in zip(self.stretches, (*self.stretches[1:], None), strict=True):
            found: int | None = None
            if following is not None:
                end, every = following.first - 1, stretch.whole_every
                found = end // every * every if every and counts is None else end - (every > 0 and end % every == 0)
            takes = stretch.whole_every > 0 if counts is None else counts == stretch.counts and stretch.whole_every != 1
            if takes and (found is None or found >= stretch.first):
                newest = found
        return newest


def turn(number: int, every: int) -> int:
    """Which of `every` rounds a round, numbered from 1, is; it itself where none come again."""
    return (number - 1) % every + 1 if every else number


def refusal(sync: SyncSettings, codec: CodecSpec) -> str | None:
    """Why a vector whose length changes does not go with these; None if it does.

    Parts that take turns (`sync.fragments`) may be on their way while the next one's period begins: there a learner
    that computes is in every round, so it knows its step's round when that begins.
    """
    if sync.staleness and not sync.overlaps:
        return (
            f"--sync {sync.text()}: a gradient is written before it is known which round it is for, and the rounds' "
            "vectors differ in length: use --sync bsp, or local:H"
        )
    if sync.gossip:
        return (
            f"--sync {sync.text()}: laptops mix all of their weights within a period, and not all values travel in "
            "every round: use --sync bsp, or local:H"
        )
    if sync.central:
        return (
            f"--sync {sync.text()}: each laptop has weights of its own that go on from round to round, and not all "
            "values travel in every one: use --sync bsp, or local:H"
        )
    if codec.family.transforms or codec.momentum or codec.of_momentum:
        return (
            f"--codec {codec}: it builds on what earlier rounds have sent of each value, and not all travel in every "
            "round: use another, such as int8 or topk"
        )
    return None

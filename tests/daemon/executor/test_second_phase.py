"""Buckets whose second phase waits for the sums of their precursors (C2, G2, G6, V1)."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshtraind.contributions.contribution import InTwoPhases
from meshtraind.executor.second_phase import SecondPhases
from meshwire.collectives.exchange import Part

ROUND, BUCKET, PRECURSOR = 7, 1, 3


class Own(InTwoPhases):
    """A contribution whose second phase is what it is told to be."""

    def __init__(self, found: Part) -> None:
        super().__init__(())
        self.found, self.asked = found, 0

    def second(self, bucket: int) -> Part:
        assert bucket == BUCKET
        self.asked += 1
        return self.found

    def _take(self, *_: object) -> None: ...

    def values(self, *_: object) -> Any: ...

    def encoded(self, *_: object) -> None: ...


class Added:
    """Notes what is added."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Part, float]] = []

    def add(self, _round: object, bucket: int, part: Part, weight: float) -> None:
        self.parts.append((bucket, part, weight))


def round_with(*, poisoned: bool) -> Any:
    layout = SimpleNamespace(precursors={BUCKET: PRECURSOR})
    exchanges = [SimpleNamespace(poisoned=poisoned) for _ in range(PRECURSOR + 1)]
    return SimpleNamespace(number=ROUND, form=SimpleNamespace(layout=layout), exchanges=exchanges)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "poisoned", "made", "second"),
    [
        (Part.DATA, False, Part.DATA, Part.DATA),
        (Part.DATA, False, Part.POISON, Part.POISON),
        (Part.DATA, True, Part.DATA, Part.POISON),
        (Part.POISON, True, Part.DATA, Part.POISON),
        (Part.NOTHING, False, Part.DATA, Part.NOTHING),
        (Part.NOTHING, True, Part.DATA, Part.NOTHING),
    ],
)
async def test_what_is_added_follows_from_the_first_phase(
    first: Part, poisoned: bool, made: Part, second: Part
) -> None:
    """V1: of sums that are poison nothing is made; R4: who has added nothing adds nothing, after the first phase."""
    own, added = Own(made), Added()
    phases = SecondPhases({ROUND: own}, added)
    phases.begin(ROUND, BUCKET, first, 2.0)
    await asyncio.sleep(0)
    assert not added.parts, "before the sums of the precursor are here"
    phases.summed(round_with(poisoned=poisoned), BUCKET)
    assert not added.parts, "not from within what has completed them"
    await asyncio.sleep(0)
    assert added.parts == [(BUCKET, second, 2.0)]
    assert own.asked == (first is Part.DATA and not poisoned)


@pytest.mark.asyncio
async def test_a_fence_voids_what_waits() -> None:
    """G2, G6: sums of before it are nobody's, and what is contributed again begins with the first phase."""
    added = Added()
    phases = SecondPhases({ROUND: Own(Part.DATA)}, added)
    phases.begin(ROUND, BUCKET, Part.DATA, 2.0)
    phases.summed(round_with(poisoned=False), BUCKET)
    phases.fence()
    phases.begin(ROUND, BUCKET, Part.DATA, 2.0)
    await asyncio.sleep(0)
    assert not added.parts
    phases.summed(round_with(poisoned=False), BUCKET)
    await asyncio.sleep(0)
    assert added.parts == [(BUCKET, Part.DATA, 2.0)]
    phases.summed(round_with(poisoned=False), BUCKET)
    phases.close()
    await asyncio.sleep(0)
    assert len(added.parts) == 1

"""What a round's leader tells all others in the vector that is summed: places of chosen values, and what was learnt.

All others add zeros there. Leaders are chosen by the generation in which a part is encoded, and a round that runs again
in another one sends the same parts (C1): so it can have two leaders, or none. A 1 that every leader adds tells; then
nobody has said anything, as also in a void round. What was said in a round that counts, all hear alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.base import Values
from meshwire.encoded_layout.lgc import PLACE_MIDDLE, Chosen

Places = NDArray[np.int32]

ROUNDED = 0.25  # of a 1, at most: far less in fp16, and two leaders add 2
TOLD_MAX = 2 * PLACE_MIDDLE  # more says nobody


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """What a leader has announced in one bucket of one round.

    Attributes:
        places: of the chosen values of each block in turn that it is about, within the block: (blocks, chosen).
        learnt: what says how values become latents, in whatever form; empty where nothing is announced.
    """

    places: Places
    learnt: Values


def announce(chosen: Chosen, bucket: int, announced: Announced, out: Values) -> None:
    """Writes what a leader adds to the vector.

    Args:
        out: values of the vector that is sent, all that is announced in the bucket.
    """
    out.fill(0.0)
    out[0] = 1.0
    # A number that is not 0 and small: the mean of it, in fp16, is off by a part in 2^11, less than 1/2.
    places = announced.places.ravel()
    out[1 : 1 + len(places)] = np.where(places < PLACE_MIDDLE, places + 1, PLACE_MIDDLE - 1 - places)
    first = 1 + chosen.announced_places(bucket)
    out[first : first + announced.learnt.size] = announced.learnt.ravel()


def heard(chosen: Chosen, number: int, bucket: int, mean: Values, weight: float) -> Announced | None:
    """Reads what was announced in the mean of what all have added; None if no leader, or more than one, has said
    anything, or what no leader says.

    Args:
        weight: of the round, summed.
    """
    if not abs(float(mean[0]) * weight - 1.0) < ROUNDED:
        return None
    blocks = chosen.announced_blocks(bucket, number)
    count = len(blocks) * chosen.block_chosen
    told = np.clip(np.rint(mean[1 : 1 + count].astype(np.float64) * weight), -TOLD_MAX, TOLD_MAX).astype(np.int32)
    places = np.where(told > 0, told - 1, PLACE_MIDDLE - 1 - told).astype(np.int32).reshape(-1, chosen.block_chosen)
    if not _are_places(chosen, bucket, blocks, places):
        return None
    first = 1 + chosen.announced_places(bucket)
    with np.errstate(over="ignore", invalid="ignore"):  # found here
        learnt = mean[first:] * np.float32(weight)
    return Announced(places, learnt) if np.isfinite(learnt).all() else None


def _are_places(chosen: Chosen, bucket: int, blocks: Sequence[int], places: Places) -> bool:
    """Whether all places are in their blocks, and none is there twice."""
    if not len(blocks):
        return True
    ordered = np.sort(places, axis=1)
    if ordered[:, 0].min() < 0 or ordered[:, -1].max() >= chosen.block_values:
        return False
    if blocks[-1] == chosen.blocks(bucket) - 1 and ordered[-1, -1] >= short_block(chosen, bucket):
        return False
    return bool((ordered[:, 1:] > ordered[:, :-1]).all())


def short_block(chosen: Chosen, bucket: int) -> int:
    """How many values the last block of a bucket has."""
    return chosen.model.buckets[bucket].count - (chosen.blocks(bucket) - 1) * chosen.block_values


def default_places(chosen: Chosen, number: int, bucket: int) -> Places:
    """The places of all blocks, (blocks, chosen), where nothing is announced: evenly spaced, and others in each
    round."""
    spaced = np.arange(chosen.block_chosen, dtype=np.int64)
    places = np.empty((chosen.blocks(bucket), chosen.block_chosen), np.int32)
    for run, size in ((slice(-1), chosen.block_values), (slice(-1, None), short_block(chosen, bucket))):
        places[run] = (spaced * size // chosen.block_chosen + number) % size
    return places


def largest_places(chosen: Chosen, number: int, bucket: int, values: Values) -> Places:
    """The places of the largest magnitudes in the blocks whose turn it is, in falling order of their values. Then the
    values of a block are much alike in all blocks, and few latents say most of them.

    Args:
        values: the bucket's, finite.
    """
    blocks = chosen.announced_blocks(bucket, number)
    places = np.empty((len(blocks), chosen.block_chosen), np.int32)
    whole = values[: (chosen.blocks(bucket) - 1) * chosen.block_values].reshape(-1, chosen.block_values)
    of_whole = whole[blocks.start :: blocks.step]
    places[: len(of_whole)] = _largest(of_whole, chosen.block_chosen)
    if len(of_whole) < len(blocks):
        places[-1:] = _largest(values[None, whole.size :], chosen.block_chosen)
    return places


def _largest(blocks: Values, count: int) -> NDArray[np.intp]:
    found = np.argpartition(np.abs(blocks), -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(blocks, found, axis=1), axis=1)
    return np.take_along_axis(found, order, axis=1)

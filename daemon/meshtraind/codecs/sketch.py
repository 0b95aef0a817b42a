"""Sums of whole numbers at few of many places, in cells, and back: an invertible Bloom lookup table with known keys.

Every number is added to HASHES cells, which follow from a seed and its place. A cell that only one place is left in
holds that number: it is found, taken out of its other cells, and so on (peeling; Goodrich and Mitzenmacher 2011, arXiv
1101.2245). Places of which each cell has two are the 2-core; they cannot be told apart this way.

Cells are 48 bits wide and add modulo 2^48, so that a cell may overflow; a number may not. They are kept in the upper
bits of 64, where that happens by itself.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshtraind.codecs.indices import Indices
from meshtraind.codecs.mixing import mixed
from meshwire.codecs.sketch import CELL_BYTES, HASHES

Numbers = NDArray[np.int64]
Cells = NDArray[np.int64]
"""Shifted to the left by UNUSED_BITS."""

WORD_BYTES = 8
UNUSED_BITS = 8 * (WORD_BYTES - CELL_BYTES)
HASH_BITS = 21  # of a place, for each of three cells

PLACE_BITS = 32  # for a sum of places in a cell; a segment has less than 2^16 of them
ONE_PLACE = 1 << PLACE_BITS

PASSES_MAX = 200
"""What a sum of members' cells needs: about 10, rarely 50 when it only just fits. Hostile ones could need as many as
there are places."""


class Pass(NamedTuple):
    """What is found at the same time.

    Attributes:
        found: places, by their number among those that were sent.
        at: for each, a cell that it is alone in.
        touched: all cells of these places, HASHES of each.
    """

    found: Indices
    at: Indices
    touched: Indices


def cells_of(seed: int, places: Indices, cells: int) -> NDArray[np.intp]:
    """HASHES x places: the cells of each, one in each third of them."""
    third = cells // HASHES
    hashes = np.arange(HASHES, dtype=np.uint64)[:, None]
    found = mixed(seed, places.astype(np.uint64)) >> np.uint64(HASH_BITS) * hashes
    np.bitwise_and(found, np.uint64((1 << HASH_BITS) - 1), out=found)
    np.multiply(found, np.uint64(third), out=found)
    np.right_shift(found, np.uint64(HASH_BITS), out=found)
    np.add(found, np.uint64(third) * hashes, out=found)
    return found.view(np.int64).astype(np.intp, copy=False)


def poured(where: NDArray[np.intp], numbers: Numbers, cells: int) -> Cells:
    """So many cells with these numbers in them; `where` is their `cells_of`."""
    made = np.zeros(cells, np.int64)
    for row in where:
        np.add.at(made, row, numbers << UNUSED_BITS)
    return made


def peel_order(where: NDArray[np.intp], cells: int) -> list[Pass] | None:
    """In which order the numbers of these places, whose `cells_of` they are, are found; None if they cannot be told. It
    follows from the places alone."""
    number = where.shape[1]
    of_places = np.ascontiguousarray(where.T)
    held_by = np.zeros(cells, np.int64)  # times ONE_PLACE how many are in a cell, and the sum of who: if it is one, who
    np.add.at(held_by, of_places.ravel(), np.arange(ONE_PLACE, ONE_PLACE + number).repeat(HASHES))
    numbering, last = np.arange(number), np.empty(number, np.intp)
    cells_left: Indices = np.flatnonzero(held_by)
    order: list[Pass] = []
    left = number
    while left and len(order) < PASSES_MAX:
        alone = held_by.take(cells_left) - ONE_PLACE
        lonely = alone.view(np.uint64) < ONE_PLACE
        alone, at = alone.compress(lonely), cells_left.compress(lonely)
        if not len(alone):
            break
        # Who is alone in several cells, or in one that comes twice, is found once.
        numbers = numbering[: len(alone)] if len(alone) <= number else np.arange(len(alone))
        last[alone] = numbers
        once = last.take(alone) == numbers
        found = alone.compress(once)
        cells_left = of_places.take(found, axis=0).ravel()  # in no others does anything change
        order.append(Pass(found, at.compress(once), cells_left))
        np.subtract.at(held_by, cells_left, (found + ONE_PLACE).repeat(HASHES))
        left -= len(found)
    return order if not left else None


def peel(where: NDArray[np.intp], cells: Cells) -> Numbers | None:
    """The numbers that were poured in; None if they cannot be told. What cannot be their sum is left in `cells`."""
    order = peel_order(where, len(cells))
    if order is None:
        return None
    numbers = np.zeros(where.shape[1], np.int64)
    for found, at, touched in order:
        held = cells.take(at)
        numbers[found] = held >> UNUSED_BITS
        np.subtract.at(cells, touched, held.repeat(HASHES))
    return numbers


def read_cells(payload: memoryview) -> Cells:
    """A copy of those that a payload consists of."""
    words = np.zeros((len(payload) // CELL_BYTES, WORD_BYTES), np.uint8)
    words[:, WORD_BYTES - CELL_BYTES :] = np.frombuffer(payload, np.uint8).reshape(-1, CELL_BYTES)
    return words.view("<i8").ravel()


def write_cells(cells: Cells, out: memoryview) -> None:
    """Fills `out`."""
    words = cells.astype("<i8", copy=False).view(np.uint8).reshape(-1, WORD_BYTES)
    np.frombuffer(out, np.uint8).reshape(-1, CELL_BYTES)[:] = words[:, WORD_BYTES - CELL_BYTES :]

"""Sums of whole numbers at few of many places, in cells, and back: an invertible Bloom lookup table with known keys.

Every number is added to HASHES cells, which follow from a seed and its place. A cell that only one place is left in
holds that number: it is found, taken out of its other cells, and so on (peeling; Goodrich and Mitzenmacher 2011, arXiv
1101.2245). Places of which each cell has two are the 2-core; they cannot be told apart this way.

Cells are 48 bits wide and add modulo 2^48, so that a cell may overflow; a number may not. They are kept in the upper
bits of 64, where that happens by itself.
"""

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

PASSES_MAX = 200
"""What a sum of members' cells needs: about 10, rarely 50 when it only just fits. Hostile ones could need as many as
there are places."""


def cells_of(seed: int, places: Indices, cells: int) -> NDArray[np.intp]:
    """HASHES x places: the cells of each, one in each third of them."""
    third = cells // HASHES
    draws = mixed(seed, places.astype(np.uint64))
    found = np.empty((HASHES, len(places)), np.intp)
    for index, row in enumerate(found):
        part = (draws >> np.uint64(HASH_BITS * index)) & np.uint64((1 << HASH_BITS) - 1)
        row[:] = ((part * np.uint64(third)) >> np.uint64(HASH_BITS)) + np.uint64(third * index)
    return found


def poured(where: NDArray[np.intp], numbers: Numbers, cells: int) -> Cells:
    """So many cells with these numbers in them; `where` is their `cells_of`."""
    made = np.zeros(cells, np.int64)
    for row in where:
        np.add.at(made, row, numbers << UNUSED_BITS)
    return made


def peel(where: NDArray[np.intp], cells: Cells) -> Numbers | None:
    """The numbers that were poured in; None if they cannot be told. What cannot be their sum is left in `cells`."""
    degrees = np.bincount(where.ravel(), minlength=len(cells))
    marks = np.zeros(len(cells), np.int64)  # the sum of who is in a cell: where one is left, who
    everybody = np.arange(where.shape[1])
    for row in where:
        np.add.at(marks, row, everybody)
    numbers = np.zeros(where.shape[1], np.int64)
    left = where.shape[1]
    for _ in range(PASSES_MAX):
        if not left:
            return numbers
        lonely = np.flatnonzero(degrees == 1)
        if not len(lonely):
            break
        found, first = np.unique(marks[lonely], return_index=True)  # who is alone in several cells is found once
        held = cells[lonely[first]]
        numbers[found] = held >> UNUSED_BITS
        for row in where:
            at = row[found]
            np.subtract.at(cells, at, held)
            np.subtract.at(degrees, at, 1)
            np.subtract.at(marks, at, found)
        left -= len(found)
    return numbers if not left else None


def read_cells(payload: memoryview) -> Cells:
    """A copy of those that a payload consists of."""
    words = np.zeros((len(payload) // CELL_BYTES, WORD_BYTES), np.uint8)
    words[:, WORD_BYTES - CELL_BYTES :] = np.frombuffer(payload, np.uint8).reshape(-1, CELL_BYTES)
    return words.view("<i8").ravel()


def write_cells(cells: Cells, out: memoryview) -> None:
    """Fills `out`."""
    words = cells.astype("<i8", copy=False).view(np.uint8).reshape(-1, WORD_BYTES)
    np.frombuffer(out, np.uint8).reshape(-1, CELL_BYTES)[:] = words[:, WORD_BYTES - CELL_BYTES :]

"""J3: the first page of the memory in which a learner keeps its base and its optimizer's state, for the next process.

The daemon makes the file before it spawns the first process, and keeps it from one to the next. Each process fills it
or takes it over; the daemon reads this page alone, when a process has ended.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from meshwire.memory_layout.shared_slots import PAGE_BYTES

KEPT_FD_VARIABLE = "MESHTRAIN_KEPT_FD"

_MAGIC = b"MTKEPT01"
_HEAD = struct.Struct("<8sQQQQQQQQQ16s")
DIRTY_OFFSET = len(_MAGIC)  # of the first word: 0 is clean
HEADER_BYTES = PAGE_BYTES
SAMPLE_WORDS = 1024
WORD_BYTES = 8
CLEAN, DIRTY = 0, 1


@dataclass(frozen=True, slots=True)
class KeptHeader:
    """Where what is kept lies in the file, in bytes from its beginning.

    Attributes:
        dirty: a round is on its way into the base, the base to another place, or the optimizer takes a local step; or
            what is there is not a base: it is of no use.
        round: the newest one in the base.
        base: (offset, bytes) of the trained parameters' values.
        index: of which tensors there are, as JSON.
        record: of all else that goes with the base, as JSON.
        total_bytes: of the file.
        sample: `sample_digest` of the base: a script may have written something else into its model.
    """

    dirty: bool
    round: int
    base: tuple[int, int]
    index: tuple[int, int]
    record: tuple[int, int]
    total_bytes: int
    sample: bytes

    def pack(self) -> bytes:
        """The beginning of the file."""
        spans = (*self.base, *self.index, *self.record)
        return _HEAD.pack(_MAGIC, DIRTY if self.dirty else CLEAN, self.round, *spans, self.total_bytes, self.sample)

    @classmethod
    def unpack(cls, data: bytes) -> "KeptHeader | None":
        """None for what `pack` has not made, or what lies outside of the file that it tells of."""
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            return None
        _, dirty, round_, *spans, total_bytes, sample = _HEAD.unpack_from(data)
        base, index, record = zip(spans[::2], spans[1::2], strict=True)
        if any(offset < HEADER_BYTES or offset + size > total_bytes for offset, size in (base, index, record)):
            return None
        return cls(dirty != CLEAN, round_, base, index, record, total_bytes, sample)


def sample_places(offset: int, size_bytes: int) -> range:
    """Byte offsets of the words of a region that are looked at, evenly over all of it."""
    words = size_bytes // WORD_BYTES
    step = max(1, -(-words // SAMPLE_WORDS))
    return range(offset, offset + words * WORD_BYTES, step * WORD_BYTES)


def sample_digest(words: bytes) -> bytes:
    """Tells whether sampled words, given back to back, are still those of before."""
    return hashlib.blake2b(words, digest_size=16).digest()


def kept_round(read: Callable[[int, int], bytes], size_bytes: int) -> int | None:
    """After which round the base is that the file holds; None: it holds none that can be used.

    Args:
        read: (size, offset) to bytes of the file.
        size_bytes: of the file.
    """
    header = KeptHeader.unpack(read(HEADER_BYTES, 0))
    if header is None or header.dirty or header.total_bytes > size_bytes:
        return None
    words = b"".join(read(WORD_BYTES, place) for place in sample_places(*header.base))
    return header.round if sample_digest(words) == header.sample else None

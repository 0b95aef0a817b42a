"""W4: whatever a peer sends, meshwire answers with a value or a refusal, and at a bounded cost."""

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgpack
import pytest

from meshwire import limits
from meshwire.jobs.files import FileManifest
from meshwire.message_base import Wire
from meshwire.messages.envelope import decode
from tests.wire.decoders import WIRE_DECODERS
from tests.wire.fuzzing import Decoder, break_in_every_way
from tests.wire.wirevalues import MESSAGES

BYTES_A_BYTE_MAX = 110  # memory for each byte that was received: an empty list takes one byte there and 56 here
DECODE_S_MAX = 2.0  # of computing, for what takes a tenth of a second


@pytest.mark.parametrize("decoder", WIRE_DECODERS, ids=lambda decoder: decoder.name)
def test_whatever_the_bytes_a_value_or_a_refusal(decoder: Decoder) -> None:
    break_in_every_way(decoder)


FILLINGS = (b"\x80", b"\x90", b"\xa0", b"\xc0", b"\x81\xa0\xc0", b"\x91\x90")


def listed(item: bytes, total_bytes: int) -> bytes:
    count = total_bytes // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def bomb(name: str, field: str, filling: bytes, total_bytes: int) -> bytes:
    start: bytes = b"\x94\x00\x00" + msgpack.packb(name) + b"\x81" + msgpack.packb(field)
    return start + listed(filling, total_bytes - len(start) - 5)


def bombs(total_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Messages of every type with one field full of something small, as often as the bytes allow."""
    for name, cls in sorted(MESSAGES.items()):
        for field in cls.model_fields:
            for filling in FILLINGS:
                yield f"{name}.{field}", bomb(name, field, filling, total_bytes)


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """The most bytes in use since the last question. tracemalloc sees what Python allocates, and each error that
    pydantic reports becomes a dict of Python's."""
    tracemalloc.start()

    def peak_bytes() -> int:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        return peak

    try:
        yield peak_bytes
    finally:
        tracemalloc.stop()


def test_no_message_costs_more_than_its_bytes_allow() -> None:
    """A megabyte of wrong items once made 2.7 GB of errors, in fifteen seconds of the event loop."""
    size_bytes = 2 * limits.KIB
    with traced() as peak_bytes:
        for what, payload in bombs(size_bytes):
            decode(payload)
            assert peak_bytes() <= BYTES_A_BYTE_MAX * size_bytes + limits.MIB, what


def test_the_largest_message_full_of_small_things() -> None:
    payload = bomb("job.outputs.reply", "files", b"\x80", limits.CONTROL_BYTES_MAX)
    with traced() as peak_bytes:
        began_s = time.process_time()
        assert isinstance(decode(payload), str)
        assert time.process_time() - began_s <= DECODE_S_MAX
        assert peak_bytes() <= BYTES_A_BYTE_MAX * len(payload)


@pytest.mark.parametrize("filling", FILLINGS, ids=bytes.hex)
def test_a_manifest_full_of_small_things(filling: bytes) -> None:
    """Neither as entries nor inside of one are they unpacked."""
    for start in (b"\x81\xa7entries", b"\x81\xa7entries\x91", b"\x81\xa7entries\x91\x81\xa4path"):
        packed = start + listed(filling, limits.MIB)
        with traced() as peak_bytes:
            with pytest.raises(ValueError, match=r"."):
                FileManifest.unpack(packed)
            assert peak_bytes() <= 4 * limits.MIB


def test_every_message_has_fewer_fields_than_a_map_may_have() -> None:
    def classes(cls: type[Wire]) -> Iterator[type[Wire]]:
        yield cls
        for other in cls.__subclasses__():
            yield from classes(other)

    assert max(len(cls.model_fields) for cls in classes(Wire)) <= limits.MESSAGE_FIELDS_MAX

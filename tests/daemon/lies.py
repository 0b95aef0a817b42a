"""What a member of a job can say that is not so: by name, the codec of the job, the lie, and what it is refused for."""

from typing import Any

import numpy as np

from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.rounds import Bind, Null, Seal
from tests.daemon.liarmesh import Frame, Lie, header_of, of_chunks

LIAR = 1  # the rank
RING, SHARDED, GATHER = "fp32", "int8", "topk:0.1,gather"


def nan(header: Header, content: bytes) -> Frame:
    return header, np.full(len(content) // 4, np.nan, "<f4").tobytes()


def nan_in_final(header: Header, content: bytes) -> Frame:
    return nan(header, content) if header.step >= 3 else (header, content)


def garbage(header: Header, content: bytes) -> Frame:
    return header, b"\xff" * len(content)


def silent(_header: Header, _content: bytes) -> None:
    return None


def unpacked(_header: Header, _content: bytes) -> str:
    return "12 packed bytes that are no LZ4 block of 400 bytes"


def said(kind: type[Wire], **changes: Any) -> Lie:
    """Another value in messages of a kind."""

    def told(header: Header, content: bytes | Wire | None) -> list[Frame]:
        return [(header, content.model_copy(update=changes) if isinstance(content, kind) else content)]

    return told


def twice(header: Header, content: bytes | Wire | None) -> list[Frame]:
    return [(header, content)] * (2 if isinstance(content, Seal) else 1)


def nulls(header: Header, content: bytes | Wire | None) -> list[Frame]:
    return [(header, Null(round=content.round + 9) if isinstance(content, Bind) else content)]


def another_mask(header: Header) -> int:
    return header.contributors ^ (1 << LIAR)


LIES: dict[str, tuple[str, Lie, str]] = {
    "NaN in a sum": (RING, of_chunks(nan), "infinite or not a number"),
    "garbage in a part": (SHARDED, of_chunks(garbage), "int8"),
    "garbage in a gather": (GATHER, of_chunks(garbage), "the part of rank 1"),
    "no LZ4 block": (RING, of_chunks(unpacked), "no LZ4 block"),
    "NaN in a final sum": (RING, of_chunks(nan_in_final), "infinite or not a number"),
    "a false weight in a sum": (RING, header_of(weight=lambda header: header.weight * 2), "shows the weight"),
    "a false weight of a part": (SHARDED, header_of(weight=lambda header: header.weight * 2), "shows the weight"),
    "a false mask": (RING, header_of(contributors=another_mask), "contributors"),
    "a false mask in a gather": (GATHER, header_of(contributors=lambda _header: 1), "contributors"),
    "a false counter": (RING, header_of(complete=lambda _header: 10**6), "complete"),
    "a false squared norm": (RING, header_of(squared_norm=lambda h: h.squared_norm * 2), "squared norm"),
    "no such step": (RING, header_of(step=lambda _header: 999), "program step 999"),
    "no such segment": (SHARDED, header_of(first_segment=lambda _header: 10**6), "segments 1000000"),
    "bound on a base to come": (RING, said(Bind, base=10**6), "age"),
    "another weight bound": (RING, said(Bind, weight=77.0), "shows the weight"),
    "sealed twice": (RING, twice, "in which it has no open contribution"),
    "nulls far ahead": (RING, nulls, "nulled round"),
    "sends no chunk": (RING, of_chunks(silent, payload=False), "has sent nothing"),
    "sends no part": (SHARDED, of_chunks(silent, payload=False), "has sent nothing"),
}

"""W1: the 80 bytes in front of every frame."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, LAYOUT, Flags, Header, Kind, decode_header

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    payload_bytes=st.integers(0, limits.FRAME_PAYLOAD_BYTES_MAX),
    flags=st.sampled_from([Flags.NONE, Flags.POISON]),
    job=U64,
    generation=U64,
    round=U32,
    step=U16,
    bucket=U16,
    first_segment=U32,
    segment_count=U32,
    contributors=U64,
    weight=st.floats(0, allow_infinity=False, allow_nan=False),
    complete=U32,
    squared_norm=st.floats(0, limits.SQUARED_NORM_MAX),
).flatmap(
    lambda header: st.integers(0, max(0, header.payload_bytes - 1)).map(
        lambda packed: replace(header, packed_bytes=packed) if header.kind is Kind.CHUNK else control(header)
    )
)


def control(header: Header) -> Header:
    """Its mark is another one; relayed frames have none."""
    marked = header.flags and header.kind is Kind.CONTROL
    return replace(header, flags=Flags.MORE if marked else Flags.NONE)


GOLDEN = {
    "an empty request": (
        Header(Kind.CONTROL, 12),
        "4d455348" "1c" "01" "0000" + "00" * 8 + "00" * 8 + "00" * 4 + "00" * 2 + "00" * 2 + "00" * 4 + "00" * 4
        + "00" * 8 + "00" * 8 + "00" * 4 + "0c000000" + "00" * 16,
    ),
    "a chunk": (
        Header(
            Kind.CHUNK,
            payload_bytes=0x40000,
            job=0x1122334455667788,
            generation=0x99AABBCCDDEEFF00,
            round=7,
            step=3,
            bucket=2,
            first_segment=5,
            segment_count=4,
            contributors=0b1011,
            weight=96.0,
            complete=6,
        ),
        "4d455348" "1c" "02" "0000" "8877665544332211" "00ffeeddccbbaa99" "07000000" "0300" "0200" "05000000" "04000000"
        "0b00000000000000" "0000000000005840" "06000000" "00000400" + "00" * 16,
    ),
    "a final chunk": (
        Header(
            Kind.CHUNK, payload_bytes=16, round=1, step=4, segment_count=1, contributors=0b11, weight=2.0,
            squared_norm=0.5,
        ),
        "4d455348" "1c" "02" "0000" + "00" * 8 + "00" * 8 + "01000000" "0400" "0000" "00000000" "01000000"
        "0300000000000000" "0000000000000040" "00000000" "10000000" "000000000000e03f" + "00" * 8,
    ),
    "a packed chunk": (
        Header(Kind.CHUNK, payload_bytes=0x40000, round=1, segment_count=1, packed_bytes=0x1234),
        "4d455348" "1c" "02" "0000" + "00" * 8 + "00" * 8 + "01000000" "0000" "0000" "00000000" "01000000"
        + "00" * 8 + "00" * 8 + "00000000" "00000400" + "00" * 8 + "34120000" "00000000",
    ),
    "a poison chunk": (
        Header(Kind.CHUNK, 0, Flags.POISON, job=1, round=2**32 - 1, segment_count=1, contributors=2**63),
        "4d455348" "1c" "02" "0100" "0100000000000000" "0000000000000000" "ffffffff" "0000" "0000" "00000000" "01000000"
        "0000000000000080" "0000000000000000" "00000000" "00000000" + "00" * 16,
    ),
    "gossip": (
        Header(
            Kind.GOSSIP, payload_bytes=0x40000, job=1, generation=2, round=7, step=3, first_segment=1, segment_count=4
        ),
        "4d455348" "1c" "04" "0000" "0100000000000000" "0200000000000000" "07000000" "0300" "0000" "01000000" "04000000"
        + "00" * 8 + "00" * 8 + "00000000" "00000400" + "00" * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("header", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_golden_frames(header: Header, golden: str) -> None:
    """W1: peers of this wire version agree on every byte; a change here is a new version."""
    assert header.encode().hex() == golden
    assert decode_header(bytes.fromhex(golden)) == header


@given(headers)
def test_round_trip(header: Header) -> None:
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES == 80
    assert decode_header(encoded) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_no_bytes_make_the_decoder_raise(data: bytes) -> None:
    assert isinstance(decode_header(data), str)


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_no_change_of_one_byte_makes_the_decoder_raise(header: Header, place: int, value: int) -> None:
    """What is accepted encodes to the very bytes it came from: nothing is read over or mended."""
    data = bytearray(header.encode())
    data[place] = value
    decoded = decode_header(data)
    if isinstance(decoded, Header):
        assert decoded.encode() == data


def raw(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "magic": b"MESH", "version": 28, "kind": 2, "flags": 0, "job": 0, "generation": 0, "round": 1, "step": 0,
        "bucket": 0, "first_segment": 0, "segment_count": 1, "contributors": 1, "weight": 1.0, "complete": 0,
        "payload_bytes": 0, "squared_norm": 0.0, "packed_bytes": 0, "reserved": bytes(4),
    }  # fmt: skip
    return LAYOUT.pack(*{**fields, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"GET "}, "not a meshtrain frame"),
        ({"version": 27}, "wire version 27; this side speaks version 28"),
        ({"kind": 0}, "unknown frame kind 0"),
        ({"flags": 4}, "unknown frame flags 0x0004"),
        ({"flags": 2}, "flags 0x0002 on a chunk"),
        ({"kind": 1, "flags": 1}, "flags 0x0001 on a control frame"),
        ({"kind": 3, "flags": 1}, "flags 0x0001 on a relayed frame"),
        ({"reserved": bytes(3) + b"\x01"}, "reserved header bytes are not zero"),
        ({"payload_bytes": limits.FRAME_PAYLOAD_BYTES_MAX + 1}, "exceeds the limit"),
        ({"payload_bytes": 8, "packed_bytes": 8}, "payload of 8 bytes packed into 8"),
        ({"payload_bytes": 0, "packed_bytes": 1}, "only data are, into fewer bytes"),
        ({"payload_bytes": 8, "packed_bytes": 4, "kind": 1}, "only data are"),
        ({"weight": float("nan")}, "not a finite number"),
        ({"weight": float("inf")}, "not a finite number"),
        ({"weight": -1.0}, "not a finite number"),
        ({"squared_norm": float("nan")}, "not a finite sum of squares"),
        ({"squared_norm": float("inf")}, "not a finite sum of squares"),
        ({"squared_norm": -0.5}, "not a finite sum of squares"),
        ({"squared_norm": 1e308}, "not a finite sum of squares"),  # two of them have no finite sum
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], reason: str) -> None:
    assert isinstance(decode_header(raw()), Header)
    refused = decode_header(raw(**changes))
    assert isinstance(refused, str)
    assert reason in refused

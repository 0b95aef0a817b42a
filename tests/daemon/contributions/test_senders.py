"""The mean over those that sent a value (SparseLoCo; ALGORITHMS section 5), on plain numbers."""

from collections.abc import Sequence

import numpy as np
import pytest

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, CodecError, Values
from meshtraind.contributions.received import BrokenPartError, MemberPart, mean_into, senders_mean_into
from meshtraind.contributions.segments import Segment

EXACT = "topk:0.5,senders+fp32"


def parts_of(text: str, values: Sequence[Sequence[float] | Values]) -> list[MemberPart]:
    codec: Codec = codec_named(text)
    made = []
    for rank, each in enumerate(values):
        given = np.array(each, np.float32)
        out = memoryview(bytearray(codec.spec.segment_bytes_max(len(given))))
        length = codec.encode_into(given, out)
        made.append(MemberPart(rank, [Segment(codec, 0, len(out), 0, len(given), measured=True)], out[:length]))
    return made


def mean(text: str, values: Sequence[Sequence[float] | Values], weights: Sequence[float]) -> list[float]:
    """The mean over those that sent a value, where `values` are the members' w*g."""
    out = np.full(len(values[0]), np.nan, np.float32)
    senders_mean_into(parts_of(text, values), 0, weights, out)
    found: list[float] = out.tolist()
    return found


def test_each_value_is_the_mean_of_those_that_sent_it() -> None:
    """Sixteen values, of which two members send eight and seven, four of them both. Norms are equal: none is scaled."""
    first = [1.0, -1, 2, 2, 1, 1, 1, 1, *[0.0] * 8]
    second = [0.0] * 4 + [3.0, 1, -1, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    assert np.linalg.norm(first) == np.linalg.norm(second[:4] + second[4:]) == pytest.approx(14**0.5)
    together = mean(EXACT, [first, second], [1, 1])
    assert together == [1, -1, 2, 2, 2, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]


def test_weights_are_the_senders_own() -> None:
    """Of 3 and 1 samples: a value that both sent counts by these, one that either sent is as it was."""
    first, second = [6.0, 3, 0, 0], [0.0, 2, 1, 0]  # w*g of (2, 1) and (2, 1): norms of g are equal
    assert mean(EXACT, [first, second], [3, 1]) == [2, 1.25, 1, 0]


def test_nobody_counts_for_more_than_the_median_norm() -> None:
    """Of an even number the lower one, as torch's median is."""
    ones = [1.0, 0, 0, 0]
    assert mean(EXACT, [ones, [0.0, 100, 0, 0], [0.0, 0, 2, 0]], [1, 1, 1]) == [1, 2, 2, 0]
    assert mean(EXACT, [ones, [0.0, 100, 0, 0]], [1, 1]) == [1, 1, 0, 0]
    assert mean(EXACT, [ones, [0.0, 100, 0, 0]], [1, 100]) == [1, 1, 0, 0], "norms are those of g"


def test_who_has_nothing_to_send_silences_nobody() -> None:
    """Members whose part of the model did not change, as rows of an embedding that no sample of theirs has used: those
    that changed are what is usual, and what they sent is not lost."""
    nothing, ones = [0.0] * 4, [1.0, 0, 0, 0]
    assert mean(EXACT, [nothing, [0.0, 100, 0, 0]], [1, 1]) == [0, 100, 0, 0]
    assert mean(EXACT, [nothing, ones, nothing, [0.0, 100, 0, 0], nothing], [1] * 5) == [1, 1, 0, 0]
    assert mean(EXACT, [nothing] * 3, [1, 1, 1]) == [0] * 4


def test_of_one_member_it_is_what_it_sent() -> None:
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    (part,) = parts_of(EXACT, [values * np.float32(4)])
    sent, found = np.empty_like(values), np.empty_like(values)
    part.decode_into(0, sent)
    senders_mean_into([part], 0, [4.0], found)
    assert (found == sent / 4).all()


@pytest.mark.parametrize("values", ["fp16", "int8", "int4", "2bit"])
def test_of_equal_parts_it_is_the_plain_mean(values: str) -> None:
    """All send the same places and have the same norm."""
    given = np.random.default_rng(2).standard_normal(3000).astype(np.float32)
    parts = parts_of(f"topk:0.1,senders+{values}", [given, given])
    plain, found = np.empty_like(given), np.empty_like(given)
    mean_into(parts, 0, 2.0, plain)
    senders_mean_into(parts, 0, [1.0, 1.0], found)
    assert (found == plain).all()
    assert np.count_nonzero(found) in range(250, 301)


def test_who_sent_alone_is_not_pulled_to_zero_by_the_others() -> None:
    """What it is for: of 8 members with values of their own, each at other places, the mean of all has an eighth of
    their norm, and this all of it."""
    parts = [np.where(np.arange(4096) % 8 == rank, np.float32(1), np.float32(0)) for rank in range(8)]
    made = parts_of("topk:0.2,senders", parts)
    plain, found = np.empty(4096, np.float32), np.empty(4096, np.float32)
    mean_into(made, 0, 8.0, plain)
    senders_mean_into(made, 0, [1.0] * 8, found)
    assert (plain == 1 / 8).all()
    assert (found == 1).all()


def test_a_broken_part_is_named() -> None:
    codec = codec_named(EXACT)
    payload = memoryview(b"\x63\x01\x00\x01\x00\x00" + bytes(4))
    part = MemberPart(5, [Segment(codec, 0, 100, 0, 4, measured=True)], payload)
    with pytest.raises(BrokenPartError, match="the part of rank 5") as broken:
        senders_mean_into([part], 0, [1.0], np.empty(4, np.float32))
    assert isinstance(broken.value, CodecError)

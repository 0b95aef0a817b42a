"""What the tests of all ways of exchanging have in common: a bucket of short segments, and who adds what to it."""

from hypothesis import strategies as st

from meshwire.collectives.exchange import BucketExchange, Part, Place
from meshwire.frames.header import Header, Kind
from meshwire.model.plan import Bucket, Plan

SEGMENT_VALUES = 1024


def make_plan(segment_count: int) -> Plan:
    """Of one bucket, whose last segment is shorter than the others."""
    values = segment_count * SEGMENT_VALUES - 16
    bucket = Bucket(index=0, start=0, count=values, spans=range(1), segment_values=SEGMENT_VALUES, home=0)
    return Plan(SEGMENT_VALUES, values, (), (bucket,), 1, 1)


def generations(*parts: Part) -> st.SearchStrategy[dict[int, Part]]:
    """What each rank adds; the ranks of a generation need not follow each other."""
    return st.dictionaries(st.integers(0, 63), st.sampled_from(parts), min_size=1, max_size=6).map(
        lambda drawn: dict(sorted(drawn.items()))
    )


def announce(exchange: BucketExchange, **changes: object) -> Place | str:
    """What it says to a chunk of two whole fp32 segments of rank 0, at step 0, if `changes` do not say otherwise."""
    fields: dict[str, object] = {
        "kind": Kind.CHUNK,
        "payload_bytes": 2 * SEGMENT_VALUES * 4,
        "round": 1,
        "step": 0,
        "first_segment": 0,
        "segment_count": 2,
        "contributors": 0b001,
        "weight": 4.0,
    }
    sender = changes.pop("sender", 0)
    assert isinstance(sender, int)
    fields.update(changes)
    return exchange.announce(sender, Header(**fields))  # type: ignore[arg-type]

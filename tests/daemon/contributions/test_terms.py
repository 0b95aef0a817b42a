"""On which terms the segments of a run are encoded, one after the other."""

from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Terms
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import Segment
from meshtraind.contributions.terms import RunTerms
from meshwire.encoded_layout.budget import Budget

COUNT = 1024
NUMBER = 3
SEED = 7


def segment(codec: str, start: int) -> Segment:
    return Segment(codec_named(codec), 0, 0, start, COUNT, measured=True)


def test_who_draws_has_a_seed_by_round_and_place() -> None:
    """C1: a round that runs again draws again as it did, and no other segment draws alike."""
    terms = RunTerms(SEED, NUMBER, None)
    assert terms.of(segment("randomk", COUNT)) == Terms(NUMBER, segment_seed(SEED, NUMBER, COUNT))
    assert len({terms.of(segment("int8:sr", start * COUNT)).seed for start in range(9)}) == 9
    assert terms.of(segment("topk", COUNT)) == Terms(NUMBER), "and nobody else has one"


def test_what_a_segment_leaves_of_its_share_is_the_next_ones() -> None:
    topk = segment("topk", 0)
    budget = Budget(topk.codec.spec, rest_bytes=400, values=4 * COUNT)
    shares = [budget.share_bytes(at * COUNT, COUNT) for at in range(4)]
    terms = RunTerms(SEED, NUMBER, budget)
    assert terms.of(topk).bytes_max == shares[0]
    terms.spend(shares[0] - 30)
    assert terms.of(segment("topk", COUNT)).bytes_max == 30 + shares[1]
    assert terms.of(segment("fp16", 2 * COUNT)).bytes_max is None, "float buffers have no part in it"
    terms.spend(30 + shares[1])
    assert terms.of(segment("topk", 3 * COUNT)).bytes_max == shares[3]

"""The executor with a low-rank codec: C1, G2, G6, V1, O4, and P1, conservation of what is sent and what is left."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtraind.codecs.base import CodecError
from meshtraind.projection.powersgd.bases import Matrices
from meshtraind.projection.powersgd.projection import LowRankProjection
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.powersgd import rank_of
from tests.daemon.churnring import CopyingLink
from tests.daemon.executorring import MANIFEST, NORM_BUCKETS, PLAN, Offer
from tests.daemon.lowrankring import LowRankRing, check_conserved, churn
from tests.daemon.shardedmesh import constant_offers, in_units, without_padding

HALF = ("powersgd:3,half,warmup=0", "powersgd:1,half,warmup=2+fp16", "powersgd:4,half,warmup=3")
FULL = ("powersgd:3,warmup=0", "powersgd:1,warmup=2+fp16", "powersgd:4,warmup=3")
MODES = st.one_of(
    st.tuples(st.sampled_from(HALF), st.integers(0, 3)), st.tuples(st.sampled_from(FULL), st.just(0))
)  # codec and bound
PARAMETERS = slice(PLAN.buckets[NORM_BUCKETS].start)


def of_rank(rank: int, rounds: int, members: int) -> Mapping[int, Sequence[Offer]]:
    """The same mean gradient in every round, of this rank in each matrix; members' own have more, and change."""
    numbers = np.random.default_rng(3)
    mean = np.zeros(PLAN.total_values)
    for span in PLAN.spans:
        low = numbers.standard_normal((span.rows, rank)) @ numbers.standard_normal((rank, span.columns))
        mean[span.start : span.start + span.count] = low.ravel()
    made = {}
    for number in range(1, rounds + 1):
        apart = numbers.standard_normal((members, PLAN.total_values))
        apart -= apart.mean(axis=0)
        for span in PLAN.spans:
            apart[:, span.start + span.count :][:, : -span.count % 16] = 0
        made[number] = [Offer((mean + each).astype(np.float32), 1.0) for each in apart]
    return made


@settings(max_examples=8)
@given(mode=MODES, seed=st.integers(0, 2**32), joins=st.booleans())
def test_nothing_is_lost_and_means_are_bit_equal(mode: tuple[str, int], seed: int, joins: bool) -> None:
    """P1, V1, C1, G6: over void rounds, rounds that run again, and members that come in; all hold the same bits."""
    codec, staleness = mode
    owed = check_conserved(codec, staleness, seed, 9, PARAMETERS, joins=joins)
    assert not owed[PARAMETERS.stop :].any(), "O5: float buffers travel without residuals"


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "staleness"), [("powersgd:4,warmup=3", 0), ("powersgd:4,half,warmup=3", 1)])
async def test_buffers_travel_as_they_are_beside_warm_up_in_fp16(codec: str, staleness: int) -> None:
    """O5: also where the slot, in which they lie at s=0, is laid out otherwise than what is sent of it."""
    rounds = constant_offers(3, 1, 1, 0)
    ring = LowRankRing(3, codec, staleness, 0, rounds)
    await ring.play(rounds)
    values = [offer.values.astype(np.float64) for offer in rounds[1] if offer.values is not None]
    weight = sum(offer.weight for offer in rounds[1])
    expected = (np.sum(values, axis=0) / weight)[PARAMETERS.stop :]
    np.testing.assert_allclose(ring.members[0].means[1][PARAMETERS.stop :], expected, rtol=1e-5, atol=1e-6)
    ring.close()


@settings(max_examples=12)
@given(mode=MODES, seed=st.integers(0, 2**32))
def test_members_are_lost_and_come_at_any_moment(mode: tuple[str, int], seed: int) -> None:
    """C1, G2, G6, G8: a basis is a function of the history, whoever was in which generation, and also if it falls
    between the two phases of a round."""
    churn(*mode, seed, 6)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("codec", "staleness"),
    [("powersgd:4,warmup=0", 0), ("powersgd:4,half,warmup=0", 0), ("powersgd:4,half,warmup=0", 2)],
)
async def test_a_mean_of_that_rank_is_exact_once_the_bases_are_warm(codec: str, staleness: int) -> None:
    """Vogels et al. 2019: the power iteration finds it, however members differ, the full one at once; O4: so is the
    squared norm."""
    rounds = of_rank(2, 16, 3)
    ring = LowRankRing(3, codec, staleness, 1, rounds)
    await ring.finish()
    exact = np.add.reduce([offer.values for offer in rounds[16] if offer.values is not None], dtype=np.float64) / 3
    first, last = (ring.members[0].means[number] for number in (1, 16))
    scale = np.abs(exact).max()
    for span in PLAN.spans:
        run = slice(span.start, span.start + span.count)
        low = rank_of(span, parse_codec("powersgd:4"))
        assert np.abs(last[run] - exact[run]).max() <= (0.05 if low else 1e-5) * scale
        assert (np.abs(first[run] - exact[run]).max() > 0.3 * scale) == bool(low and "half" in codec)
    for bucket in PLAN.buckets[:NORM_BUCKETS]:
        squares = np.square(last[bucket.start : bucket.start + bucket.count], dtype=np.float64).sum()
        assert ring.members[1].done[16, bucket.index].squared_norm == pytest.approx(squares, rel=1e-5)
    ring.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_a_member_is_lost_between_the_phases_of_a_round(seed: int) -> None:
    """C1, G6, P1: those that go on make right factors anew, on the basis of the left ones that are summed now, and of
    what they had made before nothing is left."""
    rounds = without_padding(constant_offers(3, 0, 2, seed, poison=0))
    ring = LowRankRing(3, "powersgd:3,warmup=0", 0, seed, rounds)
    layout = ring.members[0].executor._forms.of(1).layout
    made = bases(ring, 0)
    while not all(bucket in made for bucket in layout.precursors):
        await ring.act()
        made = bases(ring, 0)
    assert not ring.members[0].received, "or it was not between the phases"
    before = {bucket: [each.copy() for each in of_bucket if each is not None] for bucket, of_bucket in made.items()}
    ring.kill(2)
    await ring.change((0, 1))
    while not ring.members[0].complete:
        await ring.act()
    for bucket, of_before in before.items():
        now = [each for each in bases(ring, 0)[bucket] if each is not None]
        assert all((each != earlier).any() for each, earlier in zip(now, of_before, strict=True))
        for each, other in zip(now, bases(ring, 1)[bucket], strict=False):
            assert other is None or each.tobytes() == other.tobytes()
    await ring.finish()
    applied, gradients, owed = (np.zeros(PLAN.total_values) for _ in range(3))
    for number, offers in rounds.items():
        applied += 3.0 * ring.members[0].means[number]
        gradients += sum(offer.values.astype(np.float64) for offer in offers[:2] if offer.values is not None)
    for rank, member in enumerate(ring.members[:2]):
        assert member.executor._feedback is not None
        while member.executor._projections.projected.settle_one():
            pass
        owed += in_units(member.executor._feedback.worker, rank + 1.0)
    error = np.abs(applied + owed - gradients)[PARAMETERS]
    assert error.max() <= 1e-5 * np.abs(gradients).max()
    assert np.abs(owed).max() > 100 * error.max()
    ring.close()


def bases(ring: LowRankRing, rank: int) -> Mapping[int, Matrices]:
    """Those that a member has made of left factors of round 1, by bucket."""
    projection = ring.members[rank].executor._projections.projected
    assert isinstance(projection, LowRankProjection)
    return dict(projection._bases._of_lefts.get(1, {}))


class LowRankMesh(LowRankRing):
    """Over another topology than the ring; all are linked."""

    def __init__(
        self, topology: str, codec: str, members: int, seed: int, rounds: Mapping[int, Sequence[Offer]]
    ) -> None:
        self.topology = topology
        super().__init__(members, codec, 0, seed, rounds)

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)


@pytest.mark.parametrize("topology", ["ring", "tree", "butterfly", "sharded:0,2", "star:1", "hierarchical:2"])
@settings(max_examples=3)
@given(codec=st.sampled_from(["powersgd:3,warmup=1", "lgc:0.05,warmup=1,train=1"]), seed=st.integers(0, 2**32))
def test_two_phases_over_any_topology_with_members_that_only_forward(topology: str, codec: str, seed: int) -> None:
    """C2, G2, G6, R5: the result of a bucket is nowhere before that of its precursor, and all build on it alike."""
    asyncio.run(LowRankMesh(topology, codec, 5, seed, constant_offers(3, 3, 4, seed)).churn(400))


@pytest.mark.asyncio
async def test_what_a_link_still_sends_of_right_factors_stays_as_it_was() -> None:
    """G8: who is left out and does not know it may yet receive what was sent in its generation."""
    rounds = constant_offers(3, 0, 1, 0, poison=0)
    ring = LowRankRing(3, "powersgd:3,warmup=0", 0, 1, rounds)
    left_out, wire = 1, ring.wires[0, 1]
    assert isinstance(wire, CopyingLink)
    followers = ring.members[0].executor._forms.of(1).layout.precursors
    while not any(header.bucket in followers and not header.step for header, _ in wire.queue):  # its own part
        await ring.act()
    ring.alive.discard(left_out)  # it receives nothing more for now
    await ring.change((0, 2), disorder=0)
    while not ring.members[0].complete:
        await ring.act()
    late = [payload for _, payload in wire.queue]
    assert [payload and bytes(payload) for payload in late] == list(wire.copies)
    ring.close()


@pytest.mark.asyncio
async def test_who_waits_for_left_factors_is_no_member_that_sends_nothing() -> None:
    """G10: whoever says that so many steps are over with it has all that it needs for what is lacked of it."""
    ring = LowRankRing(3, "powersgd:3,warmup=0", 0, 1, constant_offers(3, 0, 1, 0, poison=0))
    executors = [member.executor for member in ring.members]
    form = executors[0]._forms.of(1)
    steps = len(executors[0]._strategies[form].program.steps)
    told = [0, 0, 0]
    able = set[int]()
    while not all(member.received for member in ring.members):
        await ring.act()
        for rank, executor in enumerate(executors):
            now = executor.receipts(1) if 1 in executor._memory.rounds else told[rank]
            assert told[rank] <= now <= 2 * steps
            told[rank] = now
        for executor in executors:
            for sender, bucket, after in executor.lacks(1):
                precursor = form.layout.precursors.get(bucket)
                if precursor is not None and told[sender] >= after:
                    assert executors[sender]._memory.rounds[1].exchanges[precursor].complete
                    able.add(bucket)
    assert told == [2 * steps] * 3
    assert able, "or nobody could ever be named"
    ring.close()


def test_the_manifest_has_what_is_sent_whole() -> None:
    """Matrices that pay, a matrix that does not, vectors, and float buffers."""
    spec = parse_codec("powersgd")
    assert [rank_of(span, spec) for span in PLAN.spans] == [0, 0, 4, 0, 4, 0]
    assert len(MANIFEST.tensors) == len(PLAN.spans)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["powersgd:2,half,warmup=0", "lgc:0.1,warmup=0+fp32"])
async def test_broken_bytes_of_a_served_round_that_later_ones_build_on_are_refused(codec: str) -> None:
    """G4: before anything of it counts, and not in the round that is built on it."""
    ring = LowRankRing(2, codec, 2, 1, constant_offers(2, 0, 2, 1, poison=0))
    ring.slow, ring.slow_holds = 1, 0.0
    while ring.members[0].complete < 1:
        await ring.act()
    held, lagging = ring.members[0].executor.encoded(1), ring.members[1].executor
    for rank in (0, 1):
        ring.fence(rank)
    lagging.place_for(1, held.size_bytes, 0b11)[:] = b"\xff" * held.size_bytes
    with pytest.raises(CodecError, match="infinite or not a number"):
        lagging.take_served(1, held.poisoned, 0b11, [1.0, 2.0])
    ring.close()

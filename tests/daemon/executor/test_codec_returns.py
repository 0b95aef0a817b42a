"""Every codec through a hiccup, a kill in the middle of a round, and a return (C1, G1, G6, J2, P1).

Three executors with queues for links, as in `churnring`. A family is in as soon as it is registered, in each exchange
that it allows; so are the codecs that modes bring.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import pytest

from meshwire.codecs.registry import FAMILIES, CodecSpec, Reduction, parse_codec
from meshwire.model.manifest import Momentum
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import NORM_BUCKETS, PLAN, Offer
from tests.daemon.lowrankring import LowRankRing
from tests.daemon.shardedmesh import ShardedMesh, Wide, constant_offers, in_units
from tests.daemon.sketchring import SketchRing
from tests.tiers import mostly_slow

ROUNDS, MEMBERS, LOST = 12, 3, 2
SIZES = (1.0, 1 / 32, 2.0)  # of rounds: what is left out follows their weights
BRISK = {
    "dgc": "dgc:0.05,ramp=4",
    "powersgd": "powersgd:2,half,warmup=3",  # as it is under a bound
    "lgc": "lgc:0.05,warmup=2,train=2",
}  # what begins late by default
GATHERED = ("topk", "dgc")  # what a codec chooses by is nothing to the exchange: with momentum, and without
MODES = ("demo", "sparseloco:2", "muloco:2")  # with the others any codec goes
PARAMETERS = np.zeros(PLAN.total_values, bool)
for span in PLAN.spans[: PLAN.buckets[NORM_BUCKETS].spans.start]:
    PARAMETERS[span.start : span.start + span.count] = True  # no padding
NO_MOMENTUM = Momentum.model_construct(factor=0.0, nesterov=False)  # so that what is owed are gradients


def every_codec() -> Iterator[CodecSpec]:
    """Those of modes; each family in each exchange; and after rounds of warm-up, where it can have some."""
    for mode in MODES:
        yield codec_of(sync_settings(mode), None)
    for name, family in FAMILIES.items():
        usual = parse_codec(BRISK.get(name, name))
        more = f"{usual}{',' if ':' in str(usual) else ':'}"
        yield usual
        if family.exchanges and name in GATHERED:
            yield parse_codec(f"{more}gather")
        if name == "lgc":
            yield parse_codec(f"{more}latent=1+int4")
        if not usual.warmup and any(parameter.name == "warmup" for parameter in family.parameters):
            yield parse_codec(f"{more}warmup=3")


def in_four_bits(codec: CodecSpec) -> bool:
    """What hops round is then fed back by nobody, and no small part of what they send."""
    return codec.family.transforms and codec.choice("values") == "int4"


QUICK = {"fp32", "topk", "homomorphic", "powersgd"}  # one codec for each way of summing
SLOW = {*QUICK, "int8", "onebit", "dgc", "lgc"}  # and for each kind of state; all others are long tests
CODECS: dict[tuple[str, Reduction, bool, bool, bool], CodecSpec] = {}
for spec in every_codec():
    CODECS.setdefault((spec.name, spec.reduction, spec.of_senders, bool(spec.warmup), in_four_bits(spec)), spec)


@cache
def offers() -> Mapping[int, Sequence[Offer]]:
    return constant_offers(MEMBERS, 0, ROUNDS, seed=5, poison=0.1, sizes=SIZES)


def mesh_of(codec: CodecSpec) -> ChurnRing:
    made: type[ChurnRing] = ChurnRing
    if codec.family.transforms:
        made = LowRankRing
    elif codec.reduction is Reduction.SKETCH:
        made = SketchRing
    elif codec.reduction in (Reduction.TWO_SIDED, Reduction.GATHER):
        made = ShardedMesh
    return made(MEMBERS, str(codec), 1, 7, offers())


def residuals(mesh: ChurnRing, ranks: Iterable[int]) -> tuple[Wide, Wide]:
    """(workers', in units of w*g with w = rank + 1; owners', in units of the mean) of a codec that has them, summed."""
    workers, owners = np.zeros(PLAN.total_values), np.zeros(PLAN.total_values)
    for rank in ranks:
        feedback = mesh.members[rank].executor._feedback
        assert feedback is not None
        workers += in_units(feedback.worker, rank + 1.0)
        owners += feedback.owner.values
    return workers, owners


def left_behind(mesh: ChurnRing, cut: int) -> tuple[Wide, Wide]:
    """The residuals of the one that was killed, as they were when the last round that holds it was complete."""
    lost = mesh.members[LOST]
    feedback = lost.executor._feedback
    assert feedback is not None
    assert lost.complete == cut
    feedback.worker.rewind(cut)
    feedback.owner.rewind(cut)
    return residuals(mesh, [LOST])


class Story:
    """What befalls three members, and the books that are kept of it (P1).

    Attributes:
        changes: by cut: the residuals that were lost, workers' and owners'; the owners' that there are.
    """

    def __init__(self, mesh: ChurnRing, feedback: bool) -> None:
        self.mesh, self.feedback = mesh, feedback
        self.changes: dict[int, tuple[tuple[Wide | float, Wide | float], Wide]] = {}

    async def play(self) -> None:
        """Until all have all rounds."""
        mesh, lost = self.mesh, self.mesh.members[LOST]
        await self.until(2)
        await mesh.change((0, 1, 2), disorder=0)
        await self.until(5)
        while not lost.bucket or lost.complete != max(member.complete for member in mesh.members[:LOST]):
            await mesh.act()  # so that it has settled all that others have, and is in the middle of the next one
        mesh.kill(LOST)
        await self.change((0, 1))
        await self.until(8)
        await self.change((0, 1, 2))
        assert mesh.members[LOST] is not lost
        if (feedback := mesh.members[LOST].executor._feedback) is not None:
            for state in (feedback.worker, feedback.owner, feedback.velocity):
                assert state is None or not state.values.any(), "J2"
        await mesh.finish()

    async def until(self, complete: int) -> None:
        """So many rounds are complete somewhere, and not yet everywhere if that happens."""
        while max(member.complete for member in self.mesh.current()) < complete:
            await self.mesh.act()

    async def change(self, ranks: tuple[int, ...]) -> None:
        cut = await self.mesh.change(ranks, disorder=0)
        if self.feedback:
            lost = left_behind(self.mesh, cut) if len(ranks) < MEMBERS else (0.0, 0.0)
            self.changes[cut] = lost, residuals(self.mesh, ranks)[1]

    def check_models(self) -> None:
        """All models are equal at equal rounds, to the bit; who returns begins with that of a round which all have."""
        mesh = self.mesh
        models = {0: bytes(4 * PLAN.total_values)}
        for rank in (0, 1, LOST):
            joined = mesh.entered_at[rank]
            assert (joined > 0) == (rank == LOST)
            model = np.frombuffer(models[joined], np.float32).copy()
            for number in range(joined + 1, ROUNDS + 1):
                if not self.void(number):
                    model -= np.float32(0.05) * mesh.members[rank].means[number]
                assert np.isfinite(model).all()
                assert models.setdefault(number, model.tobytes()) == model.tobytes(), (rank, number)

    def void(self, number: int) -> bool:
        """Somebody's poison is in it."""
        made = self.mesh.rounds[number]
        return any(made[rank].poisoned for rank in self.mesh.completed_in[number] if made[rank].values is not None)

    def contributors(self, number: int) -> list[int]:
        """Whoever counts in a round."""
        return [rank for rank in self.mesh.completed_in[number] if self.mesh.rounds[number][rank].values is not None]

    def balance(self) -> tuple[Wide, Wide, Wide]:
        """(applied, owed, came) in units of w*g with w = rank + 1. A unit of the mean is worth their sum."""
        decay = parse_codec(self.mesh.codec).decay
        applied, came, weight = np.zeros(PLAN.total_values), np.zeros(PLAN.total_values), 0.0
        owned: Wide | float = 0.0  # by owners, where the weight may change
        for number in range(1, ROUNDS + 1):
            if not self.void(number):
                made = [self.mesh.rounds[number][rank] for rank in self.contributors(number)]
                size = SIZES[number % len(SIZES)]
                before, weight = weight, sum(offer.weight for offer in made) / size
                came += (weight - before) * owned
                applied = decay * applied + weight * self.mesh.members[0].means[number].astype(np.float64)
                new = sum(each.values.astype(np.float64) for each in made if each.values is not None)
                came = decay * came + new / size
            if number in self.changes:
                (workers, owners), owned = self.changes[number]
                came -= workers + weight * owners
        workers, owners = residuals(self.mesh, self.mesh.ranks)
        return applied, workers + weight * owners, came

    def shares(self) -> Iterator[tuple[int, int, float]]:
        """(round, rank, how often its gradient is in the sum), by projection; those of two members hardly overlap."""
        for number in range(1, ROUNDS + 1):
            made = self.mesh.rounds[number]
            if self.void(number):
                continue
            weight = sum(made[rank].weight for rank in self.contributors(number))
            total = weight * self.mesh.members[0].means[number][PARAMETERS].astype(np.float64)
            for rank, offer in enumerate(offers()[number]):
                assert offer.values is not None
                own = offer.values[PARAMETERS].astype(np.float64)
                yield number, rank, float(total @ own / (own @ own))


async def played(codec: CodecSpec) -> Story:
    story = Story(mesh_of(codec), codec.error_feedback)
    try:
        async with asyncio.timeout(60):
            await story.play()
    finally:
        story.mesh.close()
    return story


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "codec",
    [
        codec
        if codec.name in QUICK and (codec.of_senders or codec.reduction is not Reduction.GATHER)
        else pytest.param(codec, marks=pytest.mark.slow if codec.name in SLOW else pytest.mark.long)
        for codec in CODECS.values()
    ],
    ids=str,
)
async def test_a_member_is_lost_in_the_middle_of_a_round_and_returns(
    codec: CodecSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All models are bit-equal at equal rounds; each contribution counts once; with error feedback all that has come
    in was applied or is owed, but for what the lost one owed. Means of casts `churnring` checks to the bit. Where a
    mean is over those that sent a value, the sum of all is nowhere: `shardedmesh` says what it is. What is rounded to
    four bits from hop to hop is right on average: `test_executor_lgc` says so."""
    monkeypatch.setattr("tests.daemon.executorring.MOMENTUM", NO_MOMENTUM)
    story = await played(codec)
    absent = [number for number in range(1, ROUNDS + 1) if LOST not in story.contributors(number)]
    assert 2 <= len(absent) < ROUNDS - 3
    story.check_models()
    if codec.of_senders or in_four_bits(codec):
        return
    if codec.error_feedback:
        applied, owed, came = (each[PARAMETERS] for each in story.balance())
        error = np.abs(applied + owed - came).max()
        assert error <= (2e-3 if codec.warmup else 1e-6) * np.abs(came).max(), "P1"
        assert np.abs(owed).max() > 100 * error, "or the codec leaves nothing out"
    else:
        for number, rank, share in story.shares():
            assert round(share) == (rank in story.contributors(number)), (number, rank)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", mostly_slow(["dgc:0.05,ramp=4", "dgc:0.05,ramp=0,gather"]))
async def test_models_are_equal_where_workers_keep_their_momentum(codec: str) -> None:
    """DGC: what is sent is of velocities, which begin anew with who returns."""
    story = await played(parse_codec(codec))
    story.check_models()

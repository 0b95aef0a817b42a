"""Every codec over every topology that it may go over, with a bound and without one: some rounds of three executors.

A job's mode says no more to an executor than its bound, and which rounds carry which tensors
(`test_executor_travel.py`); what it says to a learner is in `tests/train/step/test_scripts_in_each_mode.py`. Which
combinations there are is in `tests/wire/sync_modes/test_every_setting.py`.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.model.manifest import Momentum
from meshwire.sync_modes.codec_for_mode import suits
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import NORM_BUCKETS, PLAN
from tests.daemon.shardedmesh import Wide, constant_offers, in_units, without_padding
from tests.everysetting import TOPOLOGIES, codecs
from tests.tiers import mostly_slow

MEMBERS, ROUNDS = 3, 3
NO_MOMENTUM = Momentum.model_construct(factor=0.0, nesterov=False)  # so that what is owed are gradients
PARAMETERS = np.zeros(PLAN.total_values, bool)
for span in PLAN.spans[: PLAN.buckets[NORM_BUCKETS].spans.start]:
    PARAMETERS[span.start : span.start + span.count] = True  # padding is nobody's


class LinkedRing(ChurnRing):
    """Members that are all linked, over any topology, and send the same in each round."""

    def __init__(self, codec: str, topology: str, staleness: int) -> None:
        self.topology = topology
        (self.made,) = without_padding(constant_offers(MEMBERS, 0, 1, 5, poison=0.0)).values()
        super().__init__(MEMBERS, codec, staleness, 1, dict.fromkeys(range(1, ROUNDS + 1), self.made))

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)

    def check(self) -> None:
        self.check_alike()

    def sent(self) -> list[Wide]:
        """What each has contributed to a round, w*g."""
        return [offer.values.astype(np.float64)[PARAMETERS] for offer in self.made if offer.values is not None]

    def applied(self) -> Wide:
        """The means of all rounds, times the weight of all."""
        total: Wide = np.sum([self.members[0].means[number] for number in range(1, ROUNDS + 1)], 0, np.float64)
        return total[PARAMETERS] * sum(offer.weight for offer in self.made)

    def owed(self) -> Wide:
        """By all, at workers and owners, in units of w*g."""
        total = np.zeros(PLAN.total_values)
        for rank, member in enumerate(self.members):
            feedback = member.executor._feedback
            assert feedback is not None
            if parse_codec(self.codec).family.transforms:
                while member.executor._projections.projected.settle_one():
                    pass
            total += in_units(feedback.worker, rank + 1.0)
            total += feedback.owner.values * sum(offer.weight for offer in self.made)
        return total[PARAMETERS]


def every_exchange() -> Iterator[tuple[str, str, int]]:
    """First each codec over its usual topology, and one that adds up over each."""
    legal = [
        (text, topology, bound)
        for text in codecs()
        for topology in TOPOLOGIES
        if goes(text, topology)
        for bound in (0, 1)
        if suits(sync_settings(f"ssp:{bound}"), parse_codec(text))
    ]
    return iter(sorted(legal, key=lambda one: not is_usual(*one)))


def goes(codec: str, topology: str) -> bool:
    try:
        collective_for(parse_codec(codec), topology)
    except ValueError:
        return False
    return True


def is_usual(codec: str, topology: str, staleness: int) -> bool:
    usual = collective_for(parse_codec(codec)).topology.name == topology
    return staleness == 0 and (usual or codec == "fp16")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("codec", "topology", "staleness"), mostly_slow(every_exchange(), sum(is_usual(*one) for one in every_exchange()))
)
async def test_all_have_the_same_means_of_what_was_sent(
    codec: str, topology: str, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O9, C2: to the bit. P1: what was sent was applied or is owed; of a codec that owes nothing, or whose means are
    over those that sent a value, each member has its share in the means."""
    monkeypatch.setattr("tests.daemon.executorring.MOMENTUM", NO_MOMENTUM)
    ring = LinkedRing(codec, topology, staleness)
    await ring.finish()
    applied, sent, spec = ring.applied(), ring.sent(), parse_codec(codec)
    if spec.error_feedback and not spec.of_senders:
        came = ROUNDS * np.sum(sent, axis=0)
        rounded = spec.warmup or (spec.family.transforms and spec.choice("values") != "fp32")
        error = np.abs(applied + ring.owed() - came).max()
        assert error <= (2e-3 if rounded else 1e-5) * np.abs(came).max(), "P1"
    for own in sent:
        share = float(applied @ own / (own @ own)) / ROUNDS
        assert share > 0.01 if spec.error_feedback else round(share) == 1, share
    ring.close()

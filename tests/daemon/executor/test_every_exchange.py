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
from meshwire.sync_modes.codec_for_mode import suits
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.churnring import ChurnRing
from tests.daemon.executorring import NORM_BUCKETS, PLAN
from tests.daemon.shardedmesh import constant_offers, without_padding
from tests.everysetting import TOPOLOGIES, codecs

MEMBERS, ROUNDS = 3, 4
CASTS = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}  # relative error, of the mean
ALIKE_MIN = 0.05  # cosine; of vectors that have nothing to do with each other it is 0.003 here
PARAMETERS = slice(PLAN.buckets[NORM_BUCKETS].start)


class LinkedRing(ChurnRing):
    """Members that are all linked, over any topology."""

    def __init__(self, codec: str, topology: str, staleness: int) -> None:
        self.topology = topology
        (made,) = without_padding(constant_offers(MEMBERS, 0, 1, 5, poison=0.0)).values()
        self.sent = sum(offer.values.astype(np.float64) for offer in made if offer.values is not None)
        self.weight = sum(offer.weight for offer in made)
        super().__init__(MEMBERS, codec, staleness, 1, dict.fromkeys(range(1, ROUNDS + 1), made))
        self.slow = -1

    def receivers(self, rank: int) -> tuple[int, ...]:
        return tuple(other for other in self.ranks if other != rank)

    def check(self) -> None:
        self.check_alike()


def every_exchange() -> Iterator[tuple[str, str, int]]:
    for text in codecs():
        codec = parse_codec(text)
        for topology in TOPOLOGIES:
            try:
                collective_for(codec, topology)
            except ValueError:
                continue
            yield from ((text, topology, bound) for bound in (0, 1) if suits(sync_settings(f"ssp:{bound}"), codec))


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "topology", "staleness"), [*every_exchange()])
async def test_all_have_the_same_means_of_what_was_sent(codec: str, topology: str, staleness: int) -> None:
    """O9, C2: to the bit; of casts they are the means, and of all others they point the same way."""
    ring = LinkedRing(codec, topology, staleness)
    await ring.finish()
    means = [ring.members[0].means[number][PARAMETERS] for number in range(1, ROUNDS + 1)]
    expected = ring.sent[PARAMETERS] / ring.weight
    if codec in CASTS:
        for mean in means:
            assert np.linalg.norm(mean - expected) <= CASTS[codec] * np.linalg.norm(expected)
    else:
        sum_of_all = np.sum(means, axis=0, dtype=np.float64)
        assert sum_of_all @ expected > ALIKE_MIN * np.linalg.norm(sum_of_all) * np.linalg.norm(expected)
    ring.close()

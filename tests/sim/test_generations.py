"""Rounds through generations: nothing is applied by some and not by others, nothing counts twice, all go on (G2 to G6)."""

from random import Random

import pytest

from tests.sim.generationcluster import Change, GenerationCluster
from tests.sim.roundcluster import Mishap, Timing
from tests.sim.test_clusters import MODES

SEEDS = 1500
AFTERWARDS_S_MAX = 600.0


def random_cluster(seed: int) -> GenerationCluster:
    """Everything at random: deaths of daemons and learners, returns, newcomers, also in the middle of changes."""
    random = Random(seed)
    s = random.choice([0, 0, 1, 2, 3, 8])
    members = random.randint(1, 6)
    ranks = members + random.randint(0, 2)
    steps, buckets = random.randint(3, 14), random.randint(1, 3)
    straggler, visibility = random.choice(MODES)
    mishaps = tuple(
        Mishap(
            rank=random.randrange(ranks),
            step=random.randint(1, steps),
            kind=random.choice(["idle", "die", "leave", "hang", "poison", "overflow"]),
            bucket=random.randint(0, buckets),
            for_s=random.choice([0.0, 0.5, 3.0, 30.0]),
        )
        for _ in range(random.choice([0, 0, 1, 4]))
    )
    at_s = [random.uniform(0, 1.2 * steps)] + [random.uniform(0, 1.2 * steps) for _ in range(random.randint(0, 5))]
    burst_s = random.choice([0.3, 30.0])  # the later ones fall into the changes of the earlier
    changes = tuple(
        Change(
            at_s=min(later_s, at_s[0] + burst_s) if random.random() < 0.5 else later_s,
            kind=random.choice(["die", "die", "lose", "join", "join"]),
            rank=random.randrange(ranks),
        )
        for later_s in sorted(at_s)
    )
    return GenerationCluster(
        seed,
        members=members,
        ranks=ranks,
        changes=changes,
        change_s=random.choice([0.01, 0.3, 3.0]),
        load_s=random.choice([0.1, 5.0, 20.0]),
        staleness=s,
        steps=steps,
        straggler=straggler,
        visibility=visibility,
        unapplied_max=random.choice([s + 1, s + 3, 1 << 30]),
        buckets=buckets,
        mishaps=mishaps,
        timing=Timing(
            step_s=tuple(random.choice([1.0, 1.0, 1.3, 3.0, 6.0]) for _ in range(ranks)),
            jitter=random.choice([0.0, 0.1, 0.5]),
            delay_s=(0.0, random.choice([0.001, 0.05, 1.0])),
            exchange_s=(0.0, random.choice([0.01, 0.3, 1.5])),
        ),
    )


@pytest.mark.parametrize("part", range(10))
def test_every_history_keeps_the_rules_and_goes_on(part: int) -> None:
    """G2 to G6, R0 to R8, V1, V2 at every event; in the end all live learners have made all their steps, on one base."""
    entered = served = empty = 0
    for seed in range(part, SEEDS, 10):
        cluster = random_cluster(seed).run()
        assert cluster.now_s - cluster.changed_s < AFTERWARDS_S_MAX, f"seed {seed}: they stood still"
        entered += cluster.entered
        served += cluster.served
        empty += sum(not done.binds for done in cluster.completions.values())
    assert (entered > 100, served > 5, empty > 0) == (True, True, True), "what is to be tested happens"

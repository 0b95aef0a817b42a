"""What follows from the rules of rounds together: clusters of round machines in virtual time, each from one seed."""

from random import Random
from typing import Literal

import pytest

from meshwire.sync_modes.mode import Straggler, Visibility
from tests.sim.roundcluster import Cluster, Mishap, Timing
from tests.tiers import mostly_slow

MODES: tuple[tuple[Straggler, Visibility], ...] = (
    ("carry", "eager"),
    ("carry", "eager"),
    ("wait", "eager"),
    ("wait", "fixed"),
)


def random_cluster(seed: int, members: int, s: int) -> Cluster:
    """Everything at random: speeds up to 1:6, delays up to a step, links, mishaps of every kind, barriers, memory."""
    random = Random(seed)
    steps = random.randint(3, 14)
    buckets = random.randint(1, 4)
    straggler, visibility = random.choice(MODES)
    mishaps = tuple(
        Mishap(
            rank=random.randrange(members),
            step=random.randint(1, steps),
            kind=random.choice(["idle", "die", "leave", "hang", "poison", "overflow"]),
            bucket=random.randint(0, buckets),
            for_s=random.choice([0.0, 0.5, 3.0, 30.0]),
        )
        for _ in range(random.choice([0, 1, 2, 6]))
    )
    return Cluster(
        seed,
        members=members,
        staleness=s,
        steps=steps,
        straggler=straggler,
        visibility=visibility,
        unapplied_max=random.choice([s + 1, s + 3, 1 << 30]),
        buckets=buckets,
        mishaps=mishaps,
        barriers=tuple(random.sample(range(1, steps + 1), random.choice([0, 0, 1, 2]))),
        periods=s > 0 and straggler == "carry" and random.random() < 0.4,
        timing=Timing(
            step_s=tuple(random.choice([1.0, 1.0, 1.3, 3.0, 6.0]) for _ in range(members)),
            jitter=random.choice([0.0, 0.1, 0.5]),
            delay_s=(0.0, random.choice([0.001, 0.05, 1.0])),
            exchange_s=(0.0, random.choice([0.01, 0.3, 1.5])),
        ),
    )


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("s", range(9))
def test_every_schedule_keeps_the_rules_and_ends(s: int, members: int, seeds: range) -> None:
    """R0 to R5, R7, R8, V1, V2, G3, G5 at every event, and the progress argument: every learner makes all its steps."""
    for seed in seeds:
        random_cluster(seed * 1000 + s * 10 + members, members, s).run()


# The promises about speed.


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("s", mostly_slow([2, 1, 4, 8]))
@pytest.mark.parametrize("exchange_s", [0.3, 1.5])
def test_equal_learners_share_every_round(members: int, s: int, exchange_s: float) -> None:
    """Equal learners with 10 % jitter make at most 1.05 rounds a step with at least 0.95 m contributors."""
    timing = Timing((1.0,) * members, 0.1, exchange_s=(0.8 * exchange_s, exchange_s))
    cluster = Cluster(1, members=members, staleness=s, steps=100, timing=timing).run()
    rounds, share = cluster.rounds / cluster.steps, cluster.mean_contributors / members
    assert rounds <= 1.05, f"{rounds} rounds a step"
    assert share >= 0.95, f"{share} of the members contribute"


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("exchange_s", mostly_slow([0.8, 0.2, 1.2]))
def test_a_slow_learner_costs_the_others_nothing(exchange_s: float, jitter: float) -> None:
    """R4: one of three learners is 3x slower; with s=3 the others keep above 0.9 of their own speed, and most rounds
    have three contributors or two."""
    for seed in range(4):
        timing = Timing((1.0, 1.0, 3.0), jitter, exchange_s=(0.6 * exchange_s, exchange_s))
        cluster = Cluster(seed, members=3, staleness=3, steps=100, timing=timing).run()
        speed = min(cluster.speed(rank) for rank in (0, 1))
        contributors = cluster.mean_contributors_until(100)
        assert speed > 0.9, f"seed {seed}: {speed} of their own speed, {contributors} contributors"
        assert contributors >= 2.2, f"seed {seed}: {speed} of their own speed, {contributors} contributors"


@pytest.mark.parametrize("members", [2, 3, 6])
@pytest.mark.parametrize("s", mostly_slow([2, 1, *range(3, 9)]))
def test_nobody_waits_for_a_learner_that_s_can_carry(s: int, members: int) -> None:
    """Speed: nobody waits for a peer up to s+1-q times slower, q rounds in flight when its step begins (here 1)."""
    step_s = (1.0,) * (members - 1)
    timing = Timing((*step_s, float(s)), 0.0, delay_s=(0.0, 0.01), exchange_s=(0.1, 0.2))
    carried = Cluster(5, members=members, staleness=s, steps=100, timing=timing).run()
    waits_s = max(sum(carried.waits_s[rank]) for rank in range(members - 1))
    assert waits_s < 0.001 * 100, f"{waits_s} s of 100 s"

    slower = Timing((*step_s, s + 2.0), 0.0, delay_s=(0.0, 0.01), exchange_s=(0.1, 0.2))
    held_up = Cluster(5, members=members, staleness=s, steps=100, timing=slower).run()
    assert max(sum(waits_s) for waits_s in held_up.waits_s) > 1.0, "the bound is one: beyond it they do wait"


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("s", mostly_slow([1, 2]))
def test_who_is_slower_takes_shorter_periods_and_nobody_waits(s: int, members: int) -> None:
    """R9: however slow one is, the others keep their speed, and it is in nearly every round with what it has."""
    timing = Timing((1.0,) * (members - 1) + (5.0,), 0.1, delay_s=(0.0, 0.01), exchange_s=(0.1, 0.3))
    cluster = Cluster(3, members=members, staleness=s, steps=100, timing=timing, periods=True).run()
    for rank in range(members - 1):
        assert cluster.speed(rank) > 0.95, f"{cluster.speed(rank)} of its own speed"
    assert cluster.mean_contributors_until(95) >= 0.95 * members
    assert all(round_ > 95 for _, round_, _ in cluster.nulls), "nobody that computes is passed over"
    held_up = Cluster(3, members=members, staleness=s, steps=100, timing=timing, straggler="wait").run()
    assert held_up.speed(0) < 0.5, "without calls the bound holds them up"


def test_equal_learners_lose_next_to_nothing_to_calls() -> None:
    """R9: of periods with 10 % jitter most end by themselves or in their last tenth."""
    timing = Timing((1.0,) * 4, 0.1, delay_s=(0.0, 0.01), exchange_s=(0.2, 0.5))
    cluster = Cluster(1, members=4, staleness=1, steps=100, timing=timing, periods=True).run()
    assert min(cluster.speed(rank) for rank in range(4)) > 1.0, "who is called ends sooner than by itself"
    assert cluster.rounds <= 1.02 * cluster.steps
    assert cluster.mean_contributors >= 0.98 * 4


# Learners that stop.


@pytest.mark.parametrize("bucket", [0, 1, 2])
@pytest.mark.parametrize("s", mostly_slow([2, 1, 3, 8]))
@pytest.mark.parametrize("step_s", [0.2, 0.5])
def test_a_learner_that_hangs_is_cut_off_at_its_deadline(step_s: float, s: int, bucket: int) -> None:
    """V2 if it is bound, R5 if it is not; the others stand still no longer than its deadline and half a second."""
    hang = Mishap(rank=1, step=20, kind="hang", bucket=bucket, for_s=5.0)
    timing = Timing((step_s,) * 3, 0.1, delay_s=(0.0, 0.01), exchange_s=(0.05, 0.1))
    for seed in range(3):
        cluster = Cluster(seed, members=3, staleness=s, steps=60, timing=timing, mishaps=(hang,)).run()
        ((rank, cut_off),) = cluster.cut_offs
        assert (rank, cut_off.round is None) == (1, bucket == 0)
        assert [(rank, dropped.step) for rank, dropped in cluster.dropped] == ([(1, 20)] if bucket == 0 else [])
        assert len(cluster.void_rounds) == (bucket > 0)
        longest_s = max(max(cluster.waits_s[rank]) for rank in (0, 2))
        assert longest_s < 2.0 + 0.5, f"seed {seed}: they stood still for {longest_s} s"


@pytest.mark.parametrize("kind", ["poison", "overflow", "die", "hang"])
@pytest.mark.parametrize("s", [0, 2])
def test_a_mishap_after_the_bind_costs_one_round(s: int, kind: Literal["poison", "overflow", "die", "hang"]) -> None:
    """V1, V2, O6: the round that the step was bound to is void on all members; no member is lost."""
    mishap = Mishap(rank=1, step=20, kind=kind, bucket=1, for_s=30.0)
    timing = Timing((1.0,) * 3, 0.1)
    cluster = Cluster(4, members=3, staleness=s, steps=40, timing=timing, mishaps=(mishap,)).run()
    (void,) = cluster.void_rounds
    assert cluster.binds[void][1].step == 20
    assert cluster.completions[void].overflow == (kind == "overflow")
    assert cluster.completions[void].not_finite == (kind == "poison")
    assert len(cluster.cut_offs) == (kind == "hang")


def test_a_stopped_learner_is_waited_for_when_s_is_zero() -> None:
    """R5, R7: stopped before it has bound, at s=0 it costs nobody's samples, however long it takes."""
    mishap = Mishap(rank=1, step=20, kind="hang", bucket=0, for_s=30.0)
    timing = Timing((1.0,) * 3, 0.1)
    waited = Cluster(5, members=3, staleness=0, steps=40, timing=timing, mishaps=(mishap,)).run()
    assert not waited.cut_offs
    assert not waited.dropped
    assert waited.mean_contributors == 3


def test_what_is_kept_for_a_stopped_learner_is_bounded() -> None:
    """R5, M1: the others go on until its daemon can keep no more rounds for it, and then wait for it to apply."""
    mishap = Mishap(rank=1, step=20, kind="hang", bucket=0, for_s=60.0)
    timing = Timing((0.5,) * 3, 0.1)

    def run(unapplied_max: int) -> tuple[float, int]:
        cluster = Cluster(
            5, members=3, staleness=2, steps=60, timing=timing, mishaps=(mishap,), unapplied_max=unapplied_max
        ).run()
        return max(max(waits_s) for waits_s in cluster.waits_s), cluster.unapplied_most

    free_s, all_kept = run(1 << 30)
    assert (free_s < 1.0, all_kept > 30) == (True, True), f"they waited {free_s} s, {all_kept} rounds were kept"
    held_s, kept = run(10)
    assert (held_s > 40.0, kept) == (True, 10), f"they waited {held_s} s, {kept} rounds were kept"


# Lockstep, and runs that repeat.


@pytest.mark.parametrize(("s", "straggler"), [(0, "carry"), (0, "wait"), (1, "wait"), (3, "wait"), (8, "wait")])
@pytest.mark.parametrize("visibility", ["eager", "fixed"])
def test_lockstep_has_every_member_in_every_round(s: int, straggler: Straggler, visibility: Visibility) -> None:
    """R7, R8: BSP, and classic SSP, with one learner three times slower."""
    timing = Timing((1.0, 1.0, 3.0), 0.1)
    cluster = Cluster(
        2, members=3, staleness=s, steps=30, straggler=straggler, visibility=visibility, timing=timing
    ).run()
    assert cluster.rounds == 30
    assert cluster.mean_contributors == 3
    assert cluster.calls == 0


@pytest.mark.parametrize("s", [0, 1, 2, 5, 8])
def test_fixed_visibility_fixes_every_base(s: int) -> None:
    """R8: the base of step n is max(0, n-1-s), or what a barrier applied if that is more, whatever the timing: the
    rounds of two runs have the same contributions on the same bases."""
    barrier = 12
    bases = [max(0, n - 1 - s, barrier - 1 if n >= barrier else 0) for n in range(1, 31)]
    runs = []
    for seed, step_s in ((1, (1.0, 1.0, 1.0)), (2, (3.0, 0.2, 1.0)), (3, (0.5, 1.0, 5.0))):
        timing = Timing(step_s, 0.5, delay_s=(0.0, 0.7), exchange_s=(0.0, 1.5))
        idle = Mishap(rank=seed % 3, step=barrier, kind="idle", for_s=9.0)
        cluster = Cluster(
            seed,
            members=3,
            staleness=s,
            steps=30,
            straggler="wait",
            visibility="fixed",
            timing=timing,
            mishaps=(idle,),
            barriers=(barrier,),
        ).run()
        assert cluster.step_bases == [list(enumerate(bases, 1))] * 3
        runs.append(cluster)
    assert runs[0].binds == runs[1].binds == runs[2].binds
    assert runs[0].bases == runs[1].bases == runs[2].bases


def test_eager_visibility_depends_on_the_timing() -> None:
    """R8: what `fixed` is for: two eager runs of the same learners see different bases."""
    timing = Timing((1.0, 1.0, 1.5), 0.5, exchange_s=(0.0, 1.5))
    runs = [Cluster(seed, members=3, staleness=2, steps=30, straggler="wait", timing=timing).run() for seed in (1, 2)]
    assert runs[0].step_bases != runs[1].step_bases

"""Rounds through generations (G2 to G6): applied by all survivors or by none, counted once, and all go on."""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

import pytest

from meshwire.messages.rounds import Bind, Seal
from meshwire.ownparts import OwnParts
from meshwire.roundcore import RoundCore
from meshwire.roundevents import Effect, RoundComplete
from meshwire.roundlearner import RoundSettings
from meshwire.rounds import RoundMachine
from meshwire.roundtable import RoundTable
from tests.sim.brokenrules import no_freeze
from tests.sim.generationcluster import Change, GenerationCluster
from tests.sim.roundcluster import Mishap, Timing
from tests.sim.test_clusters import MODES

SEEDS = 1000
PARTS = 10
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


def run_all(seeds: Iterable[int]) -> list[GenerationCluster]:
    return [random_cluster(seed).run() for seed in seeds]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_keeps_the_rules_and_goes_on(part: int) -> None:
    """G2 to G6, R0 to R8, V1, V2 at every event; in the end all live learners have made all steps, on one base."""
    clusters = run_all(range(part, SEEDS, PARTS))
    for cluster in clusters:
        assert cluster.now_s - cluster.changed_s < AFTERWARDS_S_MAX, f"seed {cluster.seed}: they stood still"
    assert sum(cluster.entered for cluster in clusters) > 100, "what is to be tested happens"
    assert sum(cluster.served for cluster in clusters) > 5


# The same with one rule left out.


Broken = Callable[[pytest.MonkeyPatch], None]


def binds_not_told_again(patch: pytest.MonkeyPatch) -> None:
    """G6: what was bound stays bound, but nobody hears of it."""
    tell = RoundCore._tell_again

    def quiet(self: RoundCore, round_: int, own: tuple[Bind, Seal | None] | None, now_s: float) -> None:
        if own is None:
            tell(self, round_, own, now_s)
            return
        bind, seal = own
        self._own(self._table.bind(self.settings.rank, bind))
        if seal is not None:
            self._own(self._table.seal(self.settings.rank, seal))

    patch.setattr(RoundCore, "_tell_again", quiet)


def parts_not_told_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnParts, "again", lambda *_: [])


def nulls_not_told_again(patch: pytest.MonkeyPatch) -> None:
    tell = RoundCore._tell_again

    def tell_again(self: RoundCore, round_: int, own: Any, now_s: float) -> None:
        if own is not None:
            tell(self, round_, own, now_s)

    patch.setattr(RoundCore, "_tell_again", tell_again)


def laggards_not_served(patch: pytest.MonkeyPatch) -> None:
    """G4: it counts the rounds that it lacks, and goes on without them."""

    def served(self: RoundMachine, done: RoundComplete, now_s: float) -> list[Effect]:
        assert done.round == self.complete + 1
        self._table.count_complete()
        return self._settle(now_s)

    patch.setattr(RoundMachine, "served", served)


def rounds_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    """G6: what others had said of rounds above the cut counts on."""
    entered = RoundTable.entered

    def kept(self: RoundTable, settings: RoundSettings, promised: Mapping[int, int]) -> RoundTable:
        table = entered(self, settings, promised)
        for round_, state in self._rounds.items():
            if round_ > self.complete:
                for rank, bind in state.binds.items():
                    if rank != settings.rank and rank in settings.ranks:
                        table._round(round_).binds[rank] = bind
        return table

    patch.setattr(RoundTable, "entered", kept)


def freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """G5: what a laggard lacks is freed once the generation is entered."""
    entered = RoundTable.entered
    patch.setattr(RoundTable, "entered", lambda self, settings, _: entered(self, settings, {}))


def calls_remembered(patch: pytest.MonkeyPatch) -> None:
    """G6, R3: calls of rounds that nobody may be left in."""
    enter = RoundMachine.enter

    def remembering(self: RoundMachine, *inputs: Any) -> list[Effect]:
        newest = self._calls.newest
        effects = enter(self, *inputs)
        self._calls.heard(newest)
        return effects + self._settle(inputs[-1])

    patch.setattr(RoundMachine, "enter", remembering)


@pytest.mark.parametrize(
    ("broken", "seed"),
    [
        (no_freeze, 0),
        (binds_not_told_again, 0),
        (parts_not_told_again, 0),
        (nulls_not_told_again, 0),
        (laggards_not_served, 0),
        (rounds_not_forgotten, 215),
        (freed_too_early, 0),
        (calls_remembered, 365),
    ],
)
def test_a_rule_that_is_left_out_is_missed(monkeypatch: pytest.MonkeyPatch, broken: Broken, seed: int) -> None:
    """The invariants above see it, in one of the histories from `seed` on."""
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_all(range(seed, seed + SEEDS))

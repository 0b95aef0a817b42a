"""C3: members are lost, begun again and parted while a job goes over to other settings, and proposers lie about it."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest

from meshwire.message_base import Wire
from meshwire.messages.generation import Enter, Entered
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsWish, local_steps
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterfaults import Fault, befall, calm
from tests.sim.clustermoments import Moment
from tests.tiers import mostly_long, mostly_slow

ASKED_S = 3.0
CALM_AFTER_S = 12.0
WISH = SettingsWish(codec="int8", period=16)
SYNCS = ("local:4", "local:4,ssp:1")
KINDS = ("kill", "quick restart", "power cut", "kill learner", "partition", "sleep", "reset")
BEFORE_THE_COMMIT = (Moment.PROMISES, (0.0, 0.0007, 0.003))
BEFORE_ITS_FIRST_ROUND = (Moment.ENTERS, (0.0, 0.0007, 0.1, 0.6))


def cluster_of(sync: str, seed: int = 0, straggler: str | None = None) -> Cluster:
    """Three laptops that compute, of which the second is asked for other settings soon."""
    settings = sync_settings(sync, straggler)
    cluster = Cluster(seed, Setting(founders=3, sync=settings, step_s=(0.5, 0.5, 0.6), patience_s=1.0))
    cluster.run_until(ASKED_S)
    return cluster


def ask(cluster: Cluster, number: int = 1, wish: SettingsWish = WISH) -> None:
    daemon = cluster.daemons[number]
    daemon.do(partial(daemon.ask_settings, wish))


def goes_on(cluster: Cluster) -> tuple[SettingsChange, ...]:
    """All is well again. Returns what the history has changed, which all have in common."""
    cluster.run_until(cluster.now_s + CALM_AFTER_S)
    calm(cluster)
    cluster.recover()
    cluster.check_end()
    cluster.end()
    assert not cluster.over, cluster.story()
    (changes,) = {daemon.rounds.history.changes for daemon in cluster.daemons if daemon.rounds is not None}
    return changes


def begun(cluster: Cluster, changes: tuple[SettingsChange, ...]) -> set[int]:
    """Asserts that each period in the history had the local steps that are agreed on. Returns with how many."""
    rounds = cluster.daemons[0].rounds
    assert rounds is not None
    bases = {*cluster.histories.path(rounds.history.chain)}
    found = {round_: steps for (base, round_), steps in cluster.periods.items() if base in bases}
    assert found == {round_: local_steps(cluster.sync, changes, round_) for round_ in found}
    return {*found.values()}


@pytest.mark.parametrize("sync", SYNCS)
def test_all_go_over_at_one_round(sync: str) -> None:
    """R1: above all that may be bound; and no round is lost by it."""
    cluster = cluster_of(sync)
    held = max(daemon.rounds.history.complete for daemon in cluster.daemons if daemon.rounds is not None)
    ask(cluster)
    (change,) = goes_on(cluster)
    assert held + cluster.sync.staleness + 2 <= change.first <= held + 2 * cluster.sync.staleness + 3
    assert (change.codec, change.period, change.by) == ("int8", 16, "person")
    assert begun(cluster, (change,)) == {4, 16}


def befallen(sync: str, kind: str, moment: Moment, after_s: float, one: int) -> None:
    """One or more laptops are lost at that moment of the change, after the first that it comes to or another one."""
    cluster = cluster_of(sync)
    fault = Fault(0.0, kind, one, (one + 1) % 3, side=(one,), for_s=3.0)
    cluster.moments.wait(moment, lambda _: cluster.clock.at(after_s, partial(befall, cluster, fault)))
    ask(cluster)
    changes = goes_on(cluster)
    assert cluster.befallen[kind] == 1
    agreed = {change for of_one in cluster.changes.values() for change in of_one}
    assert len(changes) <= 1, "once, or not at all"
    assert all((change.codec, change.period) == ("int8", 16) for change in agreed)
    asker_lives = (kind not in ("kill", "quick restart", "power cut")) or one != 1
    assert changes or not asker_lives, "who was asked repeats it until it is done"
    assert begun(cluster, changes) in ({4, 16}, {4} if not changes else {4, 16})


STRIKES = tuple(
    (moment, after_s, kind, one)
    for moment, times_s in (BEFORE_THE_COMMIT, BEFORE_ITS_FIRST_ROUND)
    for after_s, kind, one in product(times_s, KINDS, range(3))
)
PARTS = -(-len(STRIKES) // 15)  # of which the first runs with all other tests, and some more with the slow ones
PARTS_SLOW = 3


@pytest.mark.parametrize("part", [*mostly_slow(range(PARTS_SLOW)), *mostly_long(range(PARTS_SLOW, PARTS), kept=0)])
@pytest.mark.parametrize("sync", SYNCS)
def test_whoever_is_lost_meanwhile_the_change_comes_once_or_not_at_all(sync: str, part: int) -> None:
    """Between the wish and the commit, and between that and its first round. (What must be true of each event and each
    base, the cluster asserts.)"""
    for moment, after_s, kind, one in STRIKES[part::PARTS]:
        try:
            befallen(sync, kind, moment, after_s, one)
        except AssertionError as error:
            error.add_note(f"{sync}: {kind} {one}, {after_s} s after the first {moment.value}")
            raise


LIAR = 1  # which is asked, and proposes
Lie = Callable[[Cluster, SettingsChange], tuple[SettingsChange, ...]]


def lies(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, told: Lie, times: int = 1) -> list[str]:
    """The first words to enter a generation that brings a change are others than its members' promises make, as the
    liar sends them. Returns whom it has told one."""
    cluster.liars = frozenset([LIAR])
    sends = LinkEnd.notify
    heard: list[str] = []

    def notify(end: LinkEnd, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        if isinstance(body, Enter) and body.changes and end._here.number == LIAR and len(heard) < times:
            heard.append(end.name)
            body = body.model_copy(update={"changes": told(cluster, body.changes[-1])})
        sends(end, body, job=job, generation=generation, complete=complete)

    monkeypatch.setattr(LinkEnd, "notify", notify)
    return heard


def bound_already(_cluster: Cluster, change: SettingsChange) -> tuple[SettingsChange, ...]:
    return (change.model_copy(update={"first": change.first - 1}),)


def twice(_cluster: Cluster, change: SettingsChange) -> tuple[SettingsChange, ...]:
    return (change, change)


def no_codec(_cluster: Cluster, change: SettingsChange) -> tuple[SettingsChange, ...]:
    return (change.model_copy(update={"codec": "none"}),)


def of_learners_that_wait(_cluster: Cluster, change: SettingsChange) -> tuple[SettingsChange, ...]:
    return (change.model_copy(update={"period": 1}),)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (bound_already, "may have bound"),
        (twice, "changes of settings begin at the rounds"),
        (no_codec, "there is no codec"),
        (of_learners_that_wait, "takes fewer local steps"),
    ],
)
def test_who_brings_settings_that_nobody_can_have_agreed_on_is_refused(
    lie: Lie, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: by whom it tells them, and the others follow; the change comes all the same, once."""
    cluster = cluster_of("local:4,ssp:1")
    heard = lies(monkeypatch, cluster, lie, times=2)
    ask(cluster)
    (change,) = goes_on(cluster)
    assert len(heard) == 2
    assert any(why in text for text in cluster.accused)
    assert begun(cluster, (change,)) == {4, 16}


def splits(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> dict[str, Enter]:
    """The liar tells one member to enter with another codec than the others, and keeps that from being seen by itself:
    each of them hears of it what it was told. Returns who was told which word."""
    cluster.liars = frozenset([LIAR])
    sends = LinkEnd.notify
    told: dict[str, Enter] = {}

    def notify(end: LinkEnd, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        liar = end._here.number == LIAR
        if (
            isinstance(body, Enter)
            and liar
            and body.changes
            and (not told or body.generation == told["all"].generation)
        ):
            told.setdefault("all", body)
            if len(told) == 1:
                other = body.changes[-1].model_copy(update={"codec": "int4"})
                body = told[end.name] = body.model_copy(update={"changes": (other,)})
        elif isinstance(body, Entered) and told and body.generation == told["all"].generation:
            if liar and end.name in told:
                body = body.model_copy(update={"told": told[end.name].digest()})
            elif end._here.name in told and end.hello.name == cluster.daemons[LIAR].name:
                body = body.model_copy(update={"told": told["all"].digest()})
        sends(end, body, job=job, generation=generation, complete=complete)

    monkeypatch.setattr(LinkEnd, "notify", notify)
    return told


@pytest.mark.parametrize("sync", SYNCS)
def test_who_tells_two_members_different_settings_is_refused_by_both(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G10: before a round goes by them; each would take the other for who breaks the rules else."""
    cluster = cluster_of(sync)
    told = splits(monkeypatch, cluster)
    ask(cluster)
    changes = goes_on(cluster)
    assert len(told) == 2, "all, and one of them otherwise"
    assert len([text for text in cluster.accused if "by another word than this device" in text]) == 2
    assert len(changes) <= 1
    assert begun(cluster, changes) in ({4, 16}, {4})


@pytest.mark.parametrize("sync", ["bsp", "local:4,stream=2,tau=1"])
def test_other_settings_cost_a_generation_and_not_one_after_the_other(sync: str) -> None:
    """C3, G7: whoever asks for them does not ask again while the others enter the generation that brings them, also
    where a learner is lost meanwhile, and one comes in: some generations, and not hundreds."""
    for seed in range(3):
        setting = Setting(founders=2, newcomers=1, sync=sync_settings(sync), delays_s=(0.001, 0.005, 0.02))
        cluster = Cluster(seed, setting, recording=True)
        cluster.clock.at(0.3, partial(befall, cluster, Fault(0.3, "ask", 0, 1)))
        cluster.clock.at(0.5, partial(befall, cluster, Fault(0.5, "kill learner", 1, 1)))
        cluster.run_until(cluster.now_s + 8.0)
        numbers = [daemon.machine.generation.number for daemon in cluster.daemons if daemon.machine.generation]
        assert max(numbers) <= 8, cluster.story()
        assert cluster.befallen["ask"], "or nobody has asked"
        cluster.end()

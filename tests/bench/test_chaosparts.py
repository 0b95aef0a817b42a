"""The pure parts of the soak and of the recovery figures."""

from dataclasses import astuple
from datetime import datetime

import pytest

from tests.bench.chaosjob import Record, missing, repeated
from tests.bench.recovery import Row, judged
from tests.bench.recoverylog import (
    Entered,
    Lost,
    Round,
    Story,
    rate_ratio,
    read_log,
    read_rounds,
    times,
    whole_again_s,
)
from tests.bench.soakschedule import (
    INTERVAL_S,
    LINK_VERBS,
    PEER_VERBS,
    REPAIRS,
    VERBS,
    Action,
    Schedule,
    power_cuts,
)

NAMES = ("anna", "bert", "cleo", "dora")


def actions(seed: int = 1, **options: object) -> list[Action]:
    return list(Schedule(NAMES, **{"seed": seed, "duration_s": 600.0, **options}))  # type: ignore[arg-type]


def test_a_seed_is_one_schedule() -> None:
    assert actions(1) == actions(1) != actions(2)
    assert {action.verb for action in actions(1)} == {*VERBS, *REPAIRS.values(), "storm", "calm"}


def test_something_happens_every_half_to_two_seconds_of_a_storm() -> None:
    storming, last_s, pauses = False, 0.0, []
    for action in actions():
        if storming and action.verb not in ("calm", "storm"):
            pauses.append(action.at_s - last_s)
        storming = action.verb != "calm" and (storming or action.verb == "storm")
        last_s = action.at_s
    assert len(pauses) > 200
    assert all(pause_s <= INTERVAL_S[1] for pause_s in pauses)


def test_whoever_is_spared_is_left_alone_and_a_calm_begins_whole() -> None:
    spared: tuple[str, ...] = ()
    broken: dict[frozenset[str], str] = {}
    for seed in range(20):
        for action in actions(seed, spare=2):
            who = frozenset(action.who)
            match action.verb:
                case "storm":
                    spared = action.who
                case "calm":
                    assert not broken
                case "spawn" | "thaw" | "heal" | "empty":
                    assert REPAIRS[broken.pop(who)] == action.verb
                case _:
                    assert who not in broken, "nothing is broken twice"
                    assert not (action.verb in PEER_VERBS and who <= set(spared))
                    assert not (action.verb in LINK_VERBS and who == set(spared))
                    if action.verb in REPAIRS:
                        broken[who] = action.verb


def test_verbs_can_be_left_out() -> None:
    verbs = {action.verb for action in actions(verbs=("delay", "kill"))}
    assert verbs == {"storm", "calm", "delay", "heal", "kill", "spawn"}


def test_nobody_is_spared_but_one_daemon_is_up() -> None:
    """Any daemon, any learner, all learners at once; never all daemons, which is the power cut's."""
    killed: set[str] = set()
    learners = 0
    for seed in range(10):
        down: set[str] = set()
        for action in actions(seed):
            if action.verb == "kill":
                down |= {*action.who}
                killed |= {*action.who}
            elif action.verb == "spawn":
                down -= {*action.who}
            learners += action.verb == "learners"
            assert down != {*NAMES}
    assert killed == {*NAMES}
    assert learners > 30


def test_daemons_may_live_for_a_time() -> None:
    first = min(action.at_s for seed in range(10) for action in actions(seed, living_s=300.0) if action.verb == "kill")
    assert 300.0 <= first < 420.0


def test_the_power_is_cut_for_all_and_all_come_up_in_any_order() -> None:
    cuts = list(power_cuts(NAMES, seed=1, duration_s=600.0))
    orders = set()
    while cuts:
        storm, power, *cuts = cuts
        ups, calm, cuts = cuts[: len(NAMES)], cuts[len(NAMES)], cuts[len(NAMES) + 1 :]
        assert [storm.verb, power.verb, calm.verb] == ["storm", "power", "calm"]
        assert {action.verb for action in ups} == {"spawn"}
        orders.add(tuple(action.who[0] for action in ups))
        assert {name for action in ups for name in action.who} == {*NAMES}
    assert len(orders) > 2


def test_two_peers_are_both_broken() -> None:
    two = list(Schedule(NAMES[:2], seed=1, duration_s=300.0))
    assert {action.who for action in two if action.verb == "kill"} == {("anna",), ("bert",)}


def test_a_sample_that_counts_twice_is_noticed() -> None:
    """X6. A rank that is behind, in epoch 0, may hold what others have begun, and no more."""
    good = [Record(0.0, 0, 0, 0, 0), Record(1.0, 1, 1, 1, 0), Record(2.0, 0, 0, 2, 0)]
    assert not repeated(good)
    (text,) = repeated([*good, Record(3.0, 2, 1, 3, 0)])
    assert text == "rank 2 has a sample 3 times in its base, 2 epochs have begun"
    assert missing([*good, Record(4.0, 0, 2, 2, 8)]) == 8


# --- what logs and traces tell ---

LOG = """\
2026-11-21 15:46:14,185 INFO meshtraind.peers.links: lost cleo (498b73f5): silent for 2.0 s
Traceback (most recent call last):
2026-11-21 15:46:14,685 INFO meshtraind.session.membership_driver: job 3f9c2a1b04de: generation 2 entered after 0.120 \
s: members anna, bert (loading); cut 17
2026-11-21 15:46:14,700 INFO meshtraind.session.membership_driver: job 000000000000: generation 9 entered after 0.120 \
s: members anna; cut 17
"""


def story(name: str, detected_s: float, entered_s: float, round_s: float, void: bool = False) -> Story:
    return Story(
        name,
        (Lost(detected_s, "cleo", "silent for 2.0 s"),),
        (Entered(entered_s, 2, 0.1, frozenset(("anna", "bert")), frozenset(), 17),),
        (
            Round(entered_s - 1, 17, False),
            *((Round(round_s - 0.05, 18, True),) * void),
            Round(round_s, 18 + void, False),
        ),
    )


def test_a_log_tells_of_losses_and_of_this_jobs_generations() -> None:
    base_s = datetime(2026, 11, 21, 15, 46, 14).timestamp()
    lost, entered = read_log(LOG.splitlines(keepends=True), "3f9c2a1b04de", base_s)
    (loss,) = lost
    assert (loss.name, loss.reason) == ("cleo", "silent for 2.0 s")
    assert loss.at_s == pytest.approx(0.185)
    (only,) = entered
    assert (only.number, only.fenced_s, only.cut) == (2, 0.12, 17)
    assert only.at_s == pytest.approx(0.685)
    assert only.computing == frozenset({"anna"})
    assert only.loading == frozenset({"bert"})


def test_a_trace_tells_of_rounds() -> None:
    lines = [
        '{"t_s":1.5,"what":"RoundComplete","round":3,"void":false,"binds":{}}\n',
        '{"t_s":1.6,"what":"Committed","round":3}\n',
        '{"t_s":1.7,"what":"RoundComplete","round":4,"vo',
    ]
    assert read_rounds(lines) == [Round(1.5, 3, False)]


def test_times_are_of_the_slowest_and_a_void_round_is_no_round() -> None:
    both = [story("anna", 12.0, 12.2, 12.5), story("bert", 12.1, 12.3, 12.9, void=True)]
    found = times(both, 10.0, frozenset({"cleo"}))
    assert astuple(found) == pytest.approx((2.1, 2.3, 2.9, 0.1))
    assert times(both, 12.25, frozenset({"cleo"})).agreed_s is None, "not all of them entered one after that"
    assert whole_again_s(both, 11.0, frozenset({"anna", "bert"})) == pytest.approx(1.3)
    assert whole_again_s(both, 11.0, frozenset({"anna", "bert", "cleo"})) is None


def test_a_rate_is_a_ratio_to_before() -> None:
    rounds = tuple(Round(at_s / 10, at_s, False) for at_s in range(100)) + tuple(
        Round(10 + at_s / 5, 100 + at_s, False) for at_s in range(50)
    )
    assert rate_ratio([Story("anna", (), (), rounds)], (0.0, 10.0), (10.0, 20.0)) == pytest.approx(0.5)
    assert rate_ratio([Story("anna", (), (), ())], (0.0, 10.0), (10.0, 20.0)) is None


def test_a_goal_is_met_only_by_a_job_that_went_on_with_each_sample_once() -> None:
    row = Row("peer silent", 3, None, "recovered", round_s=5.9)
    assert judged(row, 5.0).met
    assert not judged(row, 2.0).met
    assert not judged(Row("peer silent", 3, None, "recovered", round_s=5.9, repeated=1), 5.0).met
    assert not judged(Row("peer silent", 3, None, "the job is failed on anna", round_s=5.9), 5.0).met
    assert not judged(Row("peer silent", 3, None, "recovered"), 5.0).met

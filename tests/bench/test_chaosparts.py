"""The pure parts of the soak and of the recovery figures."""

from tests.bench.chaosjob import Record, missing, repeated
from tests.bench.soakschedule import INTERVAL_S, LINK_VERBS, PEER_VERBS, REPAIRS, VERBS, Action, Schedule

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
        for action in actions(seed):
            who = frozenset(action.who)
            match action.verb:
                case "storm":
                    spared = action.who
                case "calm":
                    assert not broken
                case "spawn" | "thaw" | "heal":
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

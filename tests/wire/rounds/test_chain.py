"""G4: the chain names a history: equal on all members of it, another one for any other."""

import dataclasses
import itertools

import pytest

from meshwire.messages.rounds import Bind, Poison, SampleBlock
from meshwire.rounds.chain import CHAIN_BYTES, START, chain
from meshwire.rounds.effects import RoundComplete

BIND = Bind(
    round=7, step=9, base=5, weight=8.0, samples=(SampleBlock(epoch=1, first=0, end=8),), hyperparameters=b"lr", claim=2
)
POISON = Poison(bucket=1, parameter="layer.weight", reason="not finite")
DONE = RoundComplete(
    7, False, "", binds={0: BIND, 3: BIND}, poisons={}, used=b"\x05", integers=(4, 2), squared_norm=0.25
)


def test_it_is_the_same_on_every_machine() -> None:
    """A change of these bytes splits a mesh of two versions into two histories: it belongs to the protocol."""
    first = chain(START, 1, DONE)
    assert first.hex() == "fbeef6f32e20379881f436e9b5807576"
    assert len(first) == len(START) == CHAIN_BYTES == 16


def test_the_order_in_which_parts_came_is_no_fact() -> None:
    poisons = {3: POISON, 0: POISON}
    one = dataclasses.replace(DONE, binds={3: BIND, 0: BIND}, poisons=poisons)
    other = dataclasses.replace(DONE, poisons=dict(sorted(poisons.items())))
    assert chain(START, 1, one) == chain(START, 1, other)
    assert chain(START, 1, dataclasses.replace(DONE, reason="for people")) == chain(START, 1, DONE)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 8},
        {"void": True},
        {"binds": {0: BIND}},
        {"binds": {0: BIND, 2: BIND}},
        {"binds": {0: BIND, 3: BIND.model_copy(update={"weight": 8.000000001})}},
        {"binds": {0: BIND, 3: BIND.model_copy(update={"samples": ()})}},
        {"poisons": {0: POISON}},
        {"used": b"\x01"},
        {"used": b"\x05\x00"},
        {"integers": (4, 3)},
        {"squared_norm": 0.25000000000000006},
        {"squared_norm": -0.25},
    ],
    ids=str,
)
def test_every_fact_counts(change: dict[str, object]) -> None:
    """What could be applied otherwise has another chain from there on."""
    changed = dataclasses.replace(DONE, **change)  # type: ignore[arg-type]
    assert chain(START, 1, changed) != chain(START, 1, DONE)
    following = dataclasses.replace(DONE, round=9)
    assert chain(chain(START, 1, changed), 1, following) != chain(chain(START, 1, DONE), 1, following)


def test_what_is_told_of_a_round_is_hashed_and_its_result_is_not() -> None:
    """G4: within a generation these facts determine the result; O9 finds a member on which it came out otherwise."""
    facts = {field.name for field in dataclasses.fields(RoundComplete)} - {"reason"}
    assert facts == {"round", "void", "binds", "poisons", "used", "integers", "squared_norm"}


def test_generation_and_history_count() -> None:
    """A round that is run again by others is another round."""
    chains = [
        chain(previous, generation, DONE) for previous, generation in itertools.product((START, b"x" * 16), (1, 2))
    ]
    assert len(set(chains)) == 4
    assert chain(START, 2**64 - 1, DONE)

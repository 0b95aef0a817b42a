"""A round that is served has its contributors' weights with it: its binds are among its facts (C2, G4)."""

from types import SimpleNamespace
from typing import Any, cast

from meshtraind.rounds.generation_change import GenerationChange
from meshwire.messages.generation import ServedRound
from meshwire.messages.rounds import Bind


def test_each_contributors_weight_comes_with_a_served_round() -> None:
    """In the order of ranks, as its bytes lie: the mean over those that sent a value takes each one's own."""
    taken: list[tuple[object, ...]] = []
    plane = SimpleNamespace(take_served=lambda *given: taken.append(given))
    history = SimpleNamespace(add_served=lambda *_: None, samples=0)
    performer = SimpleNamespace(handle=lambda _: None, deal=None)
    change = GenerationChange(
        cast(Any, SimpleNamespace(plane=plane, history=history)), cast(Any, performer), 1, (0, 1, 2)
    )
    binds = tuple((rank, Bind(round=7, step=3, base=6, weight=weight)) for rank, weight in ((2, 4.0), (0, 24.0)))
    change.take_served(
        ServedRound(
            round=7,
            void=False,
            reason="",
            binds=binds,
            poisons=(),
            used=b"\x01",
            integers=(),
            squared_norm=1.0,
            chain=bytes(16),
            poisoned=b"\x00",
            size_bytes=0,
        )
    )
    assert taken == [(7, b"\x00", 0b101, [24.0, 4.0])]

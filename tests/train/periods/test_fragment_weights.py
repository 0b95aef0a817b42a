"""Local weights of parts that take turns, beside the base: what is exchanged for a round, and what has one due."""

from typing import Any

import pytest
import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.periods import fragment_weights
from meshtrain.train.periods.fragment_weights import FragmentWeights
from meshtrain.train.periods.local_weights import swap
from meshwire.messages.learner import RoundDone


def done(round_: int, *, void: bool = False) -> RoundDone:
    return RoundDone(
        round=round_, step=round_, void=void, reason="", overflow=False, stop=False, weight=1.0, contributors=1,
        used=b"\xff", integers=(), hyperparameters=b"", squared_norm=0.0,
    )  # fmt: skip


def test_a_round_exchanges_the_parameters_that_travel_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of which a P-th travels, the rest need not be copied for it."""
    copied: list[int] = []

    def counted(some: Any, others: Any) -> None:
        copied.append(len(some))
        swap(some, others)

    monkeypatch.setattr(fragment_weights, "swap", counted)
    parameters = [torch.zeros(2) for _ in range(4)]
    weights = FragmentWeights(parameters, [[0, 1], [2], [3]], None, NoKeptState())
    weights.show_view()
    for parameter in parameters:
        parameter.add_(1.0)  # a local step
    weights.show_base(2)
    assert [float(parameter[0]) for parameter in parameters] == [1.0, 1.0, 0.0, 1.0]
    assert [float(weights.difference(at)[0]) for at in range(4)] == [-1.0] * 4
    parameters[2].add_(5.0)  # the outer step
    weights.follow(done(2))
    weights.show_view()
    assert [float(parameter[0]) for parameter in parameters] == [1.0, 1.0, 5.0, 1.0]
    assert copied == [4, 1, 1]
    weights.show_base()
    assert [float(parameter[0]) for parameter in parameters] == [0.0, 0.0, 5.0, 0.0]
    weights.show_base(1)
    weights.begin_anew()
    weights.show_view()
    assert [float(parameter[0]) for parameter in parameters] == [0.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize("how", ["taken in", "void", "on its way", "begun anew"])
def test_each_part_has_a_round_behind_the_last_local_step(how: str) -> None:
    """Whatever becomes of them: it is the same number of rounds on all learners that take their steps together."""
    weights = FragmentWeights([torch.zeros(1) for _ in range(3)], [[0], [1], [2]], None, NoKeptState())
    assert not weights.apart
    for round_ in (1, 2):
        assert weights.weight(round_, 4.0, moved=True) == 4.0 * round_, "of all steps since its part's last round"
        assert weights.apart
        weights.follow(done(round_))
    if how == "begun anew":
        weights.begin_anew()
    counts = 0
    while weights.apart:
        counts += 1
        weight = weights.weight(2 + counts, 4.0, moved=False)
        assert weight == (fragment_weights.NOTHING_WEIGHS if how == "begun anew" else (8.0, 4.0)[counts - 1])
        if how == "on its way":
            weights.keep(2 + counts, 2 + counts)
        else:
            weights.follow(done(2 + counts, void=how == "void"))
    assert counts == 2
    weights.clear()
    assert not weights.apart

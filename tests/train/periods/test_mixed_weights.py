"""Local weights and what mixing has moved of them, kept apart (R9, `,gossip=G`)."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.train.link.neighbour_slots import NeighbourSlots
from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.leader_options import LeaderOptions
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.own_steps import OwnSteps
from meshtrain.train.optim.scaled_rates import ScaledRates
from meshtrain.train.periods.mixed_weights import MixedWeights, Neighbourhood, ShownWeights
from meshwire.message_base import Wire
from meshwire.messages.learner import LearnerTurn, Shown, TurnNews
from meshwire.model.plan import Span
from meshwire.sync_modes.neighbours import Turn

ROUND = 3


class Given:
    """A neighbour whose weights are apart by so much from what was shown to it."""

    def __init__(self, weight: float, difference: float) -> None:
        self.weight, self._difference = weight, difference

    def difference(self, position: int) -> torch.Tensor:
        return torch.full((2,), self._difference + position)


class Scripted:
    """Neighbours of which a test says what comes in the next turn, and what comes late."""

    def __init__(self) -> None:
        self.coming: list[ShownWeights] = []
        self.late: list[ShownWeights] = []
        self.turns: list[tuple[Turn, list[float]]] = []
        self.waits_s: list[float] = []
        self.ended = 0
        self._in_turn = False

    def begin(self, turn: Turn, apart: Callable[[int], torch.Tensor]) -> None:
        self._in_turn = True
        self.turns.append((turn, [float(apart(at)[0]) for at in range(2)]))

    def come(self, wait_s: float) -> Iterable[ShownWeights]:
        if not self._in_turn:
            come, self.late = self.late, []
            return come
        self._in_turn = False
        self.waits_s.append(wait_s)
        come, self.coming = self.coming, []
        return come

    def end_period(self) -> None:
        self.ended += 1


def weights_of(parameters: list[torch.Tensor], around: Neighbourhood, every: int = 1) -> MixedWeights:
    """In a period that has begun."""
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    own = OwnSteps(parameters, OptimizerStep(optimizer), LeaderOptions(optimizer, ScaledRates(None, None)), 0.0)
    weights = MixedWeights(parameters, own, NoKeptState(), around, every)
    weights.show_view()
    return weights


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)]


def test_a_turn_shows_what_weights_are_apart_from_the_base_by() -> None:
    """By own steps and by mixing; behind each G steps."""
    held, around = parameters(), Scripted()
    weights = weights_of(held, around, every=2)
    for taken in range(1, 5):
        for each in held:
            each += 1.0
        around.coming = [Given(0.5, 2.0)] if taken == 2 else []
        weights.stepped(ROUND, taken)
    assert around.turns == [((ROUND, 1), [2.0, 2.0]), ((ROUND, 2), [4.0 + 1.0, 4.0 + 1.5])]
    assert [float(each[0]) for each in held] == [5.0, 6.5]
    assert [float(weights.difference(at)[0]) for at in range(2)] == [-4.0, -4.0]


def test_late_weights_are_mixed_behind_a_later_step() -> None:
    held, around = parameters(), Scripted()
    weights = weights_of(held, around, every=2)
    weights.stepped(ROUND, 2)
    assert float(held[0][0]) == 0.0
    around.late = [Given(0.5, 2.0)]
    weights.stepped(ROUND, 3)
    assert float(held[0][0]) == 1.0
    assert len(around.turns) == 1


def test_neighbours_are_waited_for_as_long_as_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the time for earlier neighbours is no part; and no longer than two seconds."""
    clock = iter([10.0, 10.0, 10.5, 100.0, 100.2, 300.0, 900.0, 900.0])
    monkeypatch.setattr("meshtrain.train.periods.mixed_weights.time.monotonic", lambda: next(clock))
    around = Scripted()
    weights = weights_of(parameters(), around)
    for taken in (1, 2, 3):
        weights.stepped(ROUND, taken)
    assert around.waits_s == pytest.approx([0.5, 0.2, 2.0])


def test_the_next_period_begins_with_nothing_moved() -> None:
    held, around = parameters(), Scripted()
    weights = weights_of(held, around)
    around.coming = [Given(0.5, 2.0)]
    weights.stepped(ROUND, 1)
    assert float(held[0][0]) == 1.0
    ended = around.ended
    weights.end_period()
    assert around.ended == ended + 1
    assert torch.equal(held[0], torch.zeros(2))
    weights.show_view()
    assert [float(weights.difference(at)[0]) for at in range(2)] == [0.0, 0.0]


Events = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.floats(-1, 1, width=32)),
        st.tuples(st.sampled_from([1 / 2, 1 / 3]), st.floats(-9, 9, width=32)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(Events)
def test_a_contribution_is_what_own_steps_have_changed(dtype: torch.dtype, events: list[tuple[object, float]]) -> None:
    """Whatever is mixed between them; of weights in 16 bits, what steps have really changed."""
    held, around, own = parameters(dtype), Scripted(), torch.zeros(2)
    weights = weights_of(held, around)
    for taken, (kind, size) in enumerate(events, 1):
        if kind == "step":
            before = held[0].float().clone()
            held[0] += size
            own += held[0].float() - before
        else:
            assert isinstance(kind, float)
            around.coming = [Given(kind, size)]
        weights.stepped(ROUND, taken)
    assert torch.allclose(weights.difference(0), -own, atol=1e-5)


class Slots:
    """Of four values, of which the last is a buffer's."""

    def __init__(self) -> None:
        self.each = [torch.zeros(4) for _ in range(3)]

    def mixed(self, slot: int) -> torch.Tensor:
        return self.each[slot]


class Daemon:
    """What a learner says is kept, and what a test wants said is said when the learner looks or waits."""

    def __init__(self) -> None:
        self.told: list[LearnerTurn] = []
        self.says: list[TurnNews] = []
        self._hear: Callable[[TurnNews], None]

    def route(self, _kind: type[Wire], handler: Callable[[TurnNews], None]) -> None:
        self._hear = handler

    def tell(self, body: LearnerTurn) -> None:
        self.told.append(body)

    def look(self) -> None:
        says, self.says = self.says, []
        for news in says:
            self._hear(news)

    def wait_at_most(self, _wait_s: float, until: Callable[[], bool]) -> None:
        while not until() and self.says:
            self._hear(self.says.pop(0))


def talk() -> tuple[NeighbourSlots, Slots, Daemon]:
    slots, daemon = Slots(), Daemon()
    spans = [Span(name="a", tensor=0, start=0, count=2, rows=1), Span(name="b", tensor=1, start=2, count=1, rows=1)]
    places = {at: (span, torch.Size((span.count,))) for at, span in enumerate(spans)}
    return NeighbourSlots(slots, places, daemon), slots, daemon  # type: ignore[arg-type]


def own(position: int) -> torch.Tensor:
    return torch.full((2 - position,), 1.0 + position)


def news(turn: int, *, slot: int | None = None, awaited: int = 0, sent: bool = True) -> TurnNews:
    shown = () if slot is None else (Shown(slot=slot, weight=0.5),)
    return TurnNews(round=ROUND, turn=turn, shown=shown, awaited=awaited, sent=sent)


def differences(given_: Iterator[ShownWeights] | Iterable[ShownWeights]) -> list[list[float]]:
    return [[*one.difference(0).tolist(), *one.difference(1).tolist()] for one in given_]


def test_each_that_comes_is_given_once_less_what_was_shown() -> None:
    around, slots, daemon = talk()
    slots.each[2] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    around.begin(Turn(ROUND, 1), own)
    assert slots.each[0].tolist() == [1.0, 1.0, 2.0, 0.0]
    assert daemon.told == [LearnerTurn(round=ROUND, turn=1, shown=True)]
    daemon.says = [news(1, awaited=1), news(1, slot=2)]
    assert differences(around.come(1.0)) == [[4.0, 5.0, 5.0]]
    assert slots.each[2].tolist() == [5.0, 6.0, 7.0, 8.0]
    daemon.says = [news(1, slot=2)]
    assert differences(around.come(0.0)) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_mixed(bad: float) -> None:
    around, slots, daemon = talk()
    slots.each[1] = torch.tensor([5.0, 6.0, bad, 8.0])
    around.begin(Turn(ROUND, 1), own)
    daemon.says = [news(1, slot=1)]
    assert differences(around.come(1.0)) == []


def test_what_comes_for_another_turn_or_behind_the_period_is_not_given() -> None:
    around, slots, daemon = talk()
    slots.each[2] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    around.begin(Turn(ROUND, 1), own)
    daemon.says = [news(1)]
    around.begin(Turn(ROUND, 2), own)
    daemon.says = [news(1, slot=1), news(2, slot=2, awaited=1)]
    assert differences(around.come(1.0)) == [[4.0, 5.0, 5.0]]
    around.end_period()
    daemon.says = [news(2, slot=1)]
    assert differences(around.come(1.0)) == []


def test_what_is_still_being_sent_is_not_written_over() -> None:
    """The turn that then begins shows nothing and mixes nothing; its daemon drops the rest, and the next one shows."""
    around, slots, daemon = talk()
    around.begin(Turn(ROUND, 1), own)
    daemon.says = [news(1, sent=False)]
    around.begin(Turn(ROUND, 2), lambda at: own(at) + 5)
    assert slots.each[0].tolist() == [1.0, 1.0, 2.0, 0.0]
    assert not daemon.told[-1].shown
    daemon.says = [news(2, slot=1)]
    assert differences(around.come(1.0)) == []
    around.begin(Turn(ROUND, 3), lambda at: own(at) + 5)
    assert daemon.told[-1].shown
    assert slots.each[0].tolist() == [6.0, 6.0, 7.0, 0.0]

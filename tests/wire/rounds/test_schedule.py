"""What a learner is told when: rounds one by one, each when decoded; Start when no visible one is left (R1, R8, M1)."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Role, decode, encode
from meshwire.messages.learner import BarrierPassed, RoundDone, Start
from meshwire.messages.rounds import Bind
from meshwire.rounds.effects import RoundComplete
from meshwire.rounds.learner_state import Phase
from meshwire.rounds.schedule import LearnerSchedule, round_done


@dataclass
class Machine:
    """What a turn asks of the round machine."""

    applied: int = 0
    decided: int = 0
    visible: int = 0
    staleness: int = 2
    phase: Phase = Phase.BOUNDARY

    def may_start(self) -> tuple[bool, str]:
        allowed = self.applied == self.visible and self.decided - self.applied <= self.staleness
        return allowed and self.phase is Phase.BOUNDARY, ""


@dataclass
class Desk:
    """A schedule, and the steps that it has started."""

    machine: Machine = field(default_factory=Machine)
    started: list[int] = field(default_factory=list)
    resumed: int = 0
    promises: bool = False

    def __post_init__(self) -> None:
        self.turn = LearnerSchedule(cast(Any, self.machine))

    def _resume(self) -> None:
        self.resumed += 1
        self.machine.phase = Phase.BOUNDARY

    def complete(self, *rounds: int) -> None:
        for round_ in rounds:
            self.turn.complete(done(round_))
            self.machine.visible = round_

    def told(self) -> list[Wire]:
        """As `JobRounds` asks for it."""
        said: list[Wire] = []
        if self.turn.comes_back():
            self._resume()
        while (notice := self.turn.next_notice(promises=self.promises)) is not None:
            said.append(notice)
            if isinstance(notice, BarrierPassed):
                self._resume()
            elif isinstance(notice, Start):
                self.started.append(notice.step)
                self.machine.phase = Phase.COMPUTING
        return said


def done(round_: int) -> RoundDone:
    return RoundDone(
        round=round_, step=round_, void=False, reason="", overflow=False, stop=False, weight=1.0, contributors=1,
        used=b"", integers=(), hyperparameters=b"", squared_norm=0.0,
    )  # fmt: skip


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_rounds_are_given_one_at_a_time_and_only_when_decoded(desk: Desk) -> None:
    desk.complete(1, 2)
    assert desk.told() == []
    desk.turn.decoded(1)
    assert desk.told() == [done(1)]
    assert desk.told() == []
    desk.machine.applied = 1
    assert desk.told() == []
    desk.turn.decoded(2)
    assert desk.told() == [done(2)]


def test_start_comes_when_all_that_is_visible_is_applied(desk: Desk) -> None:
    desk.complete(1)
    desk.turn.decoded(1)
    desk.turn.wants_to_start(7)
    assert desk.told() == [done(1)]
    assert desk.turn.waits
    desk.machine.applied = 1
    assert desk.told() == [Start(step=7, decided=0)]
    assert desk.started == [7]
    assert not desk.turn.waits


def test_a_round_that_is_not_visible_yet_is_held_back(desk: Desk) -> None:
    """R8: with `fixed` a round is complete before it may be seen."""
    desk.complete(1)
    desk.turn.decoded(1)
    desk.machine.visible = 0
    desk.turn.wants_to_start(2)
    assert desk.told() == [Start(step=2, decided=0)]


def test_a_barrier_passes_with_all_older_rounds_applied_and_no_newer_one(desk: Desk) -> None:
    desk.machine.phase = Phase.COMPUTING
    desk.turn.wants_to_start(4)
    desk.machine.phase = Phase.ABSENT
    desk.turn.enter_barrier(1)
    desk.complete(1, 2)
    desk.turn.decoded(1)
    assert desk.told() == [done(1)], "rounds are applied while it waits"
    desk.turn.all_in_barrier(1)
    desk.turn.decoded(2)
    assert desk.told() == []
    desk.machine.applied = 1
    assert desk.told() == [BarrierPassed(number=1, error=None), done(2)]
    assert desk.resumed == 1
    desk.machine.applied = 2
    assert desk.told() == [Start(step=4, decided=0)]


def test_a_learner_that_is_taken_in_applies_first_what_it_holds(desk: Desk) -> None:
    """J1, R8: while it was absent it was given a round that `fixed` would not show it yet. It starts after that one."""
    desk.machine.phase = Phase.ABSENT
    desk.turn.away()
    desk.complete(1, 2)
    desk.turn.returned(0)
    desk.turn.decoded(1)
    assert desk.told() == [done(1)]
    desk.turn.taken_in()
    desk.turn.wants_to_start(1)
    desk.turn.decoded(2)
    desk.machine.visible = 0
    assert desk.told() == []
    assert desk.resumed == 0
    desk.machine.applied = desk.machine.visible = 1
    assert desk.told() == [Start(step=1, decided=0)]
    assert desk.resumed == 1


def test_an_idle_learner_begins_the_same_step_again(desk: Desk) -> None:
    desk.turn.wants_to_start(3)
    assert desk.told() == [Start(step=3, decided=0)]
    desk.turn.idle()
    desk.machine.phase = Phase.ABSENT
    assert desk.told() == []
    desk.machine.phase = Phase.BOUNDARY
    assert desk.told() == [Start(step=3, decided=0)]


def test_what_lay_decoded_of_a_round_that_runs_again_is_void(desk: Desk) -> None:
    """G6: it was decoded before all was said of the round, and then a generation changed."""
    desk.complete(1)
    desk.turn.decoded(1)
    assert desk.told() == [done(1)]
    desk.machine.applied = 1
    desk.turn.decoded(2)
    desk.turn.fenced(1)
    desk.complete(2)
    assert desk.told() == []
    desk.turn.decoded(2)
    assert desk.told() == [done(2)]


def test_a_learner_that_is_gone_is_told_nothing(desk: Desk) -> None:
    desk.complete(1)
    desk.turn.wants_to_start(2)
    desk.turn.end()
    desk.complete(2)
    desk.turn.decoded(1)
    assert desk.told() == []


def test_a_round_in_hand_is_given_again_to_the_next_process(desk: Desk) -> None:
    """J3: killed with it in hand, and the base before it in memory. It was another process whose step is in it, and the
    means are decoded anew, for they may be clipped where they lie."""
    desk.complete(1, 2)
    desk.turn.decoded(1)
    assert desk.told() == [done(1)]
    desk.turn.away()
    desk.turn.returned(0)
    assert desk.told() == [], "what lies in the slot is not looked at"
    desk.turn.decoded(1)
    assert desk.told() == [done(1).model_copy(update={"step": 0})]
    desk.machine.applied = 1
    desk.turn.decoded(2)
    assert desk.told() == [done(2).model_copy(update={"step": 0})]


def test_what_was_decoded_while_nobody_was_there_is_decoded_anew(desk: Desk) -> None:
    """J3: killed while the next round was on its way into the slot, where it has arrived since. For the process that
    goes on with what memory holds it is decoded once more, and must not be read meanwhile."""
    desk.complete(1)
    desk.turn.away()
    desk.turn.decoded(1)
    desk.turn.returned(0)
    assert desk.told() == []
    desk.turn.decoded(1)
    assert desk.told() == [done(1).model_copy(update={"step": 0})]


def test_a_round_that_was_applied_in_memory_is_not_given_again(desk: Desk) -> None:
    """J3: killed before its daemon has heard that the round is in the base."""
    desk.complete(1)
    desk.turn.decoded(1)
    assert desk.told() == [done(1)]
    desk.turn.away()
    desk.turn.returned(1)
    desk.turn.decoded(1)
    assert desk.told() == []


def at_the_end_of_step(desk: Desk, step: int) -> None:
    """It has begun, is sealed, and its round is complete and decoded."""
    desk.turn.wants_to_start(step)
    assert desk.told() == [Start(step=step, decided=desk.machine.decided)]
    desk.machine.phase = Phase.BOUNDARY
    desk.machine.decided = step
    desk.complete(step)
    desk.turn.decoded(step)


def test_a_round_brings_the_promise_of_the_next_step(desk: Desk) -> None:
    """R1: with s=0 nothing can come between a round and the step after it, so the learner is told once."""
    desk.promises = True
    at_the_end_of_step(desk, 1)
    assert desk.told() == [done(1).model_copy(update={"start": 2})]
    desk.machine.applied = 1
    assert desk.turn.at_end(1)
    assert desk.turn.begins_promised(2)
    assert desk.turn.begun_step == 2
    assert desk.told() == [], "it was told to start"
    assert not desk.turn.begins_promised(2), "once"


def test_only_the_newest_round_of_the_own_sealed_step_brings_a_promise(desk: Desk) -> None:
    """R1: not one that others go on from, not one whose step is still computed, none without being asked for."""
    at_the_end_of_step(desk, 1)
    assert desk.told() == [done(1)]
    assert not desk.turn.begins_promised(2)
    for change in ({"decided": 2}, {"phase": Phase.GIVEN_UP}, {"phase": Phase.ABSENT}):
        other = Desk(promises=True)
        at_the_end_of_step(other, 1)
        for name, value in change.items():
            setattr(other.machine, name, value)
        assert other.told() == [done(1)], change
    elsewhere = Desk(promises=True)
    at_the_end_of_step(elsewhere, 2)  # its step 2 is not in round 1
    elsewhere.complete(1)
    elsewhere.machine.decided = 1
    elsewhere.turn.decoded(1)
    assert elsewhere.told() == [done(1)]


@pytest.mark.parametrize("ends", ["idle", "away", "end"])
def test_a_promise_ends_where_the_learner_leaves_its_step(desk: Desk, ends: str) -> None:
    """R5, J3: rounds may go on meanwhile, and the next step stands on them; another process was promised nothing."""
    desk.promises = True
    at_the_end_of_step(desk, 1)
    assert desk.told() == [done(1).model_copy(update={"start": 2})]
    getattr(desk.turn, ends)()
    assert not desk.turn.begins_promised(2)


def test_the_next_process_is_not_promised_what_the_last_one_was(desk: Desk) -> None:
    """J3: its steps are others."""
    desk.promises = True
    at_the_end_of_step(desk, 1)
    desk.told()
    desk.turn.away()
    desk.turn.returned(0)
    desk.turn.decoded(1)
    assert desk.told() == [done(1).model_copy(update={"step": 0})]


@pytest.mark.parametrize("members", [1, 53, 54, limits.MEMBERS_MAX])
def test_a_learner_is_told_of_rounds_of_as_many_members_as_a_job_takes(members: int) -> None:
    """W1: contributors are a bitmap of a bit for each rank, a number above all that count something."""
    bind = Bind(round=1, step=1, base=0, weight=1.0)
    binds = dict.fromkeys(range(members), bind)
    complete = RoundComplete(1, False, "", binds=binds, poisons={}, used=b"", integers=(), squared_norm=0.0)
    told = round_done(complete, own_step=1, on_nan="stop")
    heard = decode(encode(Envelope(Role.NOTICE, 0, told)))
    assert isinstance(heard, Envelope)
    assert isinstance(heard.body, RoundDone)
    assert heard.body.contributors == 2**members - 1
    assert heard.body.weight == members

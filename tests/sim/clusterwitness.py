"""What one daemon's membership is told and decides, as the shell hands it on: checked, and told in the transcript.

And what becomes of a history that a daemon leaves: what is lost with it is told, or nothing is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MessageIgnored,
    Resume,
    Send,
    Shunned,
    WaitingFor,
)
from meshwire.membership.inputs import Input, MessageFrom, TimerDue
from meshwire.membership.lineage import Ballot, ballot
from meshwire.membership.record import MembershipStart
from meshwire.messages.generation import Propose, Where
from meshwire.messages.job import GivenUp
from tests.sim.clustermoments import Moment

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon


class Witness:
    """Of one process: a `meshtraind.session.membership_recorder.MembershipWitness`. Raises AssertionError."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.world
        self._ballot: Ballot | None = None  # of the newest promise
        self._deadline_s: float | None = None

    def began(self, start: MembershipStart) -> None:
        """Nothing is to be seen yet."""

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        machine = self._daemon.machine
        if isinstance(input_, MessageFrom) and isinstance(input_.message, Where):
            self._daemon.heard[input_.message.generation.hash64()] = input_.message.generation
        deadline_s = machine.deadline()
        if isinstance(input_, TimerDue):
            assert effects or deadline_s != self._deadline_s, f"no timer is idle: {machine.waiting()}"
        self._deadline_s = deadline_s

    def performs(self, effect: Effect) -> None:
        daemon, world = self._daemon, self._world
        match effect:
            case Send(device, Propose(generation=generation)):
                if device in daemon.place.links:
                    world.tell_once(daemon.name, generation)
            case Fence(generation):
                newest = ballot(generation)
                assert self._ballot is None or newest > self._ballot, "G2: promises have rising ballots"
                self._ballot = newest
                world.promises(daemon, generation)
            case CatchUpFrom():
                world.moments.come(Moment.CATCHES_UP, daemon.number)
            case EnterGeneration(generation, enter):
                daemon.losses.settle()
                world.entered(daemon, generation, enter)
            case Resume(generation):
                world.resumed(daemon, generation)
            case HistoryLeft(reason, kept):
                daemon.why_left = reason
                if kept is not None and daemon.holds_base:
                    world.leaves_base(daemon, kept)
                if kept is not None and daemon.rounds is not None:
                    world.leaves_history(daemon, kept)
                daemon.has_left = True
            case MessageIgnored(device, text):
                world.breaks_rules(daemon, int(device, 16) - 1, text)
            case Shunned(device, reason, accuser):
                world.breaks_rules(daemon, int(device, 16) - 1, f"{reason}, says peer{int(accuser, 16) - 1}")
            case WaitingFor(reason) if reason.startswith("a new generation"):
                world.tell(daemon.name, f"wants {reason}")

    def close(self) -> None:
        """It is told nothing more."""


@dataclass(frozen=True)
class Left:
    """A history that a daemon has left.

    Attributes:
        common: so many of its rounds are in the history that is kept.
        late: so many more may be: they were completed where it is kept, or not all of those who were together then
            hold them (G5).
        apart: others have gone on without it; else all have gone back to a state that was saved.
    """

    chain: bytes
    complete: int
    common: int
    late: int
    apart: bool


class Losses:
    """What one process says of the histories that it leaves."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._left: Left | None = None  # nothing was said of it yet

    def leave(self, left: Left) -> None:
        """What is said of it from now on is to be right."""
        self.settle()
        self._left = left

    def settle(self) -> None:
        """Nothing more is said: so nothing was lost, but for rounds that not all hold who were together then (G5), and
        those of which others have said that they have gone back from them: all pass that on."""
        left, self._left = self._left, None
        if left is not None:
            world = self._daemon.world
            lost = len({*world.histories.path(left.chain)[left.common :]} - world.told_gone_back)
            assert lost <= left.late, f"{self._daemon.name} gives up {lost} rounds in silence"

    def told(self, news: GivenUp) -> None:
        """What people are told is what is lost."""
        left, self._left = self._left, None
        name, world = self._daemon.name, self._daemon.world
        assert left is not None, f"{name} tells of a loss that is none: {news}"
        cut = news.first - 1
        assert left.common <= cut <= left.common + left.late, (
            f"{name} gives up rounds that are kept, or more: {news} of {left}"
        )
        assert news.last == left.complete, f"{name} gives up rounds that it does not hold, or fewer: {news} of {left}"
        lost = world.histories.rounds(left.chain)[cut:]
        assert news.samples == sum(round(done.weight) for done in lost), "samples are counted"
        if news.saved is not None:
            assert news.saved == (left.complete, left.chain.hex()[:8]), "what is saved is what is given up"
        if left.apart:
            world.told_lost.append((len(lost), len(news.kept)))
        else:
            world.told_gone_back |= {*world.histories.path(left.chain)[cut:]}

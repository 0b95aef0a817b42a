"""The shell of membership hands on the round trip of now, and what this device has of the model."""

from types import SimpleNamespace
from typing import Any, cast

from meshtraind.rounds.driver import Rounds
from meshtraind.session.membership_driver import MembershipDriver
from meshwire.membership.machine import Membership
from meshwire.messages.generation import Holding
from meshwire.messages.job import Member
from meshwire.rounds.inputs import RoundTripMeasured
from meshwire.timeouts import Timeouts
from tests.computing import computing

MEMBERS = tuple(Member(device=f"{n + 1:064x}", incarnation=1, name=f"peer{n}") for n in range(3))
JOB = "j" + "0" * 11


def test_waits_follow_the_round_trip_of_now() -> None:
    """G7, R3: that to the farthest member; one that is not measured, or not linked, says nothing."""
    first = computing(JOB, MEMBERS[0].device, MEMBERS)
    machine = Membership(MEMBERS[0], JOB, Timeouts(0.5, 0.001), 0.0, generation=first)
    told: list[float] = []
    rounds = SimpleNamespace(history_samples=1, note_round_trip=told.append)
    links = {MEMBERS[1].device: SimpleNamespace(rtt_s=0.25), MEMBERS[2].device: SimpleNamespace(rtt_s=None)}
    shell = cast(Any, MembershipDriver.__new__(MembershipDriver))
    shell._closed, shell._loop, shell._timer = False, SimpleNamespace(time=lambda: 0.0), None
    shell._witness = None
    shell._machine, shell._host = machine, SimpleNamespace(rounds=rounds, holding=lambda: Holding(loads_after=3))
    shell._node, shell._job = SimpleNamespace(links=links), SimpleNamespace(members=MEMBERS)
    shell.progress()
    assert machine._state.timeouts.turn_s == 4 * 0.25
    links.clear()
    shell.progress()
    assert machine._state.timeouts.turn_s == 4 * 0.25, "what is known last counts while nobody is linked"
    assert told == [0.25]
    assert not machine._state.based, "G4: no base is here, it says"


def test_the_round_machine_hears_of_what_matters() -> None:
    """R3: a little more or less is no line of the trace."""
    told: list[float] = []
    settings = SimpleNamespace(rtt_s=0.0)

    def handle(input_: RoundTripMeasured) -> None:
        told.append(input_.rtt_s)
        settings.rtt_s = input_.rtt_s

    machine, performer = SimpleNamespace(settings=settings), SimpleNamespace(handle=handle)
    rounds = SimpleNamespace(_machine=machine, _performer=performer)
    for rtt_s in (0.01, 0.011, 0.009, 0.5, 0.45, 0.01):
        Rounds.note_round_trip(cast(Any, rounds), rtt_s)
    assert told == [0.01, 0.5, 0.01]

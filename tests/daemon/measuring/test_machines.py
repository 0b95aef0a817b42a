"""How machines are: one for all who ask, others as far as they answer."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.api.local_handler import LocalHandler
from meshtraind.api.peer_handler import PeerHandler
from meshtraind.measuring.machines import MachineLook
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.link import AskMachine, MachineState
from meshwire.messages.local import GetMachines, Machines
from tests.daemon.scripteddaemon import device

OWN, THEIRS = MachineState(busy=0.5), MachineState(battery=0.25, plugged=False)


class Other:
    """At the other end of a link."""

    def __init__(self, answer: Wire | Exception) -> None:
        self._answer = answer

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        assert body == AskMachine()
        assert 0 < timeout_s < 5
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Looked:
    """Sensors, and how often they were read."""

    def __init__(self) -> None:
        self.reads = 0

    def state(self) -> MachineState:
        self.reads += 1
        return OWN


def look(*answers: Wire | Exception) -> tuple[MachineLook, Looked]:
    sensors = Looked()
    links = {
        device(at): SimpleNamespace(
            device=device(at), hello=SimpleNamespace(name=f"laptop{at}"), connection=Other(answer)
        )
        for at, answer in enumerate(answers, start=1)
    }
    node = SimpleNamespace(device=device(0), links=links, settings=SimpleNamespace(sensors=sensors))
    return MachineLook(cast(Any, node)), sensors


@pytest.mark.asyncio
async def test_whoever_does_not_answer_keeps_nobody_from_the_others() -> None:
    machines, _ = look(
        THEIRS, RequestFailed("a peer may not ask"), ConnectionEnded("gone"), TimeoutError("slow"), Done(), THEIRS
    )
    assert (await machines.all()).machines == ((device(0), OWN), (device(1), THEIRS), (device(6), THEIRS))


@pytest.mark.asyncio
async def test_sensors_are_read_once_a_second_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("meshtraind.measuring.machines.time.monotonic", lambda: now_s)
    machines, sensors = look()
    assert set(await asyncio.gather(*(machines.own() for _ in range(64)))) == {OWN}
    assert sensors.reads == 1
    now_s = 100.9
    await machines.own()
    assert sensors.reads == 1
    now_s = 101.1
    await machines.own()
    assert sensors.reads == 2


@pytest.mark.asyncio
async def test_a_peer_is_told_of_this_machine_alone_and_a_person_of_all() -> None:
    machines, _ = look(THEIRS)
    nobody, measuring = cast(Any, None), cast(Any, SimpleNamespace(machines=machines))
    peer = PeerHandler(nobody, nobody, nobody, nobody, measuring)
    assert await peer.request(nobody, nobody, AskMachine(), lambda _: None) == OWN
    with pytest.raises(RequestFailed, match="a peer may not ask for GetMachines"):
        await peer.request(nobody, nobody, GetMachines(), lambda _: None)
    local = LocalHandler(nobody, nobody, nobody, measuring, nobody, lambda: None)
    told = await local.answer(GetMachines(), lambda _: None)
    assert isinstance(told, Machines)
    assert [of for of, _ in told.machines] == [device(0), device(1)]

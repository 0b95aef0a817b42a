"""Finding the device that shows a code among those that say so: false ones cost their own attempt and nothing else."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from meshtraind.peers.mdns import Sighting
from meshtraind.peers.pairing_search import PairingSearch
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pairing_channel import receive, send
from meshtraind.trust.pairing_guest import Guest
from meshtraind.trust.pairing_host import PairingError, PairingHost
from meshtraind.trust.pairing_proof import PairingAnswer, PairingExchange, PairingOffer, PairingRole, Profile, Proof
from meshwire import limits
from tests.daemon.trust.test_pairing import daemon, listening, other_code, showing, tls_of

DEADLINE_S = 20.0
FALSE_HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("people")
    return [load_or_create(folder / name, name) for name in ("ada", "bob", *(f"eve{i}" for i in range(6)))]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.01)
    monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 5.0)
    monkeypatch.setattr(limits, "PAIRING_SEARCH_MORE_S", 0.3)
    monkeypatch.setattr("meshtraind.peers.pairing_search.POLL_S", 0.01)


def sighting(device: str, port: int, *hosts: str, name: str = "laptop") -> Sighting:
    return Sighting(device, hosts or ("127.0.0.1",), port, name, 1, True)


class Search:
    """One search by bob, and what he is told."""

    def __init__(self, bob: Identity, code: str) -> None:
        self.said: list[str] = []
        self._announced: dict[str, Sighting] = {}
        self._search = PairingSearch(Guest(bob, code, 29611), self._announced, self.said.append)

    def show(self, *sightings: Sighting) -> None:
        """mDNS shows these, too."""
        self._announced.update({f"{len(self._announced)}, {number}": one for number, one in enumerate(sightings)})

    async def run(self) -> str:
        """Whom it was."""
        return (await asyncio.wait_for(self._search.run(), DEADLINE_S)).device_id

    async def fails(self) -> str:
        with pytest.raises(PairingError) as caught:
            await self.run()
        return str(caught.value)


@contextlib.asynccontextmanager
async def false_devices(
    identities: list[Identity], at: str, answered: Callable[[], None] = lambda: None
) -> AsyncIterator[list[Sighting]]:
    """Devices that announce a code, and take part in the proof with a guess."""

    def serving(
        identity: Identity,
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                offered = await receive(reader, PairingOffer)
                exchange = PairingExchange(PairingRole.HOST, "000-000")
                await send(writer, PairingAnswer(element=exchange.element))
                await receive(reader, Proof)
                keys = exchange.keys(offered.element, identity.certificate_der, offered.certificate_der)
                await send(writer, keys.prove(Profile(name="ada", listen_port=1)))
                answered()
            writer.transport.abort()

        return serve

    async with contextlib.AsyncExitStack() as stack:
        found = []
        for identity in identities:
            port = await stack.enter_async_context(listening(serving(identity), tls_of(identity), at))
            found.append(sighting(identity.device_id, port, at, name="ada"))
        yield found


@pytest.mark.asyncio
async def test_false_devices_cannot_crowd_out_the_right_one(people: list[Identity]) -> None:
    """They are there first, are more than may guess, and each answers; the right one's code is not even tried wrongly.

    The person is told how many answered wrongly.
    """
    ada, bob, *eves = people
    answers = 0

    def answered() -> None:
        nonlocal answers
        answers += 1
        if answers == limits.PAIRING_GUESSES_PER_HOST_MAX:
            search.show(sighting(ada.device_id, port))

    async with showing(ada) as (host, port), false_devices(eves, FALSE_HOST, answered) as false:
        search = Search(bob, host.code)
        search.show(*false)
        assert await search.run() == ada.device_id
        assert (await host.wait()).device_id == bob.device_id
    assert answers == limits.PAIRING_GUESSES_PER_HOST_MAX, "guesses that one address got"
    assert search.said[-1].startswith(f"{answers} devices besides it said to show a code, and could not prove")


@pytest.mark.asyncio
async def test_no_more_devices_may_guess_than_the_limit(
    people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many addresses they have: each guess is one in a million."""
    monkeypatch.setattr(limits, "PAIRING_GUESSES_MAX", 3)
    _, bob, *eves = people
    answers: list[int] = []
    async with contextlib.AsyncExitStack() as stack:
        search = Search(bob, "123-456")
        for number, eve in enumerate(eves):
            made = false_devices([eve], f"127.0.0.{number + 2}", lambda: answers.append(1))
            search.show(*await stack.enter_async_context(made))
        told = await search.fails()
    assert len(answers) == 3
    assert told.startswith("6 devices said to show a code, and none has this one:\n- ada (127.0.0.")
    assert "- 3 were not asked: each that is asked may guess the code once" in told
    assert told.endswith("add --at ADDRESS, as its screen says")


@pytest.mark.asyncio
async def test_addresses_where_nobody_answers_do_not_hold_the_search_up(
    people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says nothing, others refuse, many more than are dialled at once; the right device has a second address."""
    monkeypatch.setattr(limits, "PAIRING_DIALS_MAX", 4)
    monkeypatch.setattr(limits, "PAIRING_DIAL_TIMEOUT_S", 0.2)
    ada, bob, *_ = people
    async with showing(ada) as (host, port):
        with socket.create_server((FALSE_HOST, 0)) as silent, socket.create_server((FALSE_HOST, 0)) as closed:
            silent_port, closed_port = silent.getsockname()[1], closed.getsockname()[1]
            closed.close()
            search = Search(bob, host.code)
            search.show(*(sighting(f"{i:064x}", closed_port, f"127.0.1.{i}") for i in range(1, 200)))
            search.show(*(sighting(f"{i:064x}", silent_port, FALSE_HOST) for i in range(200, 203)))
            search.show(sighting(ada.device_id, port, "127.0.2.1", "127.0.0.1"))
            assert await search.run() == ada.device_id


@pytest.mark.asyncio
async def test_a_device_at_several_addresses_has_one_guess_and_loses_one_try(people: list[Identity]) -> None:
    """A mistyped code costs the right device one of its three tries, however many addresses it announces."""
    ada, bob, *_ = people
    async with showing(ada, host="0.0.0.0") as (host, port):
        search = Search(bob, other_code(host.code))
        search.show(sighting(ada.device_id, port, "127.0.0.1", "127.0.0.2", "127.0.0.3", name="ada\x1b"))
        told = await search.fails()
        assert told.startswith(r"the code is not the one that ada\x1b (127.0.0.")
        assert "2 more tries are left" in told
        assert "\n" not in told, "one device, one sentence"


@pytest.mark.asyncio
async def test_a_device_that_shows_its_code_later_is_found(
    people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after `up` nothing has been seen yet: it is said that it is looked for, and found when it is there."""
    monkeypatch.setattr("meshtraind.peers.pairing_search.SAY_AFTER_S", 0.05)
    ada, bob, *_ = people
    async with showing(ada) as (host, port):
        search = Search(bob, host.code)
        running = asyncio.get_running_loop().create_task(search.run(), name="search")
        async with asyncio.timeout(DEADLINE_S):
            while not search.said:
                await asyncio.sleep(0.005)
        search.show(sighting(ada.device_id, port))
        assert await running == ada.device_id
    assert search.said == ["Looking for the device that shows this code, for up to 5 s more."]


@pytest.mark.asyncio
async def test_nobody_is_looked_for_ten_seconds(people: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.PAIRING_SEARCH_S == 5.0
    monkeypatch.undo()
    assert limits.PAIRING_SEARCH_S >= 10
    monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.3)
    began_s = time.monotonic()
    told = await Search(people[1], "123-456").fails()
    assert time.monotonic() - began_s >= 0.3
    assert told.startswith("no device on this network shows a pairing code")
    assert "add --at ADDRESS" in told


@pytest.mark.asyncio
async def test_a_code_that_has_just_ended_is_not_waited_for_long(people: list[Identity]) -> None:
    """An announcement lives on for a moment: its device is asked, shows no code, and others have a chance."""
    ada, bob, *_ = people
    async with daemon(ada) as links:
        async with PairingHost(ada, links) as host:
            search = Search(bob, host.code)
        search.show(sighting(ada.device_id, links.port, name="ada"))
        began_s = time.monotonic()
        told = await search.fails()
        assert time.monotonic() - began_s < limits.PAIRING_SEARCH_S
    assert told.startswith(f"ada (127.0.0.1:{links.port}) shows no code now: run `meshtrain pair` there")


@pytest.mark.asyncio
async def test_when_nobody_can_be_reached_it_says_whom_it_tried(
    people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    search = Search(people[1], "123-456")
    search.show(sighting("0" * 64, port, name="ada"))
    told = await search.fails()
    assert told.startswith(f"cannot reach ada (127.0.0.1:{port}) (Connection refused): check")

"""Pairing by code over real sockets: the right guest gets in, and all others together get at most 3 guesses.

And what the daemon's one port gives to whom: guests nothing but pairing, and only while a code is shown.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

import meshtraind.trust.pairing_guest
from meshtraind.peers.links import Links
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pairing_channel import receive, send
from meshtraind.trust.pairing_guest import Guest, Target, pair_at, pair_with
from meshtraind.trust.pairing_host import (
    CodeExpiredError,
    CodeSpentError,
    NotPairingError,
    PairedDevice,
    PairingError,
    PairingHost,
    RelayedError,
    UnreachableError,
    WrongCodeError,
)
from meshtraind.trust.pairing_proof import (
    CodeError,
    PairingAnswer,
    PairingExchange,
    PairingOffer,
    PairingRefusal,
    PairingRole,
    Profile,
    Proof,
    at_even_times,
    new_code,
    normalised_code,
    offer,
)
from meshtraind.trust.pins import Pin, PinTable
from meshtraind.trust.tls import PAIRING_ALPN, Trust
from meshwire import limits
from meshwire.addresses import Address
from meshwire.discovery.addressbook import AddressBook
from meshwire.frames.parser import FrameParser
from meshwire.messages import envelope
from meshwire.messages.link import Hello, Software
from tests.daemon.linkusers import QuietUser

DEADLINE_S = 30.0
HOST = "127.0.0.1"
GUEST_LINKS = 29611  # the guest's listening port: told, not used here

Run = Callable[[Coroutine[Any, Any, None]], None]


def _uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", autouse=True)
def signal_pipe() -> None:
    """libuv opens one pipe for signals with its first loop and keeps it: no leak of the test that comes first."""
    _uvloop().close()


@pytest.fixture(params=[asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_to_end(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(debug=True, loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(work, DEADLINE_S))

    return run_to_end


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.01)


@pytest.fixture(scope="module")
def ada(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("ada"), "ada")


@pytest.fixture(scope="module")
def bob(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("bob"), "bob")


@pytest.fixture(scope="module")
def eve(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("eve"), "eve")


def other_code(code: str) -> str:
    return f"{(int(normalised_code(code)) + 1) % 10**6:06}"


def as_paired(identity: Identity, links_port: int) -> PairedDevice:
    address = Address(host=HOST, port=links_port)
    return PairedDevice(identity.device_id, identity.name, identity.certificate_pem, address)


async def join(port: int, code: str, identity: Identity, host: str = HOST) -> PairedDevice:
    return await pair_with(Guest(identity, code, GUEST_LINKS), Target(host, port))


async def assert_pairs(host: PairingHost, port: int, ada: Identity, bob: Identity) -> None:
    """Both learn the other's id, name, certificate and where to dial it."""
    waited, joined = await asyncio.gather(host.wait(), join(port, host.code, bob))
    assert waited == as_paired(bob, GUEST_LINKS)
    assert joined == as_paired(ada, port)


@pytest.mark.parametrize("typed", ["483917", "483-917", " 483 917 ", "4 8 3 9 1 7", "483\u2013917"])
def test_codes_are_read_as_people_type_them(typed: str) -> None:
    assert normalised_code(typed) == "483917"


@pytest.mark.parametrize("typed", ["", "48391", "4839170", "48391a", "\u0664\u0668\u0663917", "483.917", "x" * 10_000])
def test_other_text_is_no_code(typed: str) -> None:
    with pytest.raises(CodeError, match="six digits, as in 483-917") as caught:
        normalised_code(typed)
    assert len(str(caught.value)) < 200


def test_new_codes_have_the_form_that_is_shown() -> None:
    for _ in range(100):
        code = new_code()
        assert (len(code), code[3]) == (7, "-")
        assert normalised_code(code) == code.replace("-", "")


def test_a_malformed_code_costs_no_try(run: Run, bob: Identity) -> None:
    async def work() -> None:
        with pytest.raises(CodeError):
            await join(1, "12", bob)

    run(work())


def test_the_right_code_pairs_both_and_is_spent(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with showing(ada) as (host, port):
            await assert_pairs(host, port, ada, bob)
            with pytest.raises(CodeSpentError):
                await join(port, host.code, bob)

    run(work())


def test_one_that_shows_no_code_is_named_with_what_to_do(run: Run, ada: Identity, bob: Identity) -> None:
    """Before the code, and after it: TLS has refused pairing's protocol, and the daemon is there."""

    async def work() -> None:
        async with daemon(ada) as links:
            for _ in range(2):
                with pytest.raises(NotPairingError, match=r"127\.0\.0\.1:\d+ shows no code now: run"):
                    await join(links.port, "483-917", bob)
                async with PairingHost(ada, links) as host:
                    await assert_pairs(host, links.port, ada, bob)

    run(work())


def test_ipv6_and_ipv4_reach_a_dual_listener(run: Run, ada: Identity, bob: Identity) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def work() -> None:
        async with showing(ada, host="::") as (host, port):
            await assert_pairs(host, port, ada, bob)

    run(work())


def test_three_wrong_codes_kill_the_code_and_it_says_so(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with showing(ada) as (host, port):
            for left in (2, 1):
                with pytest.raises(WrongCodeError, match=f"{left} more tr"):
                    await join(port, other_code(host.code), bob)
            with pytest.raises(WrongCodeError, match="last try"):
                await join(port, other_code(host.code), bob)
            with pytest.raises(CodeSpentError):
                await join(port, host.code, bob)
            with pytest.raises(CodeSpentError, match=r"3 times, from 127\.0\.0\.1"):
                await host.wait()

    run(work())


def test_two_wrong_codes_leave_the_third_try(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with showing(ada) as (host, port):
            for _ in range(2):
                with pytest.raises(WrongCodeError):
                    await join(port, other_code(host.code), bob)
            await assert_pairs(host, port, ada, bob)

    run(work())


def test_an_attacker_gets_three_guesses_however_many_connections_guess_at_once(
    run: Run, ada: Identity, eve: Identity
) -> None:
    """All exchanges reach the proof before the first is judged, and the eighth of them knows the code."""

    async def work() -> None:
        async with showing(ada) as (host, port), contextlib.AsyncExitStack() as open_ends:
            attempts = []
            for number in range(8):
                code = host.code if number == 7 else other_code(host.code)
                reader, writer = await open_ends.enter_async_context(dialled(port))
                host_der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                exchange = PairingExchange(PairingRole.GUEST, code)
                await send(writer, offer(exchange, eve.certificate_der, host_der))
                answer = await receive(reader, PairingAnswer)
                attempts.append((reader, writer, exchange.keys(answer.element, host_der, eve.certificate_der)))
            refusals = []
            for reader, writer, keys in attempts:
                await send(writer, keys.prove(Profile(name="eve", listen_port=1)))
                refusals.append(await receive(reader, PairingRefusal))
            assert [refusal.reason for refusal in refusals] == ["wrong-code"] * 3 + ["spent"] * 5
            with pytest.raises(CodeSpentError):
                await host.wait()

    run(work())


def test_guests_that_leave_before_their_proof_cost_no_try(
    run: Run, ada: Identity, bob: Identity, eve: Identity
) -> None:
    """The host has proved nothing by then, so they have tested no code."""

    async def work() -> None:
        async with showing(ada) as (host, port):
            for _ in range(2 * limits.PAIRING_TRIES_MAX):
                async with dialled(port) as (reader, writer):
                    exchange = PairingExchange(PairingRole.GUEST, other_code(host.code))
                    await send(writer, offer(exchange, eve.certificate_der, ada.certificate_der))
                    await receive(reader, PairingAnswer)
            await assert_pairs(host, port, ada, bob)

    run(work())


def test_an_unused_code_expires(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with showing(ada, lifetime_s=0.01) as (host, port):
            with pytest.raises(CodeExpiredError, match="nobody used the code"):
                await host.wait()
            with pytest.raises(CodeExpiredError, match="has expired"):
                await join(port, host.code, bob)

    run(work())


@pytest.mark.parametrize("rewrites", [False, True], ids=["honest relay", "relay that hides itself"])
def test_a_relay_that_ends_tls_is_refused(
    run: Run, ada: Identity, bob: Identity, eve: Identity, rewrites: bool
) -> None:
    """The key is bound to the certificates that both ends saw, even with the right code typed."""

    async def work() -> None:
        async with showing(ada) as (host, port):
            waiting = asyncio.get_running_loop().create_task(host.wait())
            async with relaying(eve, port, ada if rewrites else None) as relay_port:
                with pytest.raises(WrongCodeError if rewrites else RelayedError, match="between"):
                    await join(relay_port, host.code, bob)
            assert not waiting.done()
            waiting.cancel()
            await assert_pairs(host, port, ada, bob)

    run(work())


def test_a_false_host_that_says_yes_is_not_believed(run: Run, bob: Identity, eve: Identity) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offered = await receive(reader, PairingOffer)
        exchange = PairingExchange(PairingRole.HOST, "000-000")
        await send(writer, PairingAnswer(element=exchange.element))
        await receive(reader, Proof)
        keys = exchange.keys(offered.element, eve.certificate_der, offered.certificate_der)
        await send(writer, keys.prove(Profile(name="ada", listen_port=1)))
        await reader.read()
        writer.transport.abort()

    async def work() -> None:
        async with listening(serve, tls_of(eve)) as port:
            with pytest.raises(WrongCodeError, match="do not pair with it"):
                await join(port, "000-001", bob)

    run(work())


def test_garbage_and_half_open_clients_do_not_disturb_a_pairing(run: Run, ada: Identity, bob: Identity) -> None:
    """Twice as many silent connections as are kept, and every kind of noise; no try is lost."""
    noise = [
        b"",
        b"\0",
        b"\xff\xff",
        b"\0\x04junk",
        b"\0\x01\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        framed(msgpack.packb([1, 2])),
        framed(msgpack.packb({"protocol": "meshtrain-pair-1"})),
        framed(msgpack.packb({"reason": "spent", "tries_left": 0})),
        framed(b"\x81" * 1024),
    ]
    bad_offers: list[dict[str, Any]] = [
        {"element": b"B" + b"\0" * 32},
        {"element": b"B" + b"\xff" * 32},
        {"element": b"A" + b"\x01" + b"\0" * 31},
        {"certificate_der": b"junk"},
        {"certificate_der": b"x" * (limits.CERTIFICATE_BYTES_MAX + 1)},
        {"host_seen": "junk"},
    ]

    async def work() -> None:
        async with showing(ada) as (host, port):
            idle = [await asyncio.open_connection(HOST, port) for _ in range(limits.HANDSHAKES_MAX)]
            for _, half_open in idle[::2]:
                half_open.write(b"\x16\x03\x01\x00\xff not yet a client hello")
            for sent in noise:
                async with dialled(port) as (_, writer):
                    writer.write(sent)
                    await writer.drain()
            for wrong in bad_offers:
                async with dialled(port) as (reader, writer):
                    good = offer(
                        PairingExchange(PairingRole.GUEST, host.code), bob.certificate_der, ada.certificate_der
                    )
                    writer.write(framed(msgpack.packb({**good.model_dump(), **wrong})))
                    assert await reader.read() == b"", "closed without an answer"
            idle += [await asyncio.open_connection(HOST, port) for _ in range(limits.HANDSHAKES_MAX)]
            async with dialled(port):
                await assert_pairs(host, port, ada, bob)
            for _, writer in idle:
                writer.transport.abort()

    run(work())


def test_a_slow_client_is_closed_at_its_deadline(
    run: Run, ada: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "PAIRING_EXCHANGE_TIMEOUT_S", 0.2)
    caplog.set_level(logging.INFO)

    async def work() -> None:
        async with showing(ada) as (_, port), dialled(port) as (reader, writer):
            writer.write(b"\0")
            assert await reader.read() == b""

    run(work())
    assert "came to nothing: TimeoutError" in caplog.text


def test_a_silent_address_is_given_up_at_the_deadline(run: Run, bob: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_DIAL_TIMEOUT_S", 0.2)

    async def work() -> None:
        with socket.create_server((HOST, 0)) as silent, pytest.raises(UnreachableError, match="does not answer: check"):
            await join(silent.getsockname()[1], "483-917", bob)

    run(work())


def test_addresses_where_nobody_pairs_are_told_apart(run: Run, bob: Identity, eve: Identity) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.transport.abort()

    async def work() -> None:
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        with pytest.raises(UnreachableError, match="cannot reach"):
            await join(port, "483-917", bob)
        with pytest.raises(PairingError, match=r"no device is known here by the name no-such-host\.invalid"):
            await join(1, "483-917", bob, "no-such-host.invalid")
        async with listening(hang_up, None) as port:
            with pytest.raises(NotPairingError, match="is not meshtrain"):
                await join(port, "483-917", bob)
        async with listening(chatter, tls_of(eve)) as port:
            with pytest.raises(NotPairingError, match="does not speak"):
                await join(port, "483-917", bob)

    run(work())


def test_an_address_that_cannot_be_reached_yet_is_tried_again(
    run: Run, ada: Identity, bob: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A radio that wakes up, a daemon that starts: it is said once, and the code is good all the same."""
    monkeypatch.setattr(meshtraind.trust.pairing_guest, "RETRY_S", 0.02)
    said: list[str] = []

    async def work() -> None:
        with socket.create_server((HOST, 0)) as closed:
            port = closed.getsockname()[1]
        guest = Guest(bob, "483-917", GUEST_LINKS)
        retrying = asyncio.get_running_loop().create_task(pair_at(guest, Target(HOST, port), said.append))
        while not said:
            await asyncio.sleep(0.01)
        async with daemon(ada, port=port):
            with pytest.raises(NotPairingError, match="shows no code now"):
                await retrying
        monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.1)
        with pytest.raises(UnreachableError, match="cannot reach"):
            await pair_at(guest, Target(HOST, port), said.append)

    run(work())
    assert [text.partition(" ")[2][:36] for text in said] == ["does not answer (Connection refused)"] * 2


def test_another_version_is_named(run: Run, ada: Identity, bob: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with showing(ada) as (host, port):
            monkeypatch.setattr("meshtraind.trust.pairing_proof.PROTOCOL", "meshtrain-pair-2")
            with pytest.raises(NotPairingError, match="same version"):
                await join(port, host.code, bob)

    run(work())


def test_a_device_does_not_pair_with_its_own_copy(run: Run, ada: Identity) -> None:
    async def work() -> None:
        async with showing(ada) as (host, port):
            with pytest.raises(PairingError, match="is this device itself"):
                await join(port, host.code, ada)

    run(work())


def test_leaving_early_leaves_nothing_behind(run: Run, ada: Identity) -> None:
    async def work() -> None:
        before = asyncio.all_tasks()
        async with showing(ada) as (_, port), dialled(port):
            half_open = socket.create_connection((HOST, port))
        half_open.close()
        assert asyncio.all_tasks() == before

    run(work())


# --- the one port ---


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call gave to the parser of links' messages."""
    counts: list[int] = []
    received = FrameParser.received

    def spy(self: FrameParser, nbytes: int) -> Any:
        counts.append(nbytes)
        return received(self, nbytes)

    monkeypatch.setattr(FrameParser, "received", spy)
    return counts


HELLO = Hello(
    incarnation=1,
    name="x",
    listen_port=0,
    software=Software(meshtrain="0", python="3", torch=None, system="test"),
    cores=1,
    memory_bytes=1,
)
OTHER_ALPNS = [None, "meshtrain", "meshtrain-pair-1", "h2"]


async def what_it_says(port: int, alpn: str | None, key: Identity | None, sent: bytes) -> bytes:
    """What a caller is told who sends this; an alert and a reset count as nothing."""
    said = b""
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        async with dialled(port, alpn, key) as (reader, writer):
            writer.write(sent)
            async with asyncio.timeout(DEADLINE_S):
                while data := await reader.read(4096):
                    said += data
    return said


def an_offer(code: str, guest: Identity, host: Identity) -> bytes:
    return framed(offer(PairingExchange(PairingRole.GUEST, code), guest.certificate_der, host.certificate_der).pack())


def a_hello() -> bytes:
    from tests.daemon.peers.test_links import frame

    return frame(envelope.Envelope(envelope.Role.NOTICE, 0, HELLO))


@pytest.mark.parametrize("key", [False, True], ids=["without a certificate", "with an unpaired one"])
def test_without_a_code_pairing_gets_nothing(
    run: Run, ada: Identity, eve: Identity, parsed: list[int], key: bool
) -> None:
    """TLS refuses it: no frame of a pairing, no message of a link is read, before a code was shown and after it."""

    async def work() -> None:
        shown = eve if key else None
        async with daemon(ada) as links:
            for _ in ("before", "after"):
                async with dialled(links.port, PAIRING_ALPN, shown) as (_reader, writer):
                    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
                for alpn in (PAIRING_ALPN, *OTHER_ALPNS):
                    for sent in (an_offer("000-000", eve, ada), a_hello()):
                        assert await what_it_says(links.port, alpn, shown, sent) == b""
                async with PairingHost(ada, links):
                    pass
            assert not links.linked

    run(work())
    assert not parsed


def test_a_guest_reaches_only_pairing(run: Run, ada: Identity, bob: Identity, eve: Identity, parsed: list[int]) -> None:
    """Whoever names pairing's ALPN while a code is shown: a paired device, too, cannot speak as a link there."""

    async def work() -> None:
        async with daemon(ada, pinned=bob) as links, PairingHost(ada, links) as host:
            for sent in (a_hello(), b"MTRN" + bytes(60)):
                assert await what_it_says(links.port, PAIRING_ALPN, None, sent) == b""
                assert await what_it_says(links.port, PAIRING_ALPN, bob, sent) == b""
            assert not links.linked
            assert not parsed
            async with dialled(links.port, PAIRING_ALPN) as (reader, writer):
                writer.write(an_offer(host.code, eve, ada))
                await receive(reader, PairingAnswer)
            await assert_pairs(host, links.port, ada, bob)

    run(work())
    assert not parsed


@pytest.mark.parametrize("alpn", OTHER_ALPNS)
def test_while_a_code_is_shown_all_others_need_a_pinned_key(
    run: Run, ada: Identity, bob: Identity, eve: Identity, parsed: list[int], alpn: str | None
) -> None:
    """Not a byte of a caller without one is read, although TLS asks for the certificate less sternly meanwhile."""

    async def work() -> None:
        async with daemon(ada, pinned=bob) as links, PairingHost(ada, links) as host:
            for key in (None, eve):
                for sent in (a_hello(), an_offer(host.code, eve, ada)):
                    assert await what_it_says(links.port, alpn, key, sent) == b""
            assert not links.linked
            assert not parsed
            async with dialled(links.port, alpn, bob) as (_, writer):
                writer.write(a_hello())
                while bob.device_id not in links.linked:
                    await asyncio.sleep(0.005)
            await assert_pairs(host, links.port, ada, bob)

    run(work())


def test_handshakes_of_another_moment_get_nothing(run: Run, ada: Identity, parsed: list[int]) -> None:
    """Begun while a code is shown, and gone on with when it is no more; and the other way round."""

    async def work() -> None:
        async with daemon(ada) as links:
            for alpn in (PAIRING_ALPN, None):
                async with PairingHost(ada, links):
                    reader, writer = await asyncio.open_connection(HOST, links.port)
                    while not links._welcoming:
                        await asyncio.sleep(0.005)
                assert await late_handshake(reader, writer, alpn, a_hello()) == b""
                reader, writer = await asyncio.open_connection(HOST, links.port)
                while not links._welcoming:
                    await asyncio.sleep(0.005)
                async with PairingHost(ada, links):
                    assert await late_handshake(reader, writer, alpn, a_hello()) == b""
            assert not links.linked

    run(work())
    assert not parsed


async def late_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, alpn: str | None, sent: bytes
) -> bytes:
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.start_tls(client_tls(alpn, None))
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    return b""


def test_guests_that_are_there_go_with_the_code(run: Run, ada: Identity) -> None:
    """The end of `meshtrain pair` ends all connections that it let in."""

    async def work() -> None:
        async with daemon(ada) as links:
            async with PairingHost(ada, links):
                reader, writer = await asyncio.open_connection(HOST, links.port, ssl=client_tls(PAIRING_ALPN, None))
                while not links._guests:
                    await asyncio.sleep(0.005)
            assert not links._guests
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            writer.transport.abort()

    run(work())


# --- what can be measured of a code ---


def test_work_ends_at_even_times_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, too; what takes longer than one delay is seen as two, and as nothing in between."""
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.2)

    async def took_s(work: Callable[[], object]) -> float:
        began_s = time.monotonic()
        with contextlib.suppress(ZeroDivisionError):
            await at_even_times(work)
        return time.monotonic() - began_s

    async def work() -> None:
        quick, failing, slow = await asyncio.gather(
            took_s(lambda: None), took_s(lambda: 1 // 0), took_s(lambda: time.sleep(0.21))
        )
        assert min(quick, failing) >= 0.199
        assert slow >= 0.399

    asyncio.run(work(), debug=True)


def test_an_answer_leaves_at_its_time_whether_the_element_was_good_or_not(
    run: Run, ada: Identity, eve: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The computing takes as long as the code wants it to; the host's answer does not."""
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.3)

    async def work() -> None:
        async with showing(ada) as (host, port):
            for element in (PairingExchange(PairingRole.GUEST, host.code).element, b"B" + b"\0" * 32):
                async with dialled(port) as (reader, writer):
                    good = offer(
                        PairingExchange(PairingRole.GUEST, host.code), eve.certificate_der, ada.certificate_der
                    )
                    began_s = time.monotonic()
                    await send(writer, good.model_copy(update={"element": element}))
                    with contextlib.suppress(ConnectionError):
                        await reader.read(1)
                    assert time.monotonic() - began_s >= 0.299

    run(work())


def test_a_code_is_answered_so_often_and_then_it_is_dead(
    run: Run, ada: Identity, bob: Identity, eve: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guests that never prove test no code, but each answer can be timed."""
    monkeypatch.setattr(limits, "PAIRING_ANSWERS_MAX", 4)

    async def work() -> None:
        async with showing(ada) as (host, port):
            for number in range(limits.PAIRING_ANSWERS_MAX):
                element = b"B" + b"\0" * 32 if number == 0 else PairingExchange(PairingRole.GUEST, host.code).element
                async with dialled(port) as (reader, writer):
                    good = offer(
                        PairingExchange(PairingRole.GUEST, host.code), eve.certificate_der, ada.certificate_der
                    )
                    await send(writer, good.model_copy(update={"element": element}))
                    await reader.read(1)
            with pytest.raises(CodeSpentError):
                await join(port, host.code, bob)
            with pytest.raises(CodeSpentError, match=r"4 connections .* most of them from 127\.0\.0\.1: it is dead"):
                await host.wait()

    run(work())


def framed(packed: bytes) -> bytes:
    return len(packed).to_bytes(2, "big") + packed


def tls_of(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols([PAIRING_ALPN])
    identity.load_into(context)
    return context


def client_tls(alpn: str | None, key: Identity | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    if key is not None:
        key.load_into(context)
    return context


@contextlib.asynccontextmanager
async def daemon(
    identity: Identity, host: str = HOST, port: int = 0, pinned: Identity | None = None
) -> AsyncIterator[Links]:
    """What of a daemon pairing needs: its listener, with its pins."""
    with tempfile.TemporaryDirectory() as folder:
        pins = PinTable(Path(folder) / "pins.db")
        if pinned is not None:
            pins.add(Pin(pinned.device_id, pinned.name, pinned.certificate_pem, 0.0, identity.device_id))
        trust = Trust(identity, pins)
        links = Links(identity.device_id, trust, AddressBook(identity.device_id), hello=HELLO, host=host, port=port)
        await links.start(QuietUser())
        try:
            yield links
        finally:
            await links.close()
            pins.close()


@contextlib.asynccontextmanager
async def showing(
    identity: Identity, host: str = HOST, lifetime_s: float = limits.PAIRING_LIFETIME_S
) -> AsyncIterator[tuple[PairingHost, int]]:
    """A device that shows a code, and its port."""
    async with daemon(identity, host) as links, PairingHost(identity, links, lifetime_s) as shown:
        yield shown, links.port


@contextlib.asynccontextmanager
async def dialled(
    port: int, alpn: str | None = PAIRING_ALPN, key: Identity | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port, ssl=client_tls(alpn, key))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
    tls: ssl.SSLContext | None,
    host: str = HOST,
) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def relaying(relay: Identity, host_port: int, pretended_host: Identity | None) -> AsyncIterator[int]:
    """Ends TLS on both sides; with `pretended_host` it also claims that the guest saw that certificate."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()

    serving: set[asyncio.Task[None]] = set()  # nobody else holds them once both ends are closed

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(cast("asyncio.Task[None]", asyncio.current_task()))
        async with dialled(host_port) as (host_reader, host_writer):
            offered = await receive(reader, PairingOffer)
            if pretended_host is not None:
                offered = offered.model_copy(update={"host_seen": pretended_host.device_id})
            await send(host_writer, offered)
            ways = ((reader, host_writer), (host_reader, writer))
            pumps = [asyncio.get_running_loop().create_task(pump(*way)) for way in ways]
            try:
                await asyncio.wait(pumps)
            finally:  # whoever waits may be cancelled, and nobody else would end them
                for task in pumps:
                    task.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        writer.transport.abort()

    async with listening(serve, tls_of(relay)) as port:
        yield port
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)

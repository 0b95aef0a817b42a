"""Pairing by code over real sockets: the right guest gets in, and all others together get at most 3 guesses."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgpack
import pytest

from meshtraind.identity import Identity, load_or_create
from meshtraind.pairchannel import receive, send
from meshtraind.pairing import (
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
from meshtraind.pairjoin import pair_with
from meshtraind.pairproof import (
    Answer,
    CodeError,
    Exchange,
    Offer,
    Profile,
    Proof,
    Refusal,
    Role,
    new_code,
    normalised_code,
    offer,
)
from meshwire import limits
from meshwire.addresses import Address

DEADLINE_S = 30.0
HOST = "127.0.0.1"
HOST_LINKS, GUEST_LINKS = 29610, 29611  # listening ports of peer links: told, not used here

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


async def assert_pairs(host: PairingHost, port: int, ada: Identity, bob: Identity) -> None:
    """Both learn the other's id, name, certificate and where to dial it."""
    waited, joined = await asyncio.gather(host.wait(), pair_with(HOST, port, host.code, bob, GUEST_LINKS))
    assert waited == as_paired(bob, GUEST_LINKS)
    assert joined == as_paired(ada, HOST_LINKS)


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
            await pair_with(HOST, 1, "12", bob, GUEST_LINKS)

    run(work())


def test_the_right_code_pairs_both_and_the_listener_is_gone(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            await assert_pairs(host, host.port, ada, bob)
            with pytest.raises(CodeSpentError):
                await pair_with(HOST, host.port, host.code, bob, GUEST_LINKS)
        with pytest.raises(UnreachableError, match="meshtrain pair"):
            await pair_with(HOST, host.port, host.code, bob, GUEST_LINKS)

    run(work())


def test_ipv6_and_ipv4_reach_a_dual_listener(run: Run, ada: Identity, bob: Identity) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, "::") as host:
            await assert_pairs(host, host.port, ada, bob)

    run(work())


def test_three_wrong_codes_kill_the_code_and_it_says_so(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            for left in (2, 1):
                with pytest.raises(WrongCodeError, match=f"{left} more tries"):
                    await pair_with(HOST, host.port, other_code(host.code), bob, GUEST_LINKS)
            with pytest.raises(WrongCodeError, match="last try"):
                await pair_with(HOST, host.port, other_code(host.code), bob, GUEST_LINKS)
            with pytest.raises(CodeSpentError):
                await pair_with(HOST, host.port, host.code, bob, GUEST_LINKS)
            with pytest.raises(CodeSpentError, match=r"3 times, from 127\.0\.0\.1"):
                await host.wait()

    run(work())


def test_two_wrong_codes_leave_the_third_try(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            for _ in range(2):
                with pytest.raises(WrongCodeError):
                    await pair_with(HOST, host.port, other_code(host.code), bob, GUEST_LINKS)
            await assert_pairs(host, host.port, ada, bob)

    run(work())


def test_an_attacker_gets_three_guesses_however_many_connections_guess_at_once(
    run: Run, ada: Identity, eve: Identity
) -> None:
    """All exchanges reach the proof before the first is judged, and the eighth of them knows the code."""

    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host, contextlib.AsyncExitStack() as open_ends:
            attempts = []
            for number in range(8):
                code = host.code if number == 7 else other_code(host.code)
                reader, writer = await open_ends.enter_async_context(dialled(host.port))
                host_der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                exchange = Exchange(Role.GUEST, code)
                await send(writer, offer(exchange, eve.certificate_der, host_der))
                answer = await receive(reader, Answer)
                attempts.append((reader, writer, exchange.keys(answer.element, host_der, eve.certificate_der)))
            refusals = []
            for reader, writer, keys in attempts:
                await send(writer, keys.prove(Profile(name="eve", listen_port=1)))
                refusals.append(await receive(reader, Refusal))
            assert [refusal.reason for refusal in refusals] == ["wrong-code"] * 3 + ["spent"] * 5
            with pytest.raises(CodeSpentError):
                await host.wait()

    run(work())


def test_guests_that_leave_before_their_proof_cost_no_try(
    run: Run, ada: Identity, bob: Identity, eve: Identity
) -> None:
    """The host has proved nothing by then, so they have tested no code."""

    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            for _ in range(2 * limits.PAIRING_TRIES_MAX):
                async with dialled(host.port) as (reader, writer):
                    exchange = Exchange(Role.GUEST, other_code(host.code))
                    await send(writer, offer(exchange, eve.certificate_der, ada.certificate_der))
                    await receive(reader, Answer)
            await assert_pairs(host, host.port, ada, bob)

    run(work())


def test_an_unused_code_expires(run: Run, ada: Identity, bob: Identity) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST, lifetime_s=0.01) as host:
            with pytest.raises(CodeExpiredError, match="nobody used the code"):
                await host.wait()
            with pytest.raises(CodeExpiredError, match="has expired"):
                await pair_with(HOST, host.port, host.code, bob, GUEST_LINKS)

    run(work())


@pytest.mark.parametrize("rewrites", [False, True], ids=["honest relay", "relay that hides itself"])
def test_a_relay_that_ends_tls_is_refused(
    run: Run, ada: Identity, bob: Identity, eve: Identity, rewrites: bool
) -> None:
    """The key is bound to the certificates that both ends saw, even with the right code typed."""

    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            waiting = asyncio.get_running_loop().create_task(host.wait())
            async with relaying(eve, host.port, ada if rewrites else None) as port:
                with pytest.raises(WrongCodeError if rewrites else RelayedError, match="between"):
                    await pair_with(HOST, port, host.code, bob, GUEST_LINKS)
            assert not waiting.done()
            waiting.cancel()
            await assert_pairs(host, host.port, ada, bob)

    run(work())


def test_a_false_host_that_says_yes_is_not_believed(run: Run, bob: Identity, eve: Identity) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offered = await receive(reader, Offer)
        exchange = Exchange(Role.HOST, "000-000")
        await send(writer, Answer(element=exchange.element))
        await receive(reader, Proof)
        keys = exchange.keys(offered.element, eve.certificate_der, offered.certificate_der)
        await send(writer, keys.prove(Profile(name="ada", listen_port=1)))
        await reader.read()
        writer.transport.abort()

    async def work() -> None:
        async with listening(serve, tls_of(eve)) as port:
            with pytest.raises(WrongCodeError, match="do not pair with it"):
                await pair_with(HOST, port, "000-001", bob, GUEST_LINKS)

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
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            idle = [await asyncio.open_connection(HOST, host.port) for _ in range(limits.PAIRING_CONNECTIONS_MAX)]
            for _, half_open in idle[::2]:
                half_open.write(b"\x16\x03\x01\x00\xff not yet a client hello")
            for sent in noise:
                async with dialled(host.port) as (_, writer):
                    writer.write(sent)
                    await writer.drain()
            for wrong in bad_offers:
                async with dialled(host.port) as (reader, writer):
                    good = offer(Exchange(Role.GUEST, host.code), bob.certificate_der, ada.certificate_der)
                    writer.write(framed(msgpack.packb({**good.model_dump(), **wrong})))
                    assert await reader.read() == b"", "closed without an answer"
            idle += [await asyncio.open_connection(HOST, host.port) for _ in range(limits.PAIRING_CONNECTIONS_MAX)]
            async with dialled(host.port):
                await assert_pairs(host, host.port, ada, bob)
            for _, writer in idle:
                writer.transport.abort()

    run(work())


def test_a_slow_client_is_closed_at_its_deadline(
    run: Run, ada: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "PAIRING_EXCHANGE_TIMEOUT_S", 0.2)
    caplog.set_level(logging.INFO)

    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host, dialled(host.port) as (reader, writer):
            writer.write(b"\0")
            assert await reader.read() == b""

    run(work())
    assert "came to nothing: TimeoutError" in caplog.text


def test_a_silent_address_is_given_up_at_the_deadline(run: Run, bob: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_EXCHANGE_TIMEOUT_S", 0.2)

    async def work() -> None:
        with socket.create_server((HOST, 0)) as silent, pytest.raises(UnreachableError, match="did not answer within"):
            await pair_with(HOST, silent.getsockname()[1], "483-917", bob, GUEST_LINKS)

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
            await pair_with(HOST, port, "483-917", bob, GUEST_LINKS)
        with pytest.raises(UnreachableError, match=r"cannot reach no-such-host\.invalid"):
            await pair_with("no-such-host.invalid", 1, "483-917", bob, GUEST_LINKS)
        async with listening(hang_up, None) as port:
            with pytest.raises(NotPairingError, match="not waiting to be paired"):
                await pair_with(HOST, port, "483-917", bob, GUEST_LINKS)
        async with listening(chatter, tls_of(eve)) as port:
            with pytest.raises(NotPairingError, match="does not speak"):
                await pair_with(HOST, port, "483-917", bob, GUEST_LINKS)

    run(work())


def test_another_version_is_named(run: Run, ada: Identity, bob: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            monkeypatch.setattr("meshtraind.pairproof.PROTOCOL", "meshtrain-pair-2")
            with pytest.raises(NotPairingError, match="same version"):
                await pair_with(HOST, host.port, host.code, bob, GUEST_LINKS)

    run(work())


def test_a_device_does_not_pair_with_its_own_copy(run: Run, ada: Identity) -> None:
    async def work() -> None:
        async with PairingHost(ada, HOST_LINKS, HOST) as host:
            with pytest.raises(PairingError, match="same device"):
                await pair_with(HOST, host.port, host.code, ada, GUEST_LINKS)

    run(work())


def test_leaving_early_leaves_nothing_behind(run: Run, ada: Identity) -> None:
    async def work() -> None:
        before = asyncio.all_tasks()
        async with PairingHost(ada, HOST_LINKS, HOST) as host, dialled(host.port):
            half_open = socket.create_connection((HOST, host.port))
        half_open.close()
        assert asyncio.all_tasks() == before

    run(work())


def test_an_address_that_is_not_ours_is_a_clear_error(run: Run, ada: Identity) -> None:
    async def work() -> None:
        with pytest.raises(PairingError, match=r"cannot listen on 192\.0\.2\.1"):
            async with PairingHost(ada, HOST_LINKS, "192.0.2.1"):
                pass

    run(work())


def framed(packed: bytes) -> bytes:
    return len(packed).to_bytes(2, "big") + packed


def tls_of(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    identity.load_into(context)
    return context


@contextlib.asynccontextmanager
async def dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
    tls: ssl.SSLContext | None,
) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, HOST, 0, ssl=tls)
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

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with dialled(host_port) as (host_reader, host_writer):
            offered = await receive(reader, Offer)
            if pretended_host is not None:
                offered = offered.model_copy(update={"host_seen": pretended_host.device_id})
            await send(host_writer, offered)
            with contextlib.suppress(OSError):
                await asyncio.wait(
                    [
                        asyncio.get_running_loop().create_task(pump(reader, host_writer)),
                        asyncio.get_running_loop().create_task(pump(host_reader, writer)),
                    ]
                )
        writer.transport.abort()

    async with listening(serve, tls_of(relay)) as port:
        yield port

"""Several whole daemons in one event loop: starting, pairing, linking, refusing, and starting where it cannot be."""

import asyncio
import functools
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from meshtrain.client import Client
from meshtraind.api.local_handler import LocalHandler
from meshtraind.app import App, Config, StartError
from meshtraind.peers.selection import ask_who_is_linked, choose_members
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshtraind.trust.identity import load_or_create
from meshtraind.trust.newcomers import Verdict
from meshtraind.trust.pins import Pin
from meshtraind.trust.tls import Trust
from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, LAYOUT, MAGIC, WIRE_VERSION, Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.job import BlobRef, JobSpec
from meshwire.messages.local import (
    DashboardOpened,
    OpenDashboard,
    PairAccept,
    PairCode,
    PairJoin,
    Unpair,
    Watched,
)
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.fakedaemon import summary
from tests.daemon.httpclient import EventStream, HttpClient
from tests.daemon.waiting import until

TIMEOUT_S = 15.0


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a pairing's answers leave at even times is proved with the pairing."""
    monkeypatch.setattr(limits, "PAIRING_ANSWER_DELAY_S", 0.01)


def config(folder: Path, name: str, **changes: object) -> Config:
    options: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "interfaces": ["lo"],
        "peers": [],
        "mdns": False,
        "name": name,
        "data_dir": folder / name,
    }
    return Config.from_options(**{**options, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def running(*configs: Config) -> AsyncIterator[list[App]]:
    """Daemons, started; stopped and checked for errors at the end."""
    apps = [App(config) for config in configs]
    tasks = [asyncio.get_running_loop().create_task(app.run(), name=f"app {i}") for i, app in enumerate(apps)]
    try:
        for app, task in zip(apps, tasks, strict=True):
            await until(lambda app=app, task=task: task.done() or app.started, "the start")  # type: ignore[misc]
            if task.done():
                task.result()
        yield apps
    finally:
        for app in apps:
            app.request_stop()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), TIMEOUT_S)


def unheard(event: Wire) -> None:
    """For what is told to a person."""


async def pair(host: App, guest: App) -> None:
    codes: asyncio.Queue[PairCode] = asyncio.Queue()

    def on_code(event: Wire) -> None:
        assert isinstance(event, PairCode)
        codes.put_nowait(event)

    hosting = asyncio.get_running_loop().create_task(host.mesh.host_pairing(on_code), name="hosting")
    shown = await asyncio.wait_for(codes.get(), TIMEOUT_S)
    await guest.mesh.join_pairing(PairJoin(code=shown.code, at=f"127.0.0.1:{shown.port}"), unheard)
    await asyncio.wait_for(hosting, TIMEOUT_S)


def dialler(app: App) -> set[str]:
    return {link.dialled_by for link in app.mesh.node.links.values()}


def agree(one: App, other: App) -> bool:
    return dialler(one) == dialler(other)


def linked(app: App) -> set[str]:
    return {row.name for row in app.mesh.peers() if row.state == "linked"}


@pytest.mark.asyncio
async def test_a_name_is_kept_until_another_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop-7.local")
    seen = []
    for said in (None, "anna", None, "Ännchen", None):
        async with running(replace(config(tmp_path, "any"), name=said)) as (app,):
            seen.append(app.mesh.node.name)
    assert seen == ["laptop-7", "anna", "anna", "Ännchen", "Ännchen"]


@pytest.mark.asyncio
async def test_paired_daemons_link_and_unpairing_drops_the_link(tmp_path: Path) -> None:
    async with running(config(tmp_path, "anna"), config(tmp_path, "bert")) as (anna, bert):
        assert not linked(anna)
        await pair(anna, bert)
        await until(lambda: linked(anna) == {"bert"} and linked(bert) == {"anna"}, "the link")
        bert.mesh.unpair(Unpair(peer="anna"))
        await until(lambda: not linked(anna) and not linked(bert), "the end of the link")
        assert [row.state for row in anna.mesh.peers()] == ["paired"]
        assert bert.mesh.peers() == ()


@pytest.mark.asyncio
async def test_one_code_joins_the_mesh_and_a_removal_holds(tmp_path: Path) -> None:
    """K1, K4: carl is paired with bert alone, and linked with anna as well. Removed at anna he stays so, whatever bert
    says, until a code is typed there."""
    names = "anna", "bert", "carl"
    async with running(*(config(tmp_path, name) for name in names)) as (anna, bert, carl):
        await pair(anna, bert)
        await pair(bert, carl)
        await until(lambda: linked(anna) == {"bert", "carl"} and linked(carl) == {"anna", "bert"}, "all links")
        assert {row.name: row.added_by for row in anna.mesh.peers()} == {"bert": None, "carl": "bert"}
        assert [(one.name, one.added_by) for one in carl.mesh.joined] == [("anna", "bert")]
        assert [one.name for one in anna.mesh.introducer.joined_since(0)] == ["carl"]
        told = anna.mesh.unpair(Unpair(peer="carl"))
        assert (told.removed[0].name, told.others) == ("carl", ("bert",))
        await until(lambda: not linked(anna) & {"carl"} and linked(carl) == {"bert"}, "the end of the link")
        await until(lambda: any("anna has removed carl" in said for said in bert.mesh.warnings), "the warning")
        members, (note, *_) = choose_members(bert.mesh.node, (), None, None, await ask_who_is_linked(bert.mesh.node))
        assert [member.name for member in members] == ["bert", "anna"]
        assert note.startswith("carl is left out: it has no link to anna"), "K7"
    async with running(config(tmp_path, "anna")) as (anna,):
        verdicts = []
        judge = anna.mesh.introducer.newcomers.judge

        def noted(*given: Any, **named: Any) -> Any:
            verdicts.append(judge(*given, **named))
            return verdicts[-1]

        anna.mesh.introducer.newcomers.judge = noted  # type: ignore[method-assign]
        at_anna = anna.mesh.listen
        async with running(config(tmp_path, "bert", peers=[at_anna]), config(tmp_path, "carl")) as (bert, carl):
            await until(lambda: linked(anna) == {"bert"}, "the link")
            await until(lambda: bool(verdicts), "bert's next word")
            assert set(verdicts) == {Verdict.REMOVED}
            assert [row.name for row in anna.mesh.peers()] == ["bert"]
            await pair(anna, carl)
            await until(lambda: linked(anna) == {"bert", "carl"}, "the link by a code")
            assert {row.name: row.added_by for row in anna.mesh.peers()} == {"bert": None, "carl": None}


@pytest.mark.asyncio
async def test_a_restarted_daemon_links_again_by_itself(tmp_path: Path) -> None:
    """Identity by key: the new port is learned from the side that remembers the other's."""
    async with running(config(tmp_path, "anna")) as (anna,):
        async with running(config(tmp_path, "bert")) as (bert,):
            await pair(anna, bert)
            await until(lambda: linked(anna) == {"bert"}, "the link")
        await until(lambda: not linked(anna), "the end of the link")
        async with running(config(tmp_path, "bert")) as (bert,):
            await until(lambda: linked(anna) == {"bert"} and linked(bert) == {"anna"}, "the new link")


@pytest.mark.asyncio
async def test_one_reachable_peer_is_enough_to_find_the_others(tmp_path: Path) -> None:
    """DESIGN 9: gossip of addresses. Cleo knows where anna is, anna knows where bert is."""
    async with running(config(tmp_path, "anna"), config(tmp_path, "bert"), config(tmp_path, "cleo")) as apps:
        anna, bert, cleo = apps
        for host, guest in ((anna, bert), (anna, cleo), (bert, cleo)):
            await pair(host, guest)
        await until(lambda: all(len(linked(app)) == 2 for app in apps), "all links")
    async with running(config(tmp_path, "anna")) as (anna,):
        at_anna = anna.mesh.listen
        async with running(config(tmp_path, "bert", peers=[at_anna]), config(tmp_path, "cleo", peers=[at_anna])) as (
            bert,
            cleo,
        ):
            await until(lambda: linked(bert) == {"anna", "cleo"}, "all links, by gossip")
            await until(lambda: linked(cleo) == {"anna", "bert"}, "all links, by gossip")


@pytest.mark.asyncio
async def test_daemons_that_know_each_other_and_start_together_hold_one_link(tmp_path: Path) -> None:
    """W4: if both dialled, the lower device id's dial stays, on both sides."""
    async with running(config(tmp_path, "anna"), config(tmp_path, "bert")) as (anna, bert):
        await pair(anna, bert)
        ports = [app.mesh.listen for app in (anna, bert)]
    for _ in range(3):
        configs = [config(tmp_path, name, listen=at) for name, at in zip(("anna", "bert"), ports, strict=True)]
        async with running(*configs) as (anna, bert):
            await until(lambda: linked(anna) == {"bert"} and linked(bert) == {"anna"}, "the link")
            await until(functools.partial(agree, anna, bert), "agreement on the link")


@pytest.mark.asyncio
async def test_the_code_is_the_pairing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAIRING_SEARCH_S", 0.1)
    async with running(config(tmp_path, "anna"), config(tmp_path, "bert")) as (anna, bert):
        with pytest.raises(RequestFailed, match="no device on this network shows a pairing code"):
            await bert.mesh.join_pairing(PairJoin(code="123-456", at=None), unheard)
        with pytest.raises(RequestFailed, match="six digits"):
            await bert.mesh.join_pairing(PairJoin(code="12-34", at=anna.mesh.listen), unheard)
        with pytest.raises(RequestFailed, match="shows no code now: run `meshtrain pair` there"):
            await bert.mesh.join_pairing(PairJoin(code="123-456", at=anna.mesh.listen), unheard)
        with pytest.raises(RequestFailed, match="port 0 cannot be dialled"):
            await bert.mesh.join_pairing(PairJoin(code="123-456", at="127.0.0.1:0"), unheard)


@pytest.mark.asyncio
async def test_a_code_is_shown_with_where_to_type_it(tmp_path: Path) -> None:
    """The port is the daemon's one; the addresses are those at which it listens. Not to be typed where it is shown."""
    codes: asyncio.Queue[Wire] = asyncio.Queue()
    async with running(config(tmp_path, "anna")) as (anna,):
        work = anna.mesh.host_pairing(codes.put_nowait)
        hosting = asyncio.get_running_loop().create_task(work, name="hosting")
        shown = await asyncio.wait_for(codes.get(), TIMEOUT_S)
        assert isinstance(shown, PairCode)
        assert anna.mesh.listen == f"127.0.0.1:{shown.port}"
        assert shown.addresses == ("127.0.0.1",)
        with pytest.raises(RequestFailed, match="this device itself shows that code"):
            await anna.mesh.join_pairing(PairJoin(code=shown.code, at=None), unheard)
        with pytest.raises(RequestFailed, match="shows a pairing code already"):
            await anna.mesh.host_pairing(unheard)
        hosting.cancel()
        await asyncio.wait({hosting})


@pytest.mark.asyncio
async def test_noise_on_the_port_harms_nobody(tmp_path: Path) -> None:
    """Random bytes, another protocol, half-open and slow connections: closed within limits, others link meanwhile."""
    async with running(config(tmp_path, "anna"), config(tmp_path, "bert")) as (anna, bert):
        host, _, port = anna.mesh.listen.rpartition(":")
        noises = [
            os.urandom(3000),
            b"GET / HTTP/1.1\r\n\r\n",
            MAGIC + b"\xff" * (HEADER_BYTES - 4),
            b"\x16\x03\x01\xff\xff",
        ]
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(limits.HANDSHAKES_MAX + 8)]
        for (_, writer), noise in zip(opened, noises * 10, strict=False):
            writer.write(noise)
        await pair(anna, bert)
        await until(lambda: linked(bert) == {"anna"}, "the link")
        for _, writer in opened:
            writer.close()
        assert LAYOUT.size == HEADER_BYTES


@pytest.mark.asyncio
async def test_a_peer_of_another_wire_version_is_named_where_people_look(tmp_path: Path) -> None:
    """W6: bert was updated, and calls anna, which was not."""
    newer = bytearray(Header(Kind.CONTROL, 8).encode() + bytes(8))
    newer[4] = WIRE_VERSION + 1
    async with running(config(tmp_path, "anna")) as (anna,):
        async with running(config(tmp_path, "bert")) as (bert,):
            await pair(anna, bert)
            await until(lambda: linked(anna) == {"bert"}, "the link")
            tls = Trust(bert.mesh._identity, bert.mesh._pins).client_context
        await until(lambda: not linked(anna), "the end of the link")
        port = anna.mesh._links.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="x")
        writer.write(newer)
        await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.transport.abort()
        said = f"bert speaks wire version {WIRE_VERSION + 1}, anna {WIRE_VERSION}: update meshtrain on anna"
        assert [(row.state, row.refused) for row in anna.mesh.peers()] == [("paired", said)]
        assert anna.mesh.warnings == (said,)
        spec = JobSpec(
            job="0123456789ab", name="train", submitter="a" * 64, created_at_s=1.0, script="train.py", args=(), env=(),
            files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32",
            on_nan="stop", seed=1, bucket_bytes=4096, hash_every=0, trace=False,
        )  # fmt: skip
        members = anna.mesh.node.member, bert.mesh.node.member
        job = Job(spec, members, 0, anna.mesh.node.job_folder(spec.job), anna.mesh.node.history)
        anna.jobs.registry.add(job)
        assert job.summary().unlinkable == ((1, said),)
        async with running(config(tmp_path, "bert", peers=[f"127.0.0.1:{port}"])):
            await until(lambda: linked(anna) == {"bert"}, "the link")
            assert anna.mesh.warnings + tuple(job.summary().unlinkable) == ()


@pytest.mark.asyncio
async def test_a_second_daemon_on_a_data_folder_is_refused(tmp_path: Path) -> None:
    async with running(config(tmp_path, "anna")):
        with pytest.raises(StartError, match=rf"runs on .*anna already \(process {os.getpid()}\)"):
            await App(config(tmp_path, "anna")).run()


@pytest.mark.asyncio
async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--listen"):
            await App(config(tmp_path, "anna", listen=f"127.0.0.1:{port}")).run()


@pytest.mark.asyncio
async def test_a_person_takes_and_removes_those_that_others_introduce(tmp_path: Path) -> None:
    """K3, K4: as the command line asks for it; and whoever follows a job hears once of each that joins."""
    bert, carl = (load_or_create(tmp_path / f"{name} himself", name) for name in ("bert", "carl"))
    async with running(config(tmp_path, "anna", introductions="ask")) as (anna,):
        mesh, pins = anna.mesh, anna.mesh._pins
        handler = LocalHandler(mesh, anna.jobs, cast(Any, None), cast(Any, None), cast(Any, None), anna.request_stop)
        pins.add(Pin(bert.device_id, "bert", bert.certificate_pem, time.time(), mesh.node.device))
        pins.wait(Pin(carl.device_id, "carl", carl.certificate_pem, time.time(), bert.device_id))
        assert [(one.name, one.added_by) for one in mesh.waiting] == [("carl", "bert")]
        assert {row.name: row.state for row in mesh.peers()} == {"bert": "paired", "carl": "waiting"}
        heard: list[tuple[str, ...]] = []

        def follow(event: Wire) -> None:
            assert isinstance(event, Watched)
            heard.append(tuple(one.name for one in event.joined))

        tell = handler._with_joined(follow)
        now = Watched(summary=summary())
        tell(now)
        assert mesh.accept(PairAccept(peer="carl")).device == carl.device_id
        tell(now)
        tell(now)
        handler._with_joined(follow)(now)
        assert heard == [(), ("carl",), (), ()]
        assert (mesh.waiting, [one.name for one in mesh.joined]) == ((), ["carl"])
        with pytest.raises(RequestFailed, match="no device that waits is called 'carl'"):
            mesh.accept(PairAccept(peer="carl"))
        told = mesh.unpair(Unpair(peer="bert"))
        assert ([one.name for one in told.removed], [one.name for one in told.stay]) == (["bert"], ["carl"])
        pins.add(Pin(bert.device_id, "bert", bert.certificate_pem, time.time(), mesh.node.device))
        told = mesh.unpair(Unpair(peer="bert", introduced=True))
        assert ({one.name for one in told.removed}, told.stay) == ({"bert", "carl"}, ())
        assert mesh.peers() == ()


@pytest.mark.asyncio
async def test_what_was_said_of_introductions_is_kept_until_it_is_said_again(tmp_path: Path) -> None:
    """K3: a start without the option is not a word for `accept`."""
    for said, kept in ((None, "accept"), ("never", "never"), (None, "never"), ("ask", "ask"), (None, "ask")):
        async with running(config(tmp_path, "anna", introductions=said)) as (app,):
            assert app.mesh.introductions == kept


@pytest.mark.asyncio
async def test_the_patience_reaches_the_whole_daemon(tmp_path: Path) -> None:
    async with running(config(tmp_path, "anna", patience_s=0.5)) as (app,):
        assert app.mesh.node.patience_s == 0.5


@pytest.mark.parametrize("patience_s", [0.49, 120.1, -1.0, float("nan"), float("inf")])
def test_a_patience_out_of_range_is_named(tmp_path: Path, patience_s: float) -> None:
    with pytest.raises(ValueError, match=r"--patience .*from 0\.5 to 120 seconds"):
        config(tmp_path, "anna", patience_s=patience_s)


@pytest.mark.asyncio
async def test_a_data_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "anna").write_text("a file")
    with pytest.raises(StartError, match=r"data folder .*anna cannot be used.*--data-dir"):
        await App(config(tmp_path, "anna")).run()


@pytest.mark.asyncio
async def test_an_unknown_interface_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="nosuch0"):
        await App(config(tmp_path, "anna", interfaces=["nosuch0"])).run()


@pytest.mark.asyncio
async def test_the_dashboard_of_a_daemon_shows_it_and_ends_with_it(tmp_path: Path) -> None:
    """A command asks the local socket for the address; what it leads to is what commands are told."""

    def ask() -> Wire:
        client = Client.connect(tmp_path / "anna")
        try:
            return client.request(OpenDashboard(), timeout_s=TIMEOUT_S, name="dashboard")
        finally:
            client.close()

    async with running(config(tmp_path, "anna"), config(tmp_path, "bert")) as (anna, bert):
        await pair(anna, bert)
        await until(lambda: linked(anna) == {"bert"}, "the link")
        reply = await asyncio.to_thread(ask)
        assert isinstance(reply, DashboardOpened)
        page = HttpClient(reply.url)
        assert (await page.enter()).status == 200
        events = await EventStream.open(page)
        assert (await events.until("status"))["name"] == "anna"
        assert [(one["name"], one["state"]) for one in await events.until("peers")] == [("bert", "linked")]
        assert await events.until("jobs") == []
        assert (await page.post("/api/unpair", {"peer": bert.mesh.node.device, "introduced": False})).status == 200
        while await events.until("peers"):
            pass
        assert (await page.post("/api/cancel", {"job": "1kx3m9q2v7bd", "now": True})).status == 409
        await page.post("/api/pair/show", {})
    await events.ended()
    await events.close()

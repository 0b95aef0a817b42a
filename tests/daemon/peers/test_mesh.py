"""A daemon and what it keeps of the others: where they are, who is new, what is done with introductions."""

import asyncio
import time
from pathlib import Path

import pytest

from meshtraind.app import App
from meshtraind.peers.mdns import Sighting
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pins import Pin, PinsError, PinTable
from meshwire.addresses import Address
from meshwire.discovery.addressbook import Source
from meshwire.messages.local import IntroductionPolicy, SetIntroductions
from tests.daemon.api.test_app import TIMEOUT_S, config, running

AT = Address(host="192.0.2.7", port=29610)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("bert"), "bert")


async def knows(folder: Path, bert: Identity, *, introduced: bool, added_at: float = 1.0) -> None:
    """Anna's data folder, in which bert is pinned with one address."""
    async with running(config(folder, "anna")) as (anna,):
        by = "f" * 64 if introduced else anna.mesh.node.device
    table = PinTable(folder / "anna" / "pins.db")
    table.add(Pin(bert.device_id, "bert", bert.certificate_pem, added_at, by, (AT,)))
    table.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("introduced", [True, False])
async def test_where_an_introducer_says_that_a_device_is_stays_hearsay(
    tmp_path: Path, bert: Identity, introduced: bool
) -> None:
    """It is dialled, also after a restart, and is not passed on as if bert had been reached there."""
    await knows(tmp_path, bert, introduced=introduced)
    for _ in range(2):
        async with running(config(tmp_path, "anna")) as (anna,):
            book = anna.mesh._book
            assert book.addresses_of(bert.device_id) == (AT,)
            told = [known.addresses for known in book.gossip_for("c" * 64)]
            assert told == ([] if introduced else [(AT,)])


@pytest.mark.asyncio
async def test_a_full_disk_at_the_end_is_no_error_of_the_daemon(
    tmp_path: Path, bert: Identity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an error a service manager would start it again, though somebody has typed `meshtrain down`."""
    await knows(tmp_path, bert, introduced=False)

    def refused(*_: object) -> None:
        raise PinsError("the disk is full")

    monkeypatch.setattr(PinTable, "set_addresses", refused)
    anna = App(config(tmp_path, "anna"))
    ended = asyncio.get_running_loop().create_task(anna.run(), name="anna")
    while not anna.started:
        assert not ended.done(), ended.result()
        await asyncio.sleep(0.005)
    anna.mesh._book.learn(bert.device_id, AT, Source.REMEMBERED, 1.0)
    anna.request_stop()
    await asyncio.wait_for(ended, TIMEOUT_S)
    assert "is not remembered: the disk is full" in caplog.text


@pytest.mark.asyncio
async def test_the_policy_of_introductions_changes_while_it_runs(tmp_path: Path) -> None:
    """K3: and stays so."""
    async with running(config(tmp_path, "anna")) as (anna,):
        assert anna.mesh.introductions is IntroductionPolicy.ACCEPT
        for policy in (IntroductionPolicy.NEVER, IntroductionPolicy.ASK):
            anna.mesh.set_introductions(SetIntroductions(policy=policy))
            assert anna.mesh.introductions is policy
    async with running(config(tmp_path, "anna")) as (anna,):
        assert anna.mesh.introductions is IntroductionPolicy.ASK


@pytest.mark.asyncio
async def test_who_joined_is_told_for_a_day_by_whatever_clock(tmp_path: Path, bert: Identity) -> None:
    """Also who joined before this machine's clock was set back, and not until that time comes again."""
    day_s = 86_400.0
    for ago_s, told in ((0.5 * day_s, True), (1.5 * day_s, False), (-0.5 * day_s, True), (-30 * day_s, False)):
        await knows(tmp_path, bert, introduced=True, added_at=time.time() - ago_s)
        async with running(config(tmp_path, "anna")) as (anna,):
            assert [one.name for one in anna.mesh.joined] == (["bert"] if told else [])


@pytest.mark.asyncio
async def test_the_doctor_is_told_where_others_may_be_and_why_there_is_no_link(tmp_path: Path, bert: Identity) -> None:
    """Also what mDNS shows of them, and on which interfaces this device is announced."""
    await knows(tmp_path, bert, introduced=False)
    async with running(config(tmp_path, "anna")) as (anna,):
        view = anna.mesh.network()
        assert (view.host, f"{view.host}:{view.port}") == ("127.0.0.1", anna.mesh.listen)
        (seen,) = view.devices
        assert (seen.device, seen.name, seen.state, seen.addresses) == (bert.device_id, "bert", "paired", (AT,))
        assert (seen.announced_version, seen.refused) == (None, None)
        anna.mesh.sighted(Sighting(bert.device_id, ("192.0.2.8",), 29610, "bert", 12, False))
        (seen,) = anna.mesh.network().devices
        assert seen.announced_version == 12
        assert set(seen.addresses) == {AT, Address(host="192.0.2.8", port=29610)}

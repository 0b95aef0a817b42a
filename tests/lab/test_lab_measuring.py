"""W7 on links whose rate is known: what a measurement finds there, and whether it tells the air from a cable."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshtraind.transport.connection import Connection
from meshwire.planning.measured_link import MeasuredLink
from tests.daemon.connectionpair import DEADLINE_S, trusts
from tests.daemon.measuring.test_measuring import ANNA, BERT, Device, measured
from tests.daemon.waiting import until
from tests.lab.lab import Lab, lab_unavailable
from tests.lab.links import Cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60),
    pytest.mark.skipif(lab_unavailable("nft") is not None, reason=str(lab_unavailable("nft"))),
]

MBIT = 125_000
TRIES = 5  # one may meet a moment in which the other tests have both cores, and then says less than the link carries
OFF = 0.15  # of the rate, at rates that a machine carries which other tests keep busy


@asynccontextmanager
async def linked(lab: Lab) -> AsyncIterator[Device]:
    """Anna on one station and bert on another, by TLS; both ends in this process."""
    loop = asyncio.get_running_loop()
    anna, bert = Device(), Device()
    to_anna, to_bert = Connection(bert, name="anna"), Connection(anna, name="bert")
    with lab.inside(1):
        listener = socket.create_server((lab.host(1), 0))
    with lab.inside(0):
        dialling = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
    dialling.setblocking(False)
    server = await loop.create_server(lambda: to_anna, sock=listener, ssl=trusts()[0].server_context)
    await loop.create_connection(
        lambda: to_bert, sock=dialling, ssl=trusts()[1].client_context, server_hostname="meshtrain"
    )
    await until(lambda: to_anna.writable)
    anna.is_called("anna", BERT, "bert", to_bert)
    bert.is_called("bert", ANNA, "anna", to_anna)
    try:
        yield anna
    finally:
        server.close()
        for connection in (to_anna, to_bert):
            connection.close("the test has ended")
            await connection.closed()


async def found(lab: Lab, one_way_bytes_s: float, both_bytes_s: float, *, shared: bool) -> None:
    """A measurement finds these rates, within what a busy machine allows, and none finds more."""
    for left in reversed(range(TRIES)):
        async with linked(lab) as anna:
            assert (await measured(anna)).failed == ()
            link = anna.figures
        assert isinstance(link, MeasuredLink)
        rates = {link.send_bytes_s: one_way_bytes_s, link.receive_bytes_s: one_way_bytes_s}
        assert all(rate <= due * (1 + OFF) for rate, due in rates.items()), link
        assert link.both_bytes_s <= both_bytes_s * (1 + 2 * OFF), link
        enough = all(rate >= due * (1 - OFF) for rate, due in rates.items())
        if enough and link.both_bytes_s >= both_bytes_s * (1 - 2 * OFF) and link.shared is shared:
            return
        assert left, f"none of {TRIES} measurements found the link's rates; the last one: {link}"


@pytest.mark.parametrize("mbit", [1, 20])
def test_a_cable_carries_its_rate_each_way_and_both_at_once(mbit: int) -> None:
    with Lab(stations=2, rate_mbit=mbit) as lab:
        asyncio.run(found(lab, mbit * MBIT, 2 * mbit * MBIT, shared=False))


def test_stations_in_a_cell_share_its_air() -> None:
    """What crosses the air twice has half of it, alone and both ways together."""
    mbit = 20
    with Lab(stations=2, cell=Cell(mbit)) as lab:
        asyncio.run(found(lab, mbit / 2 * MBIT, mbit / 2 * MBIT, shared=True))

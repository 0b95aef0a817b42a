"""Pairing where the network lets 29610/tcp through and nothing else: no multicast, no other port, no default route."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalDaemon
from meshtrain.errors import RequestError
from meshwire.addresses import DEFAULT_PORT
from meshwire.message_base import Wire
from meshwire.messages.local import GetPeers, PairCode, Paired, PairHost, PairJoin, Peers
from tests.lab.lab import Lab, lab_unavailable

pytestmark = pytest.mark.skipif(
    lab_unavailable() is not None or shutil.which("nft") is None, reason=lab_unavailable() or "nft not found"
)

TIMEOUT_S = 30.0
ONE_PORT = f"""
table inet meshtrain {{
    chain input {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
        tcp dport {DEFAULT_PORT} accept
    }}
}}
"""


class Laptop(LocalDaemon):
    """A daemon in a station, with its default address and a firewall."""

    def __init__(self, lab: Lab, station: int, name: str, folder: Path) -> None:
        self.name = name
        self.host = lab.host(station)
        self.data_dir = folder / name
        self.data_dir.mkdir()
        self.log_path = self.data_dir / "daemon.log"
        self.client = None
        nft = lab.command(station, ["nft", "-f", "-"])
        subprocess.run(nft, input=ONE_PORT, text=True, check=True, timeout=TIMEOUT_S)
        command = ["python", "-m", "meshtraind", "run", "--name", name, "--data-dir", str(self.data_dir)]
        with self.log_path.open("ab") as log:
            self.process = lab.run(station, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.fixture
def laptops(tmp_path: Path) -> Iterator[tuple[Laptop, Laptop]]:
    with Lab(stations=2, rate_mbit=100.0) as lab, ExitStack() as stack:
        made = Laptop(lab, 0, "anna", tmp_path), Laptop(lab, 1, "bert", tmp_path)
        for laptop in made:
            stack.callback(laptop.stop)
            stack.callback(laptop.ask_to_stop)
        for laptop in made:
            laptop.wait()
        yield made


def test_one_open_port_is_enough(laptops: tuple[Laptop, Laptop]) -> None:
    """With what the screen of the first shows; a wrong code, and one that is no more, say what to do."""
    anna, bert = laptops
    codes: list[str] = []

    def join(code: str, at: str) -> Wire:
        return bert.request(PairJoin(code=code, at=at), TIMEOUT_S, "pairing")

    def type_it(event: Wire) -> None:
        assert isinstance(event, PairCode)
        assert (event.port, event.addresses) == (DEFAULT_PORT, (anna.host,)), "no host name, no default route"
        codes.append(event.code)
        with pytest.raises(RequestError, match=r"is not the one that .* shows; 2 more tries are left"):
            join(f"{(int(event.code.replace('-', '')) + 1) % 10**6:06}", event.addresses[0])
        paired = join(event.code, event.addresses[0])
        assert isinstance(paired, Paired)
        assert paired.name == "anna"

    with pytest.raises(RequestError, match="shows no code now: run `meshtrain pair` there"):
        join("123-456", anna.host)
    paired = anna.request(PairHost(), TIMEOUT_S, "pairing", type_it)
    assert isinstance(paired, Paired)
    assert paired.name == "bert"
    peers = bert.request(GetPeers(), TIMEOUT_S, "list of peers")
    assert isinstance(peers, Peers)
    assert [(peer.name, peer.state) for peer in peers.peers] == [("anna", "linked")]
    with pytest.raises(RequestError, match="shows no code now: run `meshtrain pair` there"):
        join(codes[0], anna.host)

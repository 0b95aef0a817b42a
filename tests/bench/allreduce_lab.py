"""`python -m tests.bench.allreduce_lab`: the comparison with gloo, one rank of each side per station, on rate-limited
cables or in a WiFi cell."""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from meshtraind.bench.allreduce import compare
from meshtraind.bench.report import Report
from meshtraind.bench.settings import BenchError, Settings, Station
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.load import load_of
from meshwire.collectives.strategy import collective_for, topology_of
from tests.lab.lab import Cell, Delay, Lab, LabError, lab_unavailable

LAB_COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Network:
    """What the stations are joined by.

    Attributes:
        rate_mbit: of every cable, each way; in a cell, of its air.
        cell: all but `wired` are on WiFi.
        loss_percent: of the frames that a station sends.
        congestion: the congestion control of all that choose none themselves; None: as this machine has it.
        delay_ms: that each frame is on its way to a station, and from it.
    """

    rate_mbit: float
    cell: bool = False
    wired: frozenset[int] = frozenset()
    loss_percent: float = 0.0
    congestion: str | None = None
    delay_ms: float = 0.0

    @contextmanager
    def lab(self, stations: int) -> Iterator[Lab]:
        """It, until it is left. Raises LabError."""
        cable_mbit = None if self.cell else self.rate_mbit
        cell = Cell(self.rate_mbit, self.wired) if self.cell else None
        delays = dict.fromkeys(range(stations), Delay(self.delay_ms)) if self.delay_ms else None
        with Lab(stations, cable_mbit, cell=cell, delays=delays) as lab:
            for rank in range(stations):
                if self.loss_percent:
                    lab.lose(rank, up_percent=self.loss_percent)
                if self.congestion is not None:
                    choose = ["sysctl", "-qw", f"net.ipv4.tcp_congestion_control={self.congestion}"]
                    if lab.run(rank, choose).wait(LAB_COMMAND_TIMEOUT_S) != 0:
                        raise LabError(
                            f"the stations may not choose {self.congestion}: allow it by "
                            "`sysctl net.ipv4.tcp_allowed_congestion_control`"
                        )
            yield lab

    def limit_s(self, settings: Settings, topology: str) -> float:
        """Below which no round of fp32 can be: what crosses the air, or the busiest cable, one way."""
        load = load_of(topology_of(topology).programs(tuple(range(settings.peers))), self.wired)
        vectors = load.air if self.cell else max(*load.sent, *load.received)
        return vectors * settings.mb * 8 / self.rate_mbit

    def __str__(self) -> str:
        if not self.cell:
            late = f", {2 * self.delay_ms:g} ms from one to another" if self.delay_ms else ""
            return f"{self.rate_mbit:g} Mbit/s a station{late}"
        cables = " and ".join(f"station {one}" for one in sorted(self.wired)) or "nobody"
        return f"a cell of {self.rate_mbit:g} Mbit/s, {cables} on a cable"


def measure(settings: Settings, network: Network) -> Report:
    """Both sides in a lab of their own. Raises BenchError, LabError."""
    with network.lab(settings.peers) as lab:
        stations = [Station(lab.host(rank), lab.command(rank, [])) for rank in range(settings.peers)]
        return asyncio.run(compare(settings, stations))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.allreduce_lab", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[2])
    parser.add_argument("--mb", type=int, nargs="+", default=[10])
    parser.add_argument("--rate", type=float, nargs="+", default=[100.0], help="Mbit/s of every station, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of the frames that a station sends")
    parser.add_argument("--congestion", help="what the stations' system takes for all who do not choose, e.g. cubic")
    parser.add_argument("--cell", action="store_true", help="--rate is that of a WiFi cell, which all share")
    parser.add_argument("--wired", type=int, nargs="*", default=[], help="ranks that have a cable in it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--topology", help="of meshtrain's side; gloo's is a ring")
    parser.add_argument("--no-tls", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for every combination")
    options = parser.parse_args()
    if (reason := lab_unavailable()) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    try:
        base = Settings(
            options.peers[0], options.mb[0], options.codec, options.rounds, not options.no_tls, options.topology
        )
        for rate_mbit in options.rate:
            for peers in options.peers:
                for mb in options.mb:
                    network = Network(
                        rate_mbit, options.cell, frozenset(options.wired), options.loss, options.congestion
                    )
                    show(measure(replace(base, peers=peers, mb=mb), network), network, as_json=options.json)
    except (BenchError, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def show(report: Report, network: Network, *, as_json: bool) -> None:
    """Prints one combination; fractions are of the limit of each side's own topology."""
    settings = report.settings
    usual = collective_for(parse_codec(settings.codec), settings.topology).topology
    limits_s = network.limit_s(settings, str(usual)), network.limit_s(settings, "ring")
    fractions = {
        "limit_fraction_meshtrain": round(limits_s[0] / median(report.meshtrain.seconds), 3),
        "limit_fraction_gloo": round(limits_s[1] / median(report.gloo.seconds), 3),
    }
    if as_json:
        where = {"rate_mbit": network.rate_mbit, "cell": network.cell, "wired": sorted(network.wired)}
        where |= {"loss_percent": network.loss_percent, "congestion": network.congestion}
        print(json.dumps({**where, **report.as_json(), **fractions}), flush=True)
        return
    print(
        f"-- {network}; limits for fp32: {usual} {limits_s[0] * 1000:.0f} ms, gloo's ring {limits_s[1] * 1000:.0f} ms"
    )
    print(report.as_text())
    print("fraction of the limit: meshtrain {:.3f}, gloo {:.3f}\n".format(*fractions.values()), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.bench.allreduce_lab`: the comparison with gloo, one rank of each side per rate-limited station."""

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from statistics import median

from meshtraind.bench.allreduce import compare
from meshtraind.bench.report import Report
from meshtraind.bench.settings import BenchError, Settings, Station
from tests.lab.lab import Lab, LabError, lab_unavailable


def measure(settings: Settings, rate_mbit: float) -> Report:
    """Both sides in a lab of their own. Raises BenchError, LabError."""
    with Lab(settings.peers, rate_mbit) as lab:
        stations = [Station(lab.host(rank), lab.command(rank, [])) for rank in range(settings.peers)]
        return asyncio.run(compare(settings, stations))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.allreduce_lab", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[2])
    parser.add_argument("--mb", type=int, nargs="+", default=[10])
    parser.add_argument("--rate", type=float, nargs="+", default=[100.0], help="Mbit/s of every station, each way")
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
                    report = measure(replace(base, peers=peers, mb=mb), rate_mbit)
                    show(report, rate_mbit, as_json=options.json)
    except (BenchError, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def show(report: Report, rate_mbit: float, *, as_json: bool) -> None:
    """Prints one combination; fractions are of the limit 2(m-1)/m * N / R."""
    limit_s = report.settings.bus_bytes * 8e-6 / rate_mbit
    fractions = {
        "limit_fraction_meshtrain": round(limit_s / median(report.meshtrain.seconds), 3),
        "limit_fraction_gloo": round(limit_s / median(report.gloo.seconds), 3),
    }
    if as_json:
        print(json.dumps({"rate_mbit": rate_mbit, **report.as_json(), **fractions}), flush=True)
        return
    print(f"-- {rate_mbit:g} Mbit/s a station; limit {limit_s * 1000:.0f} ms for fp32")
    print(report.as_text())
    print("fraction of the limit: meshtrain {:.3f}, gloo {:.3f}\n".format(*fractions.values()), flush=True)


if __name__ == "__main__":
    sys.exit(main())

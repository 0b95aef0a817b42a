"""`python -m meshtraind.bench allreduce` and `codecs`: what `meshtrain bench` starts; `rounds`, for predictions."""

import argparse
import asyncio
import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from meshtraind.bench.allreduce import compare
from meshtraind.bench.codec_report import CodecReport
from meshtraind.bench.report import Report
from meshtraind.bench.settings import BenchError, Settings, loopback

if TYPE_CHECKING:
    from meshtraind.bench.round_work import RoundWorkReport

EXIT_FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    """Runs `meshtraind bench`, and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report: CodecReport | RoundWorkReport | Report
        if options.command == "codecs":
            report = _codecs(options)
        else:
            report = _rounds(options) if options.command == "rounds" else _allreduce(options)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    sys.stdout.write((json.dumps(report.as_json()) if options.json else report.as_text()) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshtraind.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    allreduce = commands.add_parser("allreduce")
    allreduce.add_argument("--peers", type=int, default=2)
    allreduce.add_argument("--mb", type=int, default=46)
    allreduce.add_argument("--codec", default="fp32")
    allreduce.add_argument("--topology")
    allreduce.add_argument("--rounds", type=int, default=10)
    allreduce.add_argument("--no-tls", action="store_true")
    codecs = commands.add_parser("codecs")
    codecs.add_argument("--values", default="11.7e6")
    codecs.add_argument("--codec", action="append")
    codecs.add_argument("--runs", type=int, default=5)
    codecs.add_argument("--no-rounds", action="store_true")  # for predictions, which have `rounds`
    rounds = commands.add_parser("rounds")
    rounds.add_argument("--values", default="1024,2097152")
    rounds.add_argument("--codec", action="append")
    rounds.add_argument("--runs", type=int, default=9)
    for command in (allreduce, codecs, rounds):
        command.add_argument("--json", action="store_true")
    return parser


def _counts(text: str) -> list[int]:
    """Reads lengths of vectors, with commas between them. Raises BenchError."""
    try:
        return [int(float(count)) for count in text.split(",")]
    except (ValueError, OverflowError):
        raise BenchError(f"--values {text}: give numbers with commas between them, as in 11.7e6,25e6") from None


def _allreduce(options: argparse.Namespace) -> Report:
    if find_spec("torch") is None:
        raise BenchError("the comparison with gloo needs torch: pip install 'meshtraind[torch]' from this source")
    settings = Settings(options.peers, options.mb, options.codec, options.rounds, not options.no_tls, options.topology)
    return asyncio.run(compare(settings, loopback(settings.peers)))


def _codecs(options: argparse.Namespace) -> CodecReport:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by numpy, which is imported only now
    from meshtraind.bench import codecs

    chosen, counts = options.codec or codecs.all_codecs(), _counts(options.values)
    return codecs.measure(chosen, counts, options.runs, _progress, whole_rounds=not options.no_rounds)


def _rounds(options: argparse.Namespace) -> "RoundWorkReport":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from meshtraind.bench import round_work

    return round_work.measure_rounds(options.codec or ["fp32"], _counts(options.values), options.runs, _progress)


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m meshtraind.bench allreduce`: what `meshtrain bench allreduce` starts."""

import argparse
import asyncio
import json
import sys
from importlib.util import find_spec

from meshtraind.bench.allreduce import compare
from meshtraind.bench.settings import BenchError, Settings, loopback

EXIT_FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshtraind.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    allreduce = commands.add_parser("allreduce")
    allreduce.add_argument("--peers", type=int, default=2)
    allreduce.add_argument("--mb", type=int, default=46)
    allreduce.add_argument("--codec", default="fp32")
    allreduce.add_argument("--rounds", type=int, default=10)
    allreduce.add_argument("--no-tls", action="store_true")
    allreduce.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if find_spec("torch") is None:
            raise BenchError("the comparison with gloo needs torch: pip install 'meshtraind[torch]' from this source")
        settings = Settings(options.peers, options.mb, options.codec, options.rounds, not options.no_tls)
        report = asyncio.run(compare(settings, loopback(settings.peers)))
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    sys.stdout.write((json.dumps(report.as_json()) if options.json else report.as_text()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`meshtrain bench`: what this machine, or a network, can do. The measuring is the daemon's; this starts it."""

import subprocess
import sys
from typing import Annotated

import typer

from meshtrain.cli import EXIT_INTERRUPTED
from meshtrain.cli.errors import CliError, reported
from meshtrain.cli.options import Json

MODULE = "meshtraind.bench"  # a process of its own: the command imports nothing of the daemon
STOP_TIMEOUT_S = 15.0

bench = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _commands() -> None:
    """Measure what the exchange of gradients costs here."""


@bench.command()
@reported
def allreduce(
    peers: Annotated[int, typer.Option(metavar="M", help="How many peer processes, all on this machine.")] = 2,
    mb: Annotated[int, typer.Option(metavar="N", help="Size of the vector of fp32 values, in 10^6 bytes.")] = 46,
    codec: Annotated[str, typer.Option(help="How values travel: fp32, fp16 or bf16. gloo's travel as fp32.")] = "fp32",
    rounds: Annotated[int, typer.Option(metavar="K", help="Timed rounds of each side, in turn.")] = 10,
    no_tls: Annotated[bool, typer.Option("--no-tls", help="Plain TCP, as gloo's; no daemon can do so.")] = False,
    as_json: Json = False,
) -> None:
    """Time the daemons' all-reduce beside torch's gloo, in one run.

    Both sides are processes on loopback and begin every round at a common instant. Look at the ratio: times change
    with whatever else this machine does. No daemon needs to run.
    """
    argv = [sys.executable, "-m", MODULE, "allreduce", "--peers", str(peers), "--mb", str(mb), "--codec", codec]
    argv += ["--rounds", str(rounds), *["--no-tls"] * no_tls, *["--json"] * as_json]
    sys.stdout.flush()
    with subprocess.Popen(argv) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has interrupted the benchmark too
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise CliError(f"the benchmark did not stop within {STOP_TIMEOUT_S:g} s and was killed") from None
            code = EXIT_INTERRUPTED
    raise typer.Exit(code)

"""`meshtrain bench`: what this machine, or a network, can do. The measuring is the daemon's; this starts it."""

import subprocess
import sys
from typing import Annotated, NoReturn

import typer

from meshtrain.cli.ui.errors import CliError, reported
from meshtrain.cli.ui.exits import EXIT_INTERRUPTED
from meshtrain.cli.ui.options import Json, examples

MODULE = "meshtraind.bench"  # a process of its own: the command imports nothing of the daemon
STOP_TIMEOUT_S = 15.0

bench = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _commands() -> None:
    """Measure what the exchange of gradients costs here."""


@bench.command(
    epilog=examples("meshtrain bench allreduce", "meshtrain bench allreduce --peers 4 --mb 100 --codec int8 --json")
)
@reported
def allreduce(
    peers: Annotated[int, typer.Option(metavar="M", help="How many peer processes, all on this machine.")] = 2,
    mb: Annotated[int, typer.Option(metavar="N", help="Size of the vector of fp32 values, in 10^6 bytes.")] = 46,
    codec: Annotated[str, typer.Option(help="How values travel; see `meshtrain codecs`. gloo's: as fp32.")] = "fp32",
    topology: Annotated[
        str | None, typer.Option(metavar="NAME[:RANKS]", help="Who sends to whom; see `meshtrain topology`.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="K", help="Timed rounds of each side, in turn.")] = 10,
    no_tls: Annotated[bool, typer.Option("--no-tls", help="Plain TCP, as gloo's; no daemon can do so.")] = False,
    as_json: Json = False,
) -> None:
    """Time the daemons' all-reduce beside torch's gloo, in one run.

    Both sides are processes on loopback and begin every round at a common instant. Look at the ratio: times change
    with whatever else this machine does. No daemon needs to run.
    """
    argv = ["allreduce", "--peers", str(peers), "--mb", str(mb), "--codec", codec, "--rounds", str(rounds)]
    _run([*argv, *(["--topology", topology] if topology else []), *["--no-tls"] * no_tls, *["--json"] * as_json])


@bench.command(
    epilog=examples("meshtrain bench codecs", "meshtrain bench codecs --codec int8 --codec topk:0.01 --values 25.6e6")
)
@reported
def codecs(
    values: Annotated[
        str, typer.Option(metavar="N[,N...]", help="How many fp32 values; ResNet-18 has 11.7e6, ResNet-50 25.6e6.")
    ] = "11.7e6",
    codec: Annotated[
        list[str] | None, typer.Option(metavar="CODEC", help="Only this one, as for --codec of submit; repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option(metavar="K", help="Timed runs of each; the fastest counts.")] = 5,
    as_json: Json = False,
) -> None:
    """Time every codec in one thread: speed, size, error, memory, and the link speed below which it pays.

    The values have heavy tails in layers of different scales, as gradients have. No daemon needs to run.
    """
    argv = ["codecs", "--values", values, "--runs", str(runs)]
    for text in codec or ():
        argv += ["--codec", text]
    _run([*argv, *["--json"] * as_json])


def _run(arguments: list[str]) -> NoReturn:
    """Runs the daemon's benchmark in a process of its own, and ends with its exit code."""
    sys.stdout.flush()
    with subprocess.Popen([sys.executable, "-m", MODULE, *arguments]) as process:
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

"""`meshtrain demo`: shows the demo while it runs, and what came of it."""

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.options import Json
from meshtrain.cli.ui.terminal import console, print_json, print_table, say
from meshtrain.following.shown_text import human_step
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings
from meshwire.text import printable

if TYPE_CHECKING:
    from rich.table import Table

    from meshtrain.demo.run import DemoResult, PeerResult
    from meshwire.messages.job import JobSummary
    from meshwire.sync_modes.mode import SyncSettings

CURVE_WIDTH = 60
BARS = "▁▂▃▄▅▆▇█"


@reported
def demo(
    peers: Annotated[int, typer.Option(help="How many daemons, each as one laptop.", min=1, max=8)] = 3,
    steps: Annotated[int, typer.Option(help="Optimizer steps; with local:H in whole periods.", min=1)] = 100,
    sync: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="How the peers keep in step: bsp, ssp:S, local:H, diloco:H .., as in `meshtrain submit`.",
        ),
    ] = "bsp",
    codec: Annotated[
        str | None, typer.Option(help="How gradients travel, fp32 by default; see `meshtrain codecs`.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train a small GPT on three local daemons and show it.

    Each daemon has its own data folder and knows nothing of the others: they are paired by code, find each other over
    mDNS, and train a character GPT of about a million parameters on the source of Python's standard library.
    """
    from meshtrain.demo.run import DemoError, DemoSettings, run_demo

    try:
        settings = sync_settings(sync)
        chosen = codec_of(settings, codec)
    except ValueError as error:
        raise BadCommandLine(str(error), "meshtrain demo --help, or meshtrain codecs") from None
    if settings.signs or chosen.momentum:
        asked = "--sync demo" if settings.signs else f"--codec {chosen}"
        raise BadCommandLine(
            f"{asked} is for plain SGD, and the demo trains with AdamW", "meshtrain submit with a script of your own"
        )
    wanted = DemoSettings(peers=peers, steps=steps, sync=sync, codec=str(chosen), seed=seed)
    for name in ("SIGTERM", "SIGHUP"):  # e.g. the terminal's window was closed; as with ctrl-C, nothing is left behind
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    live = _Live(wanted.rounds, enabled=console(stderr=True).is_terminal)
    try:
        with live:
            result = run_demo(wanted, say, live.show)
    except DemoError as error:
        raise CliError(str(error)) from error
    if as_json:
        print_json(result.as_json())
    else:
        _print_result(result, settings)
    if not result.replicas_equal:
        raise CliError("the replicas are not bit-equal")


class _Live:
    """A table that is drawn anew on a terminal, or a line now and then elsewhere."""

    def __init__(self, rounds: int, *, enabled: bool) -> None:
        from rich.live import Live

        self._rounds = rounds
        self._live = Live(console=console(stderr=True), transient=True) if enabled else None
        self._started = False
        self._told_round = 0

    def __enter__(self) -> "_Live":
        return self

    def __exit__(self, *_: object) -> None:
        if self._started and self._live is not None:
            self._live.stop()

    def show(self, summary: "JobSummary") -> None:
        """Draws the job's state."""
        if self._live is not None:
            if not self._started:
                self._started = True
                self._live.start()
            self._live.update(_table(summary, self._rounds))
        elif summary.rounds >= self._told_round + max(1, self._rounds // 10):
            self._told_round = summary.rounds
            losses = [dict(report.metrics.values).get("loss") for report in summary.ranks]
            known = [loss for loss in losses if loss is not None]
            loss = f", loss {sum(known) / len(known):.3f}" if known else ""
            say(f"round {min(summary.rounds, self._rounds)} of {self._rounds}{loss}")


def _table(summary: "JobSummary", asked: int) -> "Table":
    from rich.table import Table

    equal = {None: "not compared yet", True: "bit-equal", False: "NOT EQUAL"}[summary.replicas_equal]
    rounds = min(summary.rounds, asked)  # with a bound some more are under way
    title = f"{summary.state}: round {rounds} of {asked}, replicas {equal} ({summary.hashes_compared} checks)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("PEER", "STATE", "STEP", "LOSS", "STEP TIME", "OVERLAP", "SENT"):
        table.add_column(column, justify="left" if column in ("PEER", "STATE") else "right")
    for report in summary.ranks:
        metrics = report.metrics
        loss = dict(metrics.values).get("loss")
        overlap = 1 - metrics.exposed_s / metrics.exchange_s if metrics.exchange_s else None
        table.add_row(
            printable(summary.members[report.rank].name),
            report.state,
            str(metrics.step),
            f"{loss:.3f}" if loss is not None else "-",
            human_step(metrics.step_s) if metrics.step_s else "-",
            f"{max(0.0, overlap):.0%}" if overlap is not None else "-",
            f"{metrics.sent_bytes / 1e6:.1f} MB",
        )
    return table


def _print_result(result: "DemoResult", sync: "SyncSettings") -> None:
    out = console()
    dense = result.bytes_dense_fp32
    share = f", {result.bytes_sent / dense:.0%} of a dense fp32 ring's payload" if dense else ""
    equal = "yes" if result.replicas_equal else "NO"
    out.print()
    out.print(f"loss    {_curve(result.losses)}")
    out.print(f"        {result.loss_first:.3f} -> {result.loss_last:.3f} nats per character")
    out.print(f"        (knowing only how frequent each character is: {result.unigram_entropy:.3f})")
    out.print(f"speed   {result.samples / result.seconds:.0f} samples/s on {result.peers} peers, start included")
    out.print(f"sent    {result.bytes_sent / 1e6:.1f} MB{share}; {result.overlap:.0%} of the exchange overlapped")
    out.print(f"equal   {equal}: the replicas' hashes were compared {result.hashes_compared} times")
    out.print()
    unit = "PERIOD" if sync.period else "STEP"  # what a daemon counts
    columns = ("PEER", f"{unit}S", f"{unit} TIME", "NULLS", *(["MEAN AGE"] if sync.staleness else []))
    print_table(columns, [_peer_row(peer, sync.staleness) for peer in result.by_peer])
    out.print()
    out.print("The same on two laptops in one network:")
    out.print("  both:   meshtrain up")
    out.print("  first:  meshtrain pair                 (shows a code)")
    out.print("  second: meshtrain pair 483-917         (type the code that the first one shows)")
    out.print("  either: meshtrain init --example gpt && meshtrain submit train.py")


def _peer_row(peer: "PeerResult", staleness: int) -> tuple[str, ...]:
    age = (f"{peer.age:.2f}",) if staleness else ()
    return printable(peer.name), str(peer.steps), human_step(peer.step_s), str(peer.nulls), *age


def _curve(losses: tuple[float, ...]) -> str:
    """The loss over all steps in one line of blocks."""
    width = min(CURVE_WIDTH, len(losses))
    cells = []
    for cell in range(width):
        part = losses[cell * len(losses) // width : (cell + 1) * len(losses) // width]
        cells.append(sum(part) / len(part))
    low, high = min(cells), max(cells)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((cell - low) * scale)] for cell in cells)

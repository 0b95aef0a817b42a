"""`plan`: who should train a script together, and how, on the mesh that is there; `whatif`: is the network the
bottleneck for its model?"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.planning.codec_prices import processor_prices
from meshtrain.cli.planning.job_choice import best_together
from meshtrain.cli.planning.linked_mesh import assumptions, find_mesh
from meshtrain.cli.planning.mesh_verdict import COLUMNS as PLAN_COLUMNS
from meshtrain.cli.planning.mesh_verdict import batch_notes, mesh_document, mesh_rows, play, reason, submit_line
from meshtrain.cli.planning.other_programs import OtherPrograms
from meshtrain.cli.planning.verdict import COLUMNS, document, introduction, rows, verdict
from meshtrain.cli.submission.measuring import MEASURE_TIMEOUT_S, NotMeasured, trace
from meshtrain.cli.submission.shipping import program_of
from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.options import AsModule, DataDir, Json
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import print_json, print_table, say
from meshtrain.packing.imports import uses_process_groups
from meshtrain.packing.shipped_folders import DATA_FOLDER
from meshtrain.packing.tree import scan
from meshwire import limits
from meshwire.planning.choose import NOTHING
from meshwire.planning.mesh_plan import MeshPlan
from meshwire.planning.network import Network, cables, cell
from meshwire.planning.price import Pricing
from meshwire.planning.quality import EVIDENCE, Quality, recommendable
from meshwire.planning.step_trace import TracedScript
from meshwire.planning.what_if import Cell, WhatIf
from meshwire.sync_modes.rate_rule import RULE_OF
from meshwire.text import printable

CELL_RTT_MS = 5.0
WIRED_RTT_MS = 0.5
MBIT_MIN, MBIT_MAX = 0.1, 1e6
RTT_MS_MAX = 10_000.0


@reported
def plan(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script, in the working directory.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.")] = None,
    quality: Annotated[
        Quality,
        typer.Option(
            "--quality",
            help="exact: the exact mean in every step. safe: no loss beyond the noise of seeds in our measurements. "
            "fast: what comes to a loss soonest, for which a little of each sample may be given up.",
        ),
    ] = Quality.SAFE,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="What mt.data_dir() is; ./data if there is one.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure all links again, also those that were within ten minutes.")
    ] = False,
    module: AsModule = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Choose who should train SCRIPT together, and how, on the laptops that are linked now.

    Measures the link to each of them (two seconds each at most), runs SCRIPT here for a few steps (about ten seconds),
    and plays a step with every codec and mode whose loss we have measured, over every topology, on every group of these
    laptops. Shows the best of the wished quality for each group beside one laptop alone, what it chooses and why, and
    the line to run; train alone where that is faster. Not while a job runs, here or there.

    The others are taken to be so much faster or slower than this one as a short calculation says, and links between
    them to be as fast as theirs with this one. Of more than four others, groups are of the best links. In a WiFi cell
    rounds may go by those of them that have a cable; their ranks are then the order behind --on.
    """
    root = Path.cwd()
    _check_choices(root, script, as_module=module)
    typed_data = None if data is None else str(data)
    if data is None and (root / DATA_FOLDER).is_dir():
        data = Path(DATA_FOLDER)
    with Stages() as stages:
        there = find_mesh(data_dir, measure, stages)
        programs = OtherPrograms()
        traced = _traced(root, script, args or (), data, stages, as_module=module)
        busy = programs.note()
        prices = processor_prices([tried.codec for tried in EVIDENCE if recommendable(*tried)], data_dir, stages)
        pricing = Pricing(traced.measurement.manifest, prices.codecs)
        links, hubs = ([link for _, link in each] for each in (there.others, there.hubs))
        size = traced.measurement.size
        suiting = NOTHING.suiting(size.optimizer_of_torch)
        mesh = MeshPlan(pricing, traced.step, links, suiting, prices.work, hubs=hubs)
        found = play(mesh, there, quality, mesh.groups(), stages)
        fast = mesh.best(mesh.everybody if found.choice is None else found.choice.others, Quality.FAST)
        larger, rule = mesh.larger_batch(best_together(found)), RULE_OF.get(size.optimizer_of_torch or "")
        found = replace(found, fast=fast, larger=larger, rule=rule)
    told, line = reason(found), submit_line(found, script, args or (), typed_data, as_module=module)
    if json:
        print_json(mesh_document(found, told, line))
        return
    say(introduction(traced.step, pricing))
    for note in (
        *([f"note: {busy}"] if busy is not None else []),
        *there.notes,
        *assumptions([peer for peer, _ in there.others], traced.step.device),
    ):
        say(note)
    print_table(PLAN_COLUMNS, mesh_rows(found), "SETTINGS")
    say(told)
    for note in batch_notes(found):
        say(note)
    say(f"Run it: {printable(line)}")
    say("Predicted, not measured: compare it with meshtrain top, once the job runs.")


@reported
def whatif(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script, in the working directory.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own, behind --.")] = None,
    mbit: Annotated[
        str,
        typer.Option(
            "--mbit",
            metavar="LIST",
            help="Rates: what one laptop alone gets through to the access point, in Mbit/s; all laptops share it.",
        ),
    ] = "10,100,1000",
    peers: Annotated[
        str, typer.Option("--peers", metavar="LIST", help="How many laptops, all like this one.")
    ] = "2,4,8",
    rtt_ms: Annotated[
        float | None,
        typer.Option(
            "--rtt-ms",
            metavar="F",
            help=f"Round trip between two laptops: {CELL_RTT_MS:g}, with --wired {WIRED_RTT_MS:g}.",
        ),
    ] = None,
    wired: Annotated[
        bool, typer.Option("--wired", help="On cables: each laptop sends and receives at the rate, whatever others do.")
    ] = False,
    quality: Annotated[
        Quality,
        typer.Option(
            "--quality",
            help="exact: the exact mean in every step. safe: no loss beyond the noise of seeds in our measurements. "
            "fast: what comes to a loss soonest, for which a little of each sample may be given up.",
        ),
    ] = Quality.SAFE,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="What mt.data_dir() is; ./data if there is one.")
    ] = None,
    module: AsModule = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Predict how fast SCRIPT would train on several laptops like this one, by network.

    Runs it here, alone, for a few steps (about ten seconds), ends it, and plays a step over networks of the rates
    given, with every codec and mode whose loss we have measured, over every topology. Shows for each the best settings
    of the wished quality, their samples a second, how much sooner than one laptop they are at a loss, what a step waits
    for, and what submit does with --no-plan. Where it says train alone, the figures are those of the best that they
    could do together. No daemon needs to run.
    """
    rates = [rate * 1e6 / 8 for rate in _numbers("--mbit", mbit, MBIT_MIN, MBIT_MAX)]
    counts = [int(count) for count in _numbers("--peers", peers, 2, limits.MEMBERS_MAX, whole=True)]
    if rtt_ms is not None and not 0 <= rtt_ms <= RTT_MS_MAX:
        raise BadCommandLine(f"--rtt-ms {rtt_ms:g}: use a number from 0 to {RTT_MS_MAX:g}")
    rtt_s = (rtt_ms if rtt_ms is not None else WIRED_RTT_MS if wired else CELL_RTT_MS) / 1000
    root = Path.cwd()
    _check_choices(root, script, as_module=module)
    if data is None and (root / DATA_FOLDER).is_dir():
        data = Path(DATA_FOLDER)

    def network(count: int, bytes_s: float) -> Network:
        return cables(count, bytes_s, rtt_s) if wired else cell(count, bytes_s, rtt_s)

    others = OtherPrograms()
    with Stages() as stages:
        traced = _traced(root, script, args or (), data, stages, as_module=module)
        busy = others.note()
        prices = processor_prices([tried.codec for tried in EVIDENCE if recommendable(*tried)], data_dir, stages)
        pricing = Pricing(traced.measurement.manifest, prices.codecs)
        work = prices.work
        analysis = WhatIf(
            *(pricing, traced.step, lambda count, bytes_s: replace(network(count, bytes_s), work=work), quality),
            NOTHING.suiting(traced.measurement.size.optimizer_of_torch),
        )
        cells: list[Cell] = []
        for found in analysis.cells(rates, counts):
            cells.append(found)
            stages.show("playing rounds over these networks")
        told = verdict(analysis, cells)
    if json:
        print_json(document(analysis, traced.step, cells, told))
        return
    say(introduction(traced.step, pricing))
    if busy is not None:
        say(f"note: {busy}")
    print_table(COLUMNS, rows(cells), "BEST")
    say(told)
    say("Predicted, not measured: WiFi that others use, and laptops that are not like this one, are slower.")


def _numbers(option: str, typed: str, low: float, high: float, *, whole: bool = False) -> list[float]:
    """A list with commas. Raises BadCommandLine."""
    try:
        numbers = [float(int(each)) if whole else float(each) for each in typed.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(low <= number <= high for number in numbers):
        kind = "whole numbers" if whole else "numbers"
        raise BadCommandLine(f"{option} {typed}: use {kind} from {low:g} to {high:g} with commas between, as in 10,100")
    return numbers


def _traced(
    root: Path, script: str, args: Sequence[str], data: Path | None, stages: Stages, *, as_module: bool
) -> TracedScript:
    """How the script steps. Raises CliError."""
    module = script if as_module else None
    relative = program_of(root, script, as_module=as_module)
    try:
        return trace(root, relative, args, {}, data, stages, MEASURE_TIMEOUT_S, sys.executable, module)
    except NotMeasured as problem:
        raise problem.of_steps(relative, module) from None


def _check_choices(root: Path, script: str, *, as_module: bool) -> None:
    """Raises CliError where there is no such script, or a job with it has nothing to choose."""
    relative = program_of(root, script, as_module=as_module)
    if uses_process_groups(scan(root).manifest, root, relative, as_module=as_module):
        raise CliError(
            f"{relative} uses torch.distributed: its sums are exact, all laptops are in step, and there is nothing to "
            "choose. Plans and predictions are for scripts with mt.prepare",
            f"meshtrain submit {'-m ' * as_module}{script}",
        )

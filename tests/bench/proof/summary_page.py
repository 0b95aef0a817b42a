"""The page for somebody who has ten seconds: what pays, and what does not, from what is measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from meshwire.planning.mesh_plan import PAYS_FROM
from tests.bench.journal import Journal
from tests.bench.proof import goodput, slow_laptop, stragglers
from tests.bench.proof.curves import noise
from tests.bench.proof.goals_page import GOODPUT_GOAL, RATE_GOAL, SLOW_GOAL, kept_parts
from tests.bench.proof.modes import BASE, SETS
from tests.bench.proof.modes_page import ways
from tests.bench.proof.networks import grid, grid_page, predicted_page, target, target_page
from tests.bench.proof.networks.paced_models import DDP_PLANNED, HOOKS, QUALITIES
from tests.bench.proof.networks.wifi import MEASURED, MODELS, measured_name, model_of, planned_name
from tests.bench.proof.networks.wifi_page import SHOWN_MEMBERS, quality_figure

PAGE = "proof.md"
Claim = tuple[bool, str]
"""Whether it pays, and what."""


def page(journal: Journal) -> str:
    """In Markdown."""
    claims = [
        *_wifi(journal),
        *_measured(journal),
        *_target(journal),
        *_grid(journal),
        *_modes(journal),
        *_goals(journal),
    ]
    claims += [*_stragglers(journal), *_predicted(journal)]
    lines = ["# Does it pay?", "", "```", "python -m tests.bench.proof --page", "```", ""]
    if not claims:
        return "\n".join([*lines, "Nothing is measured yet.", ""])
    for pays, head in ((True, "## It does"), (False, "## It does not")):
        lines += [head, "", *(f"- {text}" for good, text in claims if good is pays), ""]
    lines += [
        "How, with every figure: [modes](modes.md), [kills and a slow laptop](goodput.md), [WiFi](wifi.md),",
        "[time to a target](target.md), [others' grid](grid.md), [eight unequal peers](eight_peers.md),",
        "[predictions](predicted.md).",
    ]
    return "\n".join(lines) + "\n"


def _wifi(journal: Journal) -> Iterator[Claim]:
    """From which rate four laptops are faster than one, by what is typed."""
    for way in (*DDP_PLANNED, "the defaults", *QUALITIES):
        found = []
        for model in MODELS:
            rates = journal.figures(planned_name(model), "mbit")
            values = journal.figures(planned_name(model), f"{way}, m={SHOWN_MEMBERS}")
            if rates and values:
                found.append((model, *_from(rates, values)))
        paying = [(model, rate, best) for model, rate, best in found if rate is not None]
        never = [model.about for model, rate, _ in found if rate is None]
        what = (
            f"{SHOWN_MEMBERS} laptops in one WiFi cell, `{way}`"
            if way in QUALITIES
            else (f"{SHOWN_MEMBERS} laptops in one WiFi cell, {way}")
        )
        if paying:
            each = "; ".join(
                f"{model.about} from {rate:g} Mbit/s, up to {best:.1f} times" for model, rate, best in paying
            )
            yield True, f"{what}: faster than one alone: {each} (planned)."
        if never:
            yield False, f"{what}: not faster than one alone at any rate planned: {'; '.join(never)}."
        below = [(model, rate) for model, rate, _ in paying if rate > 20]
        if below:
            each = "; ".join(f"{model.about} below {rate:g} Mbit/s" for model, rate in below)
            yield False, f"{what}: one laptop alone is as fast, or faster: {each}."


def _measured(journal: Journal) -> Iterator[Claim]:
    """How many times one laptop several are in the lab, with what is chosen and with DDP's hooks."""
    for way in (*HOOKS, *QUALITIES):
        times = {}
        for name, net, members, _ in MEASURED:
            for entry in journal.of(measured_name(name, net, members))[-1:]:
                figures = entry.figures
                step_s = median(figures[way]) if way in HOOKS else quality_figure(figures, f"{way}: ")[1]
                times[measured_name(name, net, members)] = members * median(figures["alone"]) / step_s
        called = way if way in HOOKS else f"`{way}`"
        for pays in (True, False):
            each = [f"{value:.2f} {name}" for name, value in times.items() if (value >= PAYS_FROM) is pays]
            if each:
                yield pays, f"Times one laptop alone, measured, {called}: {'; '.join(each)}."


def _from(rates: Sequence[float], values: Sequence[float]) -> tuple[float | None, float]:
    """The lowest rate from which it pays, and the best that it comes to."""
    paying = [rate for rate, value in zip(rates, values, strict=True) if value >= PAYS_FROM]
    return min(paying, default=None), max(values)


def _target(journal: Journal) -> Iterator[Claim]:
    """How much sooner four laptops in the cell of the goal are at a loss than one."""
    for trained in target.TRAINED:
        net = target.NETS[0]
        found = target_page.reached(journal, trained, net)
        alone = found.get(target.ALONE)
        for quality in QUALITIES if alone is not None and alone.time_s is not None else ():
            one = found[quality]
            if not one.losses or alone is None or alone.time_s is None:
                continue
            about = f"Time to a target loss, {model_of(trained.paced).about}, four in {net}, `{quality}`"
            goal = f"(goal {target_page.ALONE_GOAL:g})"
            if one.time_s is None:
                yield False, f"{about}: not reached in the samples that were trained {goal}."
            else:
                times = alone.time_s / one.time_s
                yield times >= target_page.ALONE_GOAL, f"{about}: {times:.2f} times one laptop {goal}."


def _grid(journal: Journal) -> Iterator[Claim]:
    """Which ways use the compute at the slowest rate, and at what loss."""
    both, only = grid_page.reaching(journal)
    where = f"{grid.ABOUT} at {grid_page.SLOWEST:g} Mbit/s: {grid.UTILISED:.2f} of the compute"
    if both:
        yield True, f"{where} at a loss within {grid.LOSS_PART:.1%} of synchronous AdamW's: {', '.join(both)}."
    if only:
        yield False, f"{where}, but not at a loss within {grid.LOSS_PART:.1%}: {', '.join(only)}."


def _stragglers(journal: Journal) -> Iterator[Claim]:
    """Who is sooner at an accuracy than the fastest peer alone."""
    alone = journal.figures(stragglers.case_name(stragglers.ALONE), "reached_s")
    if not alone:
        return
    times = {}
    for way in stragglers.WAYS[1:]:
        if reached := journal.figures(stragglers.case_name(way), "reached_s"):
            times[way.name] = median(alone) / median(reached)
    for pays in (True, False):
        each = [f"{name} {value:.2f}" for name, value in times.items() if (value >= PAYS_FROM) is pays]
        if each:
            yield pays, f"Eight unequal peers, times as soon at the accuracy as the fastest alone: {', '.join(each)}."


def _predicted(journal: Journal) -> Iterator[Claim]:
    """How far what `plan` says can be relied on."""
    found = [cell for cell in predicted_page.cells(journal) if not cell.shows_the_machine]
    for what, value, goal in predicted_page.judged(found) if found else ():
        yield value <= goal, f"Predictions, {len(found)} jobs in the lab: {what}: {value:.1%} (goal {goal:.0%})."


def _modes(journal: Journal) -> Iterator[Claim]:
    """What each mode costs at equal samples."""
    for one in SETS:
        found = ways(journal, one)
        base = found.get(BASE)
        if base is None:
            continue
        behind = {mode: mean(way.losses) - mean(base.losses) for mode, way in found.items() if mode != BASE}
        losing = {mode: nats for mode, nats in behind.items() if nats > (noise(base.losses) or 0.0)}
        level = [mode for mode in behind if mode not in losing]
        name = one.about.partition(":")[0]
        if level:
            each = ", ".join(f"`{mode}`" for mode in level)
            yield True, f"At equal samples, {name}: {each} are within the seeds' noise of `bsp`."
        if losing:
            each = ", ".join(f"`{mode}` {nats:+.2f}" for mode, nats in sorted(losing.items(), key=lambda item: item[1]))
            yield False, f"At equal samples, {name}: nats behind `bsp`: {each}."


def _goals(journal: Journal) -> Iterator[Claim]:
    for kills in (each for rounds in goodput.EPOCH_ROUNDS for each in goodput.of_epochs(rounds)[1:]):
        if parts := kept_parts(journal, kills):
            text = f"{kills.name[0].upper()}{kills.name[1:]}, among four"
            part = median(parts)
            yield part >= GOODPUT_GOAL, f"{text}: {part:.2f} of the samples are left (goal {GOODPUT_GOAL:g})."
    for case, figure, least, text in (
        (
            goodput.REJOIN,
            "rate",
            RATE_GOAL,
            "While one of four rejoins with 46 MB, the others keep {:.2f} of their speed",
        ),
        (slow_laptop.NAME, "of the sum", SLOW_GOAL, "One of four 3x slower: {:.2f} of the sum of the speeds"),
    ):
        if values := journal.figures(case, figure):
            yield median(values) >= least, f"{text.format(median(values))} (goal {least:g})."


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page; returns where it is."""
    (folder / PAGE).write_text(page(journal), encoding="utf-8")
    return [folder / PAGE]

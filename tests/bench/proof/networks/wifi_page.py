"""The page of training time against WiFi bandwidth, and its pictures, from what is measured and planned."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from tests.bench.journal import Journal
from tests.bench.proof.networks.paced_models import DDP_PLANNED, HOOKS, QUALITIES, Model
from tests.bench.proof.networks.wifi import (
    EXPECTED,
    MEASURED,
    MEMBERS,
    MODELS,
    measured_name,
    model_of,
    planned_name,
)
from tests.bench.proof.plots import Panel, panels_svg

PAGE, PICTURE = "wifi.md", "wifi.svg"
SHOWN_MEMBERS = max(MEMBERS)
FP16_GOAL, POWERSGD_GOAL = 10.0, 1.3
IN_THE_WAY = (
    "**What stands in the way.** `safe` may choose nothing below a sixteenth of fp32's bytes, an eighth of fp16's:",
    "where the link binds it cannot be ten times the fp16 hook, and PowerSGD, which sends a seventieth of ResNet-18,",
    "is faster. It is not safe: on the demo's GPT it ends 0.07 nats behind ([codecs.md](codecs.md)). In",
    "[target.md](target.md) its loss stands beside those of `fast`. `fast` is limited by computing. A learner's",
    "profile over two periods of ResNet-18 on cables of 50 Mbit/s: of 579 ms a step 478 are the sleep that is stated,",
    "36 waiting for the daemon, which encodes and decodes 11.7 M values on the two cores that four laptops share",
    "here, 18 the optimizer's step, and 25 sums and copies of the period's weights.",
)
WAYS = (*DDP_PLANNED, "the defaults", *QUALITIES)


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    yield from ("# Training time against WiFi bandwidth", "", "```")
    yield "python -m tests.bench.proof wifi-planned wifi   # on a machine that does nothing else"
    yield from ("python -m tests.bench.proof --page", "```", "")
    yield "Laptops in one WiFi cell: what crosses the air, up and down together, is the rate. Parameters have the"
    yield "shapes of the real models, gradients are noise, and computing is a stated time a step:"
    yield "; ".join(f"{model.about}, {1000 * model.step_s:g} ms" for model in MODELS) + "."
    yield "*of one*: samples a second of all, in those of one laptop alone. As planned, those of `fast`, and of DDP"
    yield "with its PowerSGD hook, count what a sample is worth when a loss is to be reached"
    yield "([grid.md](grid.md#loss-at-equal-tokens)); what was measured is speed in samples alone."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "", "## As planned", "")
    yield f"![Speed by bandwidth, {SHOWN_MEMBERS} laptops]({PICTURE})"
    yield from (
        "",
        "DDP is planned with the same bytes over the same ring, and processors that take no time for it.",
        "",
    )
    for model in MODELS:
        if figures := _planned(journal, model):
            yield from _planned_table(model, figures)
    yield from ("## Measured in the lab", "")
    yield "Seconds a step, median of the turns; four learners and their daemons share two cores, which codecs and DDP's"
    yield "PowerSGD pay for. *alone*: DDP without any exchange. `safe` and `fast`: what is chosen at either quality,"
    yield "also where one laptop alone is faster."
    yield ""
    heads = ("model, network", "alone", *HOOKS, *(f"{quality} (planned)" for quality in QUALITIES), "of one: fast")
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for name, net, members, _ in MEASURED:
        entries = journal.of(measured_name(name, net, members))
        if entries:
            yield _measured_row(name, net.holds(members), members, entries[-1].figures)
    yield from ("", *_verdicts(journal), "", *IN_THE_WAY)


def _planned(journal: Journal, model: Model) -> Mapping[str, list[float]]:
    entries = journal.of(planned_name(model))
    return entries[-1].figures if entries else {}


def _planned_table(model: Model, figures: Mapping[str, list[float]]) -> Iterator[str]:
    rates = figures["mbit"]
    yield f"### {model.about}, a step of {1000 * model.step_s:g} ms: speed of one"
    yield ""
    for members in MEMBERS[1:]:
        yield f"| {members} laptops, Mbit/s | {' | '.join(f'{rate:g}' for rate in rates)} |"
        yield f"|{'---|' * (len(rates) + 1)}"
        for way in WAYS:
            values = figures.get(f"{way}, m={members}", [])
            yield f"| {way} | {' | '.join(_times(value) for value in values)} |"
        for quality in QUALITIES:
            choices = [_choice(figures, f"{quality}, m={members} at {rate:g}: ") for rate in rates]
            yield f"| chosen, {quality} | {' | '.join(choices)} |"
        yield ""


def _choice(figures: Mapping[str, list[float]], begin: str) -> str:
    found = next((name.removeprefix(begin) for name in figures if name.startswith(begin)), "")
    if not found or found == "train alone":
        return found
    sync, _, codec = found.partition(" ")
    return f"`{sync}`" if codec in ("fp32", "twobit") or codec.startswith("topk:0.015625") else f"`{sync} {codec}`"


def _times(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _measured_row(name: str, where: str, members: int, figures: Mapping[str, list[float]]) -> str:
    cells = [f"{model_of(name).about}, {where}", seconds(median(figures["alone"]))]
    cells += [seconds(median(figures[hook])) for hook in HOOKS]
    fast_s = 0.0
    for quality in QUALITIES:
        key, fast_s = quality_figure(figures, f"{quality}: ")
        planned_s = figures[f"{quality}, planned"][0]
        cells.append(f"{_choice({key: []}, f'{quality}: ')} {seconds(fast_s)} ({seconds(planned_s)})")
    cells.append(f"{members * median(figures['alone']) / fast_s:.2f}")
    return f"| {' | '.join(cells)} |"


def quality_figure(figures: Mapping[str, list[float]], begin: str) -> tuple[str, float]:
    """The figure whose name begins so, and its median."""
    key = next(name for name in figures if name.startswith(begin))
    return key, median(figures[key])


def seconds(value: float) -> str:
    """For people: in ms below one."""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _verdicts(journal: Journal) -> Iterator[str]:
    """Of the goals for four peers: how many times DDP with its hooks each quality is."""
    fp16, power = HOOKS
    yield f"Goals of `safe`: at least {FP16_GOAL:g} times {fp16}, {POWERSGD_GOAL:g} times"
    yield f"{power}. Where it would rather train alone, one laptop's speed is in brackets."
    yield ""
    for name, net, members, _ in MEASURED:
        entries = journal.of(measured_name(name, net, members))
        if not entries or members != SHOWN_MEMBERS or name == "mlp":
            continue
        figures = entries[-1].figures
        parts = []
        for quality in QUALITIES:
            own_s = quality_figure(figures, f"{quality}: ")[1]
            alone = members * median(figures["alone"])  # seconds for as many samples
            by_fp16, by_power = median(figures[fp16]) / own_s, median(figures[power]) / own_s
            met = by_fp16 >= FP16_GOAL and by_power >= POWERSGD_GOAL
            rather = f" [alone {median(figures[fp16]) / alone:.1f} and {median(figures[power]) / alone:.2f}]"
            parts.append(
                f"`{quality}` {by_fp16:.1f} and {by_power:.2f}{rather if alone < own_s else ''}"
                f"{'' if quality != 'safe' else ': met' if met else ': **not met**'}"
            )
        yield f"- {model_of(name).about}, {net}: {'; '.join(parts)}"


def picture(journal: Journal) -> str:
    """Speed of one by rate, a panel for each model."""
    panels = []
    for model in MODELS:
        figures = _planned(journal, model)
        curves = {}
        for way in WAYS if figures else ():
            values = figures[f"{way}, m={SHOWN_MEMBERS}"]
            curves[str(way)] = list(zip(figures["mbit"], values, strict=True))
        if figures:
            curves["one laptop alone"] = [(rate, 1.0) for rate in figures["mbit"]]
        panels.append(Panel(model.about, "Mbit/s in the cell", curves, log=True))
    title = f"Speed of {SHOWN_MEMBERS} laptops in one WiFi cell, in that of one alone, as planned"
    return panels_svg(title, panels, log_up=True)


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page and its picture; returns where they are."""
    texts = {PAGE: page(journal), PICTURE: picture(journal)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

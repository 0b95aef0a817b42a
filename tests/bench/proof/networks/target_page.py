"""The page of time to a target loss, and its picture: losses by samples times seconds a step, each as measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from tests.bench.journal import Entry, Journal
from tests.bench.proof.curves import loss_at, mean_and_seeds, mean_curve, noise, steps_to
from tests.bench.proof.networks import wifi
from tests.bench.proof.networks.paced_models import HOOKS, QUALITIES, Net, text_of
from tests.bench.proof.networks.target import (
    ALONE,
    EVERY,
    EXACT,
    EXPECTED,
    EXPECTED_CODECS,
    EXPECTED_LONGER,
    LONGER,
    LONGER_WAYS,
    MEMBERS,
    NETS,
    SAFE_WAYS,
    TRAINED,
    Trained,
    case_name,
    longer_name,
    safe_name,
)
from tests.bench.proof.networks.wifi_page import FP16_GOAL, POWERSGD_GOAL, quality_figure, seconds
from tests.bench.proof.plots import Curve, Panel, panels_svg

PAGE, PICTURE = "target.md", "target.svg"
IN_THE_WAY = (
    "Of `safe` the bytes: a sixteenth of fp32's at the least, so that a step takes 2 s in the cell, of which 0.5 s "
    "are computing (wifi.md). Of `fast` its lag: a period of 8 steps, and one more until its mean is there. "
    "ResNet-18 has made up for it after 256 steps; the GPT, here with SGD, has not after 192, and one laptop alone "
    "is ahead of it: so scripts with SGD are no longer given what overlaps. And of any exchange the batch: of four "
    "laptops it is four times as large, at a rate that stays, so a step is worth less than four of one laptop's. "
    "Three times as soon as one is most of what there is (above)."
)
TARGET_PART = 0.75  # of the samples, after which the loss of DDP's fp16 hook, exact but for rounding, is the target
ALONE_GOAL = 3.0
FP16, POWERSGD = HOOKS


@dataclass(frozen=True)
class Reached:
    """What a way came to on one network.

    Attributes:
        settings: in which it trained; of DDP its name.
        step_s: as measured in the lab.
        steps: of a member until the target; None: not there, or not trained.
        losses: of the seeds, at the end.
    """

    name: str
    settings: str
    step_s: float
    steps: float | None
    losses: tuple[float, ...]

    @property
    def time_s(self) -> float | None:
        """Until the target."""
        return None if self.steps is None else self.steps * self.step_s


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    yield from ("# Time to a target loss", "", "```")
    yield "python -m tests.bench.proof target longer   # losses; other work does not matter"
    yield "python -m tests.bench.proof safe-resnet safe-gpt safe-resnet-periods safe-gpt-periods   # the same"
    yield "python -m tests.bench.proof wifi   # seconds a step, on a machine that does nothing else"
    yield from ("python -m tests.bench.proof --page", "```", "")
    yield "**A product**: losses by samples are of real learners that compute the real model on loopback, three seeds;"
    yield "seconds a step are of the same model paced to 500 ms in the lab ([wifi.md](wifi.md)). Nobody waited that"
    yield "long: two cores cannot compute four laptops in time. *alone* trains with batches of one laptop, four times"
    yield "as many steps for as many samples, at the same rate; its step takes what DDP's takes there without any"
    yield f"exchange. *target*: the loss that DDP with its fp16 hook has after {TARGET_PART:.0%} of the samples."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "", f"![Loss by time]({PICTURE})", "")
    for trained in TRAINED:
        yield from _model(journal, trained)
    yield from _longer(journal)
    yield from ("## What is safe", "")
    yield f"{MEMBERS} learners as above; every codec that is within the noise on the small models of"
    yield "[codecs.md](codecs.md), in step, and periods that may be."
    yield "What is not within it here, too, is not chosen as safe. *noise*: two standard errors"
    yield "of the difference of two means as fp32's is. ResNet-18 has six seeds: three of fp32 lay nearer to"
    yield "each other than those of DDP's fp16 hook, which computes the same."
    yield from ("", f"**Expected, before it ran.** {EXPECTED_CODECS}", "")
    heads = ("", "", "loss (seeds)", "- fp32", "noise", "within")
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for trained in TRAINED:
        base = losses_of(journal, trained, text_of(SAFE_WAYS[EXACT]))
        for name, settings in SAFE_WAYS.items():
            cells = _safe_cells(losses_of(journal, trained, text_of(settings)), base)
            yield f"| {wifi.model_of(trained.paced).about} | `{name}` | {' | '.join(cells)} |"


def _safe_cells(losses: list[float], base: list[float]) -> list[str]:
    base = base[: len(losses)]  # of the same seeds
    apart = noise(base)
    if not losses or not base:
        return ["not measured", "", "", ""]
    if losses == base:
        return [mean_and_seeds(losses), "", "", ""]
    behind = mean(losses) - mean(base)
    if apart is None:
        return [mean_and_seeds(losses), f"{behind:+.3f}", "one seed", ""]
    return [mean_and_seeds(losses), f"{behind:+.3f}", f"{apart:.3f}", "yes" if behind <= apart else "**no**"]


def _model(journal: Journal, trained: Trained) -> Iterator[str]:
    yield from (f"## {wifi.model_of(trained.paced).about}", "")
    entries = journal.of(case_name(trained))
    if not entries:
        yield from ("Losses are not measured.", "")
        return
    target = target_of(journal, trained)
    yield f"{EVERY * trained.points} steps of each member; seeds: {len(entries)}; target {target:.3f} nats."
    yield ""
    heads = ("network", "", "settings", "loss (seeds)", "- fp16 hook", "noise", "a step", "to the target", "of one")
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    verdicts: list[str] = []
    for net in NETS:
        found = reached(journal, trained, net)
        if not found:
            yield f"| {net} | not measured: `wifi` | | | | | | | |"
            continue
        exact, alone = found[FP16], found[ALONE]
        for one in found.values():
            yield f"| {net} | {' | '.join(_row(one, exact, alone))} |"
        verdicts += [f"- {net}: {verdict(found[str(quality)], found)}" for quality in QUALITIES]
    yield ""
    yield f"Goals of `safe`, and `fast` beside it: at least {ALONE_GOAL:g} times one laptop in time to the target;"
    yield f"steps at least {FP16_GOAL:g} times as fast as with the fp16 hook, and {POWERSGD_GOAL:g} times the PowerSGD"
    yield from ("hook's, at no worse loss for equal samples than that hook's.", "", *verdicts, "")


def _longer(journal: Journal) -> Iterator[str]:
    yield from (f"## `fast`, in {LONGER} times as many steps", "")
    yield "Two targets: that of above, and the loss that DDP with its fp16 hook has after"
    yield f"{TARGET_PART:.0%} of these samples. *of one*: times as soon there as one laptop alone."
    yield from ("", f"**Expected, before it ran.** {EXPECTED_LONGER}", "")
    for trained in TRAINED:
        curves = longer_curves(journal, trained)
        if FP16 not in curves or ALONE not in curves:
            yield from (f"{wifi.model_of(trained.paced).about}: not measured.", "")
            continue
        steps = EVERY * trained.points
        targets = target_of(journal, trained), loss_at(curves[FP16], TARGET_PART * LONGER * steps)
        heads = (
            *(wifi.model_of(trained.paced).about, ""),
            *(f"loss after {times * steps} steps" for times in (1, 2, LONGER)),
            *(f"to {target:.3f}, of one" for target in targets),
        )
        yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
        for net in NETS:
            found = [one for one in reached(journal, trained, net).values() if one.settings in curves]
            times_s = {one.name: [_time_s(one, curves, loss) for loss in targets] for one in found}
            for one in found:
                losses = [f"{loss_at(curves[one.settings], times * steps):.3f}" for times in (1, 2, LONGER)]
                pairs = zip(times_s[one.name], times_s.get(ALONE, [None] * len(targets)), strict=True)
                yield f"| {' | '.join([str(net), f'`{one.settings}`', *losses, *(_sooner(*pair) for pair in pairs)])} |"
        free = [_if_free(curves, loss) for loss in targets]
        told = " and ".join("never" if times is None else f"{times:.1f} times as soon as one" for times in free)
        yield from ("", f"If exchanging took no time and changed nothing, {MEMBERS} laptops were there {told}.", "")
    yield from (f"**What stands in the way.** {IN_THE_WAY}", "")


def _if_free(curves: Mapping[str, Curve], loss: float) -> float | None:
    """How many times as soon as one laptop so many are there whose steps take what one's do; None: not at all."""
    exact, alone = steps_to(curves[FP16], loss), steps_to(curves[ALONE], loss)
    return None if exact is None or alone is None else MEMBERS * alone / exact


def _time_s(one: Reached, curves: Mapping[str, Curve], loss: float) -> float | None:
    steps = steps_to(curves[one.settings], loss)
    return None if steps is None else steps * one.step_s


def _sooner(time_s: float | None, alone_s: float | None) -> str:
    if time_s is None:
        return "not reached"
    return f"{time_s:.0f} s" if alone_s is None else f"{time_s:.0f} s, {alone_s / time_s:.2f}"


def longer_curves(journal: Journal, trained: Trained) -> dict[str, list[tuple[float, float]]]:
    """As `curves_of`, of the longer ones."""
    curves = {}
    for way in LONGER_WAYS:
        if entries := journal.of(longer_name(trained, way)):
            curves[way] = mean_curve(
                [list(zip(each.figures["steps"], each.figures[way], strict=True)) for each in entries]
            )
    return curves


def _entries(journal: Journal, trained: Trained) -> list[Entry]:
    """All seeds of all that was trained. Of what may be safe those of its own section, where there are any."""
    apart = {text_of(settings): journal.of(safe_name(trained, name)) for name, settings in SAFE_WAYS.items()}
    every = []
    for entry in journal.of(case_name(trained)):
        figures = {name: losses for name, losses in entry.figures.items() if not apart.get(name)}
        every.append(replace(entry, figures=figures))
    return [*every, *(entry for entries in apart.values() for entry in entries)]


def curves_of(journal: Journal, trained: Trained) -> dict[str, list[tuple[float, float]]]:
    """(steps of a member, mean loss of the seeds) of each way."""
    entries = _entries(journal, trained)
    names = dict.fromkeys(name for entry in entries for name in entry.figures if name != "steps")
    return {
        name: mean_curve(
            [
                list(zip(entry.figures["steps"], entry.figures[name], strict=True))
                for entry in entries
                if name in entry.figures
            ]
        )
        for name in names
    }


def losses_of(journal: Journal, trained: Trained, name: str) -> list[float]:
    """At the end, of every seed."""
    return [entry.figures[name][-1] for entry in _entries(journal, trained) if name in entry.figures]


def target_of(journal: Journal, trained: Trained) -> float:
    """The loss to be reached."""
    return loss_at(curves_of(journal, trained)[FP16], TARGET_PART * EVERY * trained.points)


def reached(journal: Journal, trained: Trained, net: Net) -> dict[str, Reached]:
    """What each way came to on a network: of DDP with its hooks, of both qualities, and of one alone; nothing where the
    times, or the losses, were not measured."""
    times = journal.of(wifi.measured_name(trained.paced, net, MEMBERS))
    curves = curves_of(journal, trained)
    if not times or not curves:
        return {}
    figures, target = times[-1].figures, target_of(journal, trained)

    def of(name: str, settings: str, step_s: float) -> Reached:
        losses = losses_of(journal, trained, settings)
        steps = steps_to(curves[settings], target) if settings in curves else None
        return Reached(name, settings, step_s, steps, tuple(losses))

    found = {hook: of(hook, hook, median(figures[hook])) for hook in HOOKS}
    for quality in QUALITIES:
        key, step_s = quality_figure(figures, f"{quality}: ")
        found[str(quality)] = of(str(quality), key.removeprefix(f"{quality}: "), step_s)
    # Its points are MEMBERS times as many steps of its own apart, for as many samples.
    found[ALONE] = of(ALONE, ALONE, MEMBERS * median(figures["alone"]))
    return found


def _row(one: Reached, exact: Reached, alone: Reached) -> list[str]:
    if not one.losses:
        return [one.name, f"`{one.settings}`", "not trained", "", "", seconds(one.step_s), "", ""]
    apart = noise(exact.losses)
    step_s = one.step_s / MEMBERS if one is alone else one.step_s
    return [
        one.name,
        "" if one.settings == one.name else f"`{one.settings}`",
        mean_and_seeds(one.losses),
        "" if one is exact else f"{mean(one.losses) - mean(exact.losses):+.3f}",
        "" if one is exact or apart is None else f"{apart:.3f}",
        seconds(step_s),
        "not reached" if one.time_s is None else f"{one.time_s:.0f} s",
        "" if one.time_s is None or alone.time_s is None else f"{alone.time_s / one.time_s:.2f}",
    ]


def verdict(one: Reached, found: Mapping[str, Reached]) -> str:
    """How a quality stands to each goal, in a sentence."""
    alone, fp16, power = found[ALONE], found[FP16], found[POWERSGD]
    if not one.losses:
        return f"`{one.name}` chose `{one.settings}`, which was not trained: nothing to say of its loss"
    parts = []
    if one.time_s is None:
        parts.append("the target is not reached: **not met**")
    elif alone.time_s is not None:
        sooner = alone.time_s / one.time_s
        parts.append(_judged(f"{sooner:.2f} times one laptop", sooner, ALONE_GOAL))
    parts.append(_judged(f"{fp16.step_s / one.step_s:.1f} times the fp16 hook", fp16.step_s / one.step_s, FP16_GOAL))
    times = power.step_s / one.step_s
    worse = mean(one.losses) - mean(power.losses)
    told_apart = worse > (noise(power.losses) or 0.0)
    met = times >= POWERSGD_GOAL and not told_apart
    said = f"{times:.2f} times the PowerSGD hook, loss {worse:+.3f}"
    said += "" if told_apart else " (within the noise, or better)"
    parts.append(f"{said}: {'met' if met else '**not met**'}")
    return f"`{one.name}` {'; '.join(parts)}"


def _judged(text: str, value: float, least: float) -> str:
    return f"{text}: {'met' if value >= least else '**not met**'}"


def picture(journal: Journal) -> str:
    """Loss by time in the cell of the goal, a panel for each model."""
    panels = []
    for trained in TRAINED:
        curves = curves_of(journal, trained)
        found = reached(journal, trained, NETS[0])
        shown = {
            one.name: [(steps * one.step_s, loss) for steps, loss in curves[one.settings]]
            for one in found.values()
            if one.settings in curves
        }
        panels.append(Panel(wifi.model_of(trained.paced).about, f"seconds in {NETS[0]}", shown, log=True))
    return panels_svg(f"Held-out loss by time, {MEMBERS} laptops and one", panels)


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page and its picture; returns where they are."""
    texts = {PAGE: page(journal), PICTURE: picture(journal)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

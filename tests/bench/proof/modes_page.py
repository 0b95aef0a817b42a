"""The page of every mode, and its pictures, from what is measured."""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwire.sync_modes.mode import sync_settings
from tests.bench.codecruns import rounds_of
from tests.bench.journal import Journal
from tests.bench.proof.curves import loss_at, mean_and_seeds, mean_curve, noise, steps_to
from tests.bench.proof.modes import (
    BASE,
    EVERY_MODE,
    EXPECTED,
    EXPECTED_MORE,
    MBIT,
    MEMBERS,
    MODES,
    RTT_S,
    SETS,
    Set,
    case_name,
    steps_name,
)
from tests.bench.proof.plots import Panel, panels_svg

PAGE = "modes.md"
TARGET_PART = 0.5  # of the samples, after which bsp's loss is the target
SHOWN_MBIT = 50.0  # of the picture
PAYS = 1.05


@dataclass(frozen=True)
class Way:
    """What a mode came to on one set.

    Attributes:
        losses: of the seeds, at the end.
        curve: (steps, mean loss of the seeds).
        round_bytes: that a member sends a round, headers and control messages included.
        step_s: by Mbit/s; nothing where they were not measured.
        first_step_s: the same of bsp, which the first steps of post-local SGD are.
    """

    mode: str
    losses: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]
    round_bytes: float
    step_s: Mapping[float, float]
    first_step_s: Mapping[float, float]

    def sent_bytes(self, steps: float) -> float:
        """By a member until then."""
        return self.round_bytes * rounds_of(self.mode, round(steps))

    def seconds(self, steps: float, mbit: float) -> float:
        """That so many steps take. Raises KeyError."""
        first = min(steps, sync_settings(self.mode).after)
        return first * self.first_step_s[mbit] + (steps - first) * self.step_s[mbit]


def ways(journal: Journal, one: Set) -> dict[str, Way]:
    """Those that are measured, by mode."""
    found = {}
    times = journal.of(steps_name(one.model))
    planned = times[-1].figures if times else {}

    def step_s(mode: str) -> dict[float, float]:
        return {mbit: planned[key][0] for mbit in MBIT if (key := f"{mode} at {mbit:g}") in planned}

    for mode in EVERY_MODE:
        case = case_name(one.model, mode)
        entries = journal.of(case)
        if not entries:
            continue
        curves = [list(zip(each.figures["step"], each.figures["loss"], strict=True)) for each in entries]
        # Of all, a step. A job of a few seconds is over before its sockets are counted twice: then, what was encoded.
        counted = [each for each in journal.figures(case, "sent_bytes") if not math.isnan(each)]
        sent = statistics.mean(counted or journal.figures(case, "payload_bytes"))
        found[mode] = Way(
            mode,
            tuple(each.figures["loss"][-1] for each in entries),
            tuple(mean_curve(curves)),
            sent / MEMBERS * one.steps / rounds_of(mode, one.steps),
            step_s(mode),
            step_s(BASE),
        )
    return found


def page(journal: Journal) -> str:
    """In Markdown."""
    lines = [
        "# Every mode, on a text and on images",
        "",
        "```",
        "python -m tests.bench.proof modes more-modes",
        "python -m tests.bench.proof steps   # on a machine that does nothing else",
        "python -m tests.bench.proof --page",
        "```",
        "",
        f"Jobs of {MEMBERS} real daemons on loopback, all replicas bit-equal. The codec is the mode's own, fp32 where",
        "it has none; the script's learning rate is bsp's, tuned for no mode (local steps of AdamW take twice that by",
        "themselves, O13, but for `muloco`). Loss: held-out, of the base, in nats, the",
        "mean and each seed's. The seeds' noise: two standard errors of the difference of two means as bsp's is; what",
        "scatters more is not nearer to it for that. *MB*: that a member sends in the whole job, all headers included,",
        "but of a job that was over before that was counted twice, when it is what was encoded. `demo` takes its own",
        "steps, with SGD at 1e-3, and `muloco` Muon and AdamW at 2e-3.",
        "",
        f"*time to target*: planned, in a WiFi cell whose air carries so many Mbit/s for all ({1000 * RTT_S:g} ms),",
        f"until the loss that bsp has after {TARGET_PART:.0%} of its samples. Each laptop computes as one core of this",
        "machine does, and a *laptop alone* takes the whole batch. Seconds of a step are `meshtrain whatif`'s; how",
        "good they are: [predicted.md](predicted.md).",
        "",
        f"**Expected, before it ran.** {EXPECTED}",
        "",
        f"**Of what is below `demo`, later.** {EXPECTED_MORE}",
        "",
    ]
    for one in SETS:
        if found := ways(journal, one):
            lines += _section(journal, one, found)
    return "\n".join(lines).rstrip() + "\n"


def _section(journal: Journal, one: Set, found: Mapping[str, Way]) -> Iterator[str]:
    seeds = max(len(way.losses) for way in found.values())
    yield f"## {one.about[0].upper()}{one.about[1:]}"
    yield ""
    yield (
        f"{one.steps} steps of {one.batch // MEMBERS} samples a member, "
        f"{one.steps * one.batch:,} samples in all; seeds: {seeds}."
    )
    yield ""
    yield f"![Loss by samples, bytes and seconds](modes_{one.model}.svg)"
    yield ""
    heads = ["mode", "loss (seeds)", "- bsp", "MB", *(f"to target, {mbit:g} Mbit/s" for mbit in MBIT)]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    base = found.get(BASE)
    target = None if base is None else loss_at(base.curve, TARGET_PART * one.steps)
    for way in found.values():
        yield f"| {' | '.join(_row(one, way, base, target))} |"
    alone_s = journal.figures(steps_name(one.model), "alone_all_s")
    if alone_s and target is not None:
        text = f"{_seconds(alone_s[-1] * TARGET_PART * one.steps)}"
        yield f"| one laptop alone | as bsp | | 0 | {' | '.join([text] * len(MBIT))} |"
    yield ""
    if base is not None and target is not None:
        yield from (f"- {line}" for line in verdicts(one, found, target, alone_s[-1] if alone_s else None))
        yield ""


def _row(one: Set, way: Way, base: Way | None, target: float | None) -> list[str]:
    behind = ""
    if base is not None and way.mode != BASE:
        behind = f"{statistics.mean(way.losses) - statistics.mean(base.losses):+.3f}"
    reached = None if target is None else steps_to(way.curve, target)
    if reached is None:
        times = ["not reached"] * len(MBIT)
    else:
        times = [_seconds(way.seconds(reached, mbit)) if mbit in way.step_s else "" for mbit in MBIT]
    megabytes = f"{way.sent_bytes(one.steps) / 1e6:.2f}"
    return [f"`{way.mode}`", mean_and_seeds(way.losses), behind, megabytes, *times]


def verdicts(one: Set, found: Mapping[str, Way], target: float, alone_s: float | None) -> Iterator[str]:
    """Where which mode wins, and where one loses, in sentences."""
    base = found[BASE]
    losing: list[str] = []
    level: list[str] = []
    apart = noise(base.losses)
    for way in found.values():
        if way.mode == BASE:
            continue
        behind = statistics.mean(way.losses) - statistics.mean(base.losses)
        (losing if behind > (apart or 0.0) else level).append(f"`{way.mode}`")
    told = "" if apart is None else f" ({apart:.3f})"
    yield f"**Loses per sample**, by more than the seeds' noise{told}: {', '.join(losing) or 'none'}."
    yield f"Within the noise of bsp, or better: {', '.join(level) or 'none'}."
    for mbit in MBIT:
        reached = {}
        for way in found.values():
            steps = steps_to(way.curve, target)
            if steps is not None and mbit in way.step_s:
                reached[way.mode] = way.seconds(steps, mbit)
        if not reached:
            continue
        best = min(reached, key=lambda mode: reached[mode])
        said = f"At {mbit:g} Mbit/s `{best}` is first at the target, after {_seconds(reached[best])}"
        if BASE in reached:
            said += f", bsp after {_seconds(reached[BASE])}"
        if alone_s is not None:
            alone_all_s = alone_s * TARGET_PART * one.steps
            slower = [f"`{mode}`" for mode, seconds in reached.items() if seconds * PAYS > alone_all_s]
            said += f". **Slower than one laptop alone** ({_seconds(alone_all_s)}): {', '.join(slower) or 'none'}"
        never = [f"`{mode}`" for mode in found if mode not in reached]
        yield said + (f"; not there at all: {', '.join(never)}." if never else ".")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def pictures(journal: Journal) -> Iterator[tuple[str, str]]:
    """(name of the file, its text)."""
    for one in SETS:
        found = {mode: way for mode, way in ways(journal, one).items() if mode in MODES}
        if found:
            yield f"modes_{one.model}.svg", _picture(one, found)


def _picture(one: Set, found: Mapping[str, Way]) -> str:
    samples = {way.mode: [(step * one.batch, loss) for step, loss in way.curve] for way in found.values()}
    megabytes = {way.mode: [(way.sent_bytes(step) / 1e6, loss) for step, loss in way.curve] for way in found.values()}
    timed = [way for way in found.values() if SHOWN_MBIT in way.step_s]
    seconds = {way.mode: [(way.seconds(step, SHOWN_MBIT), loss) for step, loss in way.curve] for way in timed}
    panels = [
        Panel("held-out loss, by samples", "samples of all members", samples),
        Panel("by bytes", "MB sent by a member", megabytes, log=True),
        Panel(f"by time at {SHOWN_MBIT:g} Mbit/s in a cell", "seconds, planned", seconds, log=True),
    ]
    return panels_svg(f"Every mode, {one.about}", panels)


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page and its pictures; returns where they are."""
    texts = {PAGE: page(journal), **dict(pictures(journal))}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

"""The page of the grid that others have measured, and its picture, from what is measured and planned here."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

from meshwire.planning.mesh_plan import PAYS_FROM
from tests.bench.journal import Entry, Journal, spread
from tests.bench.proof.curves import mean_and_seeds, mean_curve, noise, steps_to
from tests.bench.proof.networks.grid import (
    ABOUT,
    ALONE,
    AUTO,
    BASE,
    EVERY_TRAINED,
    EXPECTED,
    EXPECTED_FAST,
    EXPECTED_LOSS,
    EXPECTED_PLAN,
    FEWER,
    LOSS_PART,
    MBIT,
    MEMBERS,
    PLANNED,
    SOCKETS,
    STEP_S,
    STEPS,
    THEIR_STEP_S,
    THEIRS,
    UTILISED,
    WAYS,
    Way,
    fewer_name,
    loss_name,
    measured_name,
    planned_figure,
)
from tests.bench.proof.networks.paced_models import text_of
from tests.bench.proof.plots import Panel, panels_svg

PAGE, PICTURE, LOSS_PICTURE = "grid.md", "grid.svg", "grid_loss.svg"
BESIDE = ("daemons_cpu_s", "sent_bytes", "planned_s", "of_one")  # figures of a case beside its settings
SLOWEST, FASTEST = min(MBIT), max(MBIT)


IN_THE_WAY = (
    "Bytes against loss. A step of 500 ms hides 3 MB each way at 50 Mbit/s: a 60th of what a ring moves of 30.8 M "
    "values in fp32. In step int8, int4 and int4:sr are within half a percent after 512 steps, and move 7 to 15 times "
    "that. local:4 with nf4 moves twice that, while nobody computes, and is 1 % behind; local:8 with int8 is 5 %. "
    "What overlaps as well is further behind, local:4,ssp:1 by 7 %, local:8,ssp:1 by 14 %; so are powersgd, by 11 %, "
    "and what sends a hundredth or has outer momentum, of which there are 4 to 64 rounds. Where `auto, fast` loses "
    "its last part of the compute: of 0.62 s a step 0.05 are its daemon's, which shares the learners' cores here, and "
    "the learner itself encodes for some ms behind each period. From 200 Mbit/s on `auto` takes rounds that cost "
    "processors more, for four laptops have eight of them; here four daemons share two with their learners, and steps "
    "take up to 2.5 times as long as planned. local:2 with nf4, which is within half a percent, too, halves what "
    "int4 moves, and is what `auto, safe` takes at 50 and 200 Mbit/s."
)


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    yield from ("# Others' grid: four machines, four links", "", "```")
    yield "python -m tests.bench.proof grid-planned grid grid-periods   # on a machine that does nothing else"
    yield from (
        "python -m tests.bench.proof grid-loss fast-loss fewer-loss",
        "python -m tests.bench.proof --page",
        "```",
        "",
    )
    parameters = journal.figures(PLANNED, "parameters")
    yield f"[diloco-measured](https://github.com/Adnan082/diloco-measured) trained {ABOUT} on {MEMBERS} machines whose"
    yield "links were shaped. Theirs: DDP, and DiLoCo with fp32 and without overlap; no DiLoCo run of theirs reached"
    yield "its target loss."
    if parameters:
        yield f"Ours has {parameters[-1] / 1e6:.1f} M parameters."
    yield ""
    yield f"**Computing is paced**: a step is stated to take {1000 * STEP_S:g} ms, as 1,000 tokens do on a laptop of"
    yield "400 GFLOP/s; gradients are noise. Theirs, by what they say of bytes and utilisation, took 20 to 30 ms: the"
    yield f"second table plans {1000 * THEIR_STEP_S:g}. *utilisation*: what a step takes without any exchange, by what"
    yield from ("it takes.", "")
    yield f"**Two cores carry {MEMBERS} learners and {MEMBERS} daemons** with their TLS and codecs, so that these are"
    yield "dearer than on laptops of their own, the more the faster the link."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "")
    yield from ("## Utilisation of compute, measured", "", f"![Utilisation by rate]({PICTURE})", "")
    yield from _measured(journal)
    yield from ("## As planned, and theirs", "")
    yield from ("Learners and daemons on machines of their own.", "", f"**Expected.** {EXPECTED_PLAN}", "")
    yield from _planned(journal)
    yield from ("## Loss at equal tokens", "")
    yield from _losses(journal)
    yield from ("## The goal", "")
    yield f"At least {UTILISED:.2f} of the compute at {SLOWEST:g} Mbit/s, with a loss within {LOSS_PART:.1%} of"
    yield from (f"synchronous AdamW's: {verdict(journal)}", "", f"**What stands in the way.** {IN_THE_WAY}")


def _measured(journal: Journal) -> Iterator[str]:
    alone = journal.figures(ALONE, "step_s")
    if alone:
        cpu = journal.figures(ALONE, "cpu_s")
        yield f"Without any exchange a step takes {spread(alone, 3)} s, {median(cpu):.2f} s of it real work of a core."
        yield "In each cell: utilisation; seconds a step, median and range of the turns, and as planned; seconds of a"
        yield from ("core that a daemon takes for a step.", "")
    heads = ("", *(f"{mbit:g} Mbit/s" for mbit in MBIT))
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for way in (*WAYS, *AUTO):
        yield f"| `{way.name}` | {' | '.join(_cell(journal, mbit, way) for mbit in MBIT)} |"
    yield ""
    for way in AUTO:
        for mbit in MBIT:
            if entry := newest(journal, mbit, way):
                rather = "; it would rather train alone" * (entry.figures["of_one"][0] < PAYS_FROM)
                yield f"- {way.name} at {mbit:g} Mbit/s chose `{settings_of(entry)}`{rather}."
    yield from _limit(journal)
    yield ""


def _limit(journal: Journal) -> Iterator[str]:
    entry = newest(journal, FASTEST, WAYS[0])
    sockets = journal.figures(SOCKETS, f"{FASTEST:g}")
    if sockets:
        yield f"- **The limit at {FASTEST:g} Mbit/s**: plain TCP around the ring got {spread(sockets, 0)} Mbit/s a"
        yield "station   on these two cores, without encryption."
    if entry is not None:
        moved = 8e-6 * entry.figures["sent_bytes"][0] / median(steps_s(journal, entry))
        yield f"- `{WAYS[0].name}` moved {moved:.0f} Mbit/s a station there in the mean over a step, computing"
        yield "included:   what lies between is encryption, sums and Python on shared cores, not the link."


def newest(journal: Journal, mbit: float, way: Way) -> Entry | None:
    """The last repeat of a way at a rate."""
    entries = journal.of(measured_name(mbit, way))
    return entries[-1] if entries else None


def settings_of(entry: Entry) -> str:
    """Which were used: the figure that is named so holds the seconds a step."""
    return next(name for name in entry.figures if name not in BESIDE)


def steps_s(journal: Journal, entry: Entry) -> list[float]:
    """Seconds a step of all turns of all repeats that had the same settings."""
    return journal.figures(entry.case, settings_of(entry))


def utilisation(journal: Journal, mbit: float, way: Way) -> float | None:
    """As measured; None where it, or a step without exchange, was not."""
    entry, alone = newest(journal, mbit, way), journal.figures(ALONE, "step_s")
    return median(alone) / median(steps_s(journal, entry)) if entry is not None and alone else None


def _cell(journal: Journal, mbit: float, way: Way) -> str:
    entry, used = newest(journal, mbit, way), utilisation(journal, mbit, way)
    if entry is None or used is None:
        return "not measured"
    took = spread(steps_s(journal, entry))
    planned_s, daemon_s = (median(entry.figures[name]) for name in ("planned_s", "daemons_cpu_s"))
    return f"**{used:.3f}**: {took} s, planned {planned_s:.2f}, daemon {daemon_s:.2f}"


def _planned(journal: Journal) -> Iterator[str]:
    heads = ("a step of", "", *(f"{mbit:g} Mbit/s" for mbit in MBIT))
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for step_s in (STEP_S, THEIR_STEP_S):
        for name in ("DDP", *(way.name for way in (*WAYS, *AUTO))):
            cells = []
            for mbit in MBIT:
                values = journal.figures(PLANNED, planned_figure(name, mbit, step_s))
                cells.append(f"{values[-1]:.4f}" if values else "not planned")
            yield f"| {1000 * step_s:g} ms | `{name}` | {' | '.join(cells)} |"
    for name in dict.fromkeys(name for name, _ in THEIRS):
        cells = [f"{THEIRS[name, mbit]:.4f}" if (name, mbit) in THEIRS else "" for mbit in MBIT]
        yield f"| theirs, measured | {name} | {' | '.join(cells)} |"
    yield ""


def losses_of(journal: Journal, settings: str) -> list[float]:
    """The held-out losses that runs with these settings end at, one for each seed; none where they were not trained."""
    way = next((way for way in EVERY_TRAINED if text_of(way.settings) == settings), None)
    return [] if way is None else [entry.figures["loss"][-1] for entry in journal.of(loss_name(way))]


def within(journal: Journal, settings: str) -> bool | None:
    """Whether the mean of the seeds is as near synchronous AdamW's as the goal asks; None where it was not trained."""
    own, base = losses_of(journal, settings), losses_of(journal, BASE)
    return mean(own) <= (1 + LOSS_PART) * mean(base) if own and base else None


def worth(journal: Journal, settings: str) -> float | None:
    """By which part of the steps synchronous AdamW, whose rate falls to 0 by then, is at the loss at which runs with
    these settings end: at most 1. None: it was not measured, or they end behind the fewest steps that were."""
    own, base = losses_of(journal, settings), losses_of(journal, BASE)
    ends = [(float(steps), [one.figures["loss"][-1] for one in journal.of(fewer_name(steps))]) for steps in FEWER]
    if not own or not base or not all(losses for _, losses in ends):
        return None
    curve = [*((steps, mean(losses)) for steps, losses in ends), (float(STEPS), mean(base))]
    if mean(own) > curve[0][1]:
        return None
    return (steps_to(curve, mean(own)) or STEPS) / STEPS


def _losses(journal: Journal) -> Iterator[str]:
    base = losses_of(journal, BASE)
    parameters = [value for way in EVERY_TRAINED for value in journal.figures(loss_name(way), "parameters")]
    size = f"the demo's GPT ({parameters[0] / 1e6:.2f} M parameters)" if parameters else "the demo's GPT"
    yield f"{size[0].upper()}{size[1:]} on the text of Python's standard library: {MEMBERS} real learners, {STEPS}"
    yield "steps each, AdamW at 2e-3 that rises in the first twentieth and falls to 0 by a cosine; the rate is bsp's,"
    yield "tuned for no other. *noise*: two standard errors of the difference of two means of bsp's seeds."
    yield f"*worth*: by which part of the {STEPS} steps `bsp` is at this loss, with a schedule of so many steps"
    yield f"({', '.join(map(str, FEWER))} were run; between them it is a straight line): what a sample is worth when a"
    yield "loss is to be reached, by which `--quality fast` chooses."
    yield from ("", f"**Expected.** {EXPECTED_LOSS} {EXPECTED_FAST}", "", f"![Loss by steps]({LOSS_PICTURE})", "")
    yield from ("| | loss (seeds) | by bsp's | noise | within | worth |", f"|{'---|' * 6}")
    for way in EVERY_TRAINED:
        own = losses_of(journal, text_of(way.settings))
        if not own or not base:
            yield f"| `{way.name}` | not measured | | | | |"
            continue
        apart = noise(base)
        cells = [mean_and_seeds(own), f"{mean(own) / mean(base) - 1:+.2%}"]
        cells.append("-" if apart is None or own is base else f"{apart / mean(base):.2%}")
        cells.append("yes" if within(journal, text_of(way.settings)) else "**no**")
        of_one = worth(journal, text_of(way.settings))
        least = f"below {FEWER[0] / STEPS:g}" if journal.of(fewer_name(FEWER[0])) else "not measured"
        cells.append(least if of_one is None else f"{of_one:.2f}")
        yield f"| `{way.name}` | {' | '.join(cells)} |"
    yield ""


def reaching(journal: Journal) -> tuple[list[str], list[str]]:
    """Names of ways that use the compute as the goal asks, at the slowest rate: those whose loss is as near, too, and
    those whose loss is not or was not trained."""
    both: list[str] = []
    only: list[str] = []
    for way in (*WAYS, *AUTO):
        entry, used = newest(journal, SLOWEST, way), utilisation(journal, SLOWEST, way)
        if entry is not None and used is not None and used >= UTILISED:
            (both if within(journal, settings_of(entry)) else only).append(f"`{way.name}`")
    return both, only


def verdict(journal: Journal) -> str:
    """Whether any way reaches both, and which."""
    if not any(newest(journal, SLOWEST, way) for way in (*WAYS, *AUTO)) or not losses_of(journal, BASE):
        return "not measured."
    both, only = reaching(journal)
    beside = f" The compute alone: {', '.join(only)}." if only else ""
    return (f"**met** by {', '.join(both)}." if both else "**not met**.") + beside


def pictures(journal: Journal) -> dict[str, str]:
    """By their files' names: utilisation by rate, and loss by steps."""
    used, curves = {}, {}
    for way in (*WAYS, *AUTO):
        found = [(mbit, value) for mbit in MBIT if (value := utilisation(journal, mbit, way)) is not None]
        if found:
            used[way.name] = found
    for way in EVERY_TRAINED:
        if entries := journal.of(loss_name(way)):
            each = [list(zip(one.figures["step"], one.figures["loss"], strict=True)) for one in entries]
            curves[way.name] = mean_curve(each)
    return {
        PICTURE: panels_svg(
            f"Utilisation of compute, {ABOUT} on {MEMBERS} machines",
            [Panel(f"steps of {1000 * STEP_S:g} ms", "Mbit/s of each", used, log=True)],
        ),
        LOSS_PICTURE: panels_svg(
            "Held-out loss by steps", [Panel("mean of the seeds, nats", "steps of each learner", curves)]
        ),
    }


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page and its pictures; returns where they are."""
    texts = {PAGE: page(journal), **pictures(journal)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

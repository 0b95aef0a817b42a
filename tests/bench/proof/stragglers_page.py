"""The page of eight unequal peers, and its picture, from what is measured."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.bench.journal import Journal, spread
from tests.bench.proof.plots import Panel, panels_svg
from tests.bench.proof.stragglers import (
    ALONE,
    BATCH,
    EXPECTED,
    IN_STEP,
    PEERS,
    SAMPLES,
    SCALE,
    TARGET,
    TIME_SPREAD_S,
    WAYS,
    Way,
    case_name,
    peers,
)

PAGE, PICTURE = "eight_peers.md", "eight_peers.svg"


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    drawn = peers()
    yield from ("# Eight unequal peers, as in hivemind's benchmark", "", "```")
    yield "python -m tests.bench.proof stragglers   # on a machine that does nothing else"
    yield from ("python -m tests.bench.proof --page", "```", "")
    yield "The workload of hivemind's benchmark of its optimizer, in a tenth of its time: a batch of 2 to 16"
    yield f"samples takes 1 to 4.5 s there, drawn once a peer, and varies by {TIME_SPREAD_S:g} s from one to the next."
    yield f"Handwritten digits (4,000 to train with), a perceptron, SGD with momentum; {SAMPLES:,} samples a job. Real"
    yield f"daemons on loopback; a learner's computing is a sleep, {SCALE:g} of theirs."
    yield ""
    yield f"Our scripts say one batch size, {BATCH}: what was drawn is how long a sample takes. The fastest alone takes"
    yield f"the batch of all, {ALONE.batch}, so that a step is the same; local steps are of {BATCH}. **Samples a second"
    yield f"of the peers**: {', '.join(f'{peer.samples_s:.0f}' for peer in drawn)}; together"
    yield f"{sum(peer.samples_s for peer in drawn):.0f}. Their three clients, which own no part of what is averaged,"
    yield "are peers like the others here. Their own figures are not beside ours: it was not run on this machine."
    yield ""
    yield f"*time to accuracy*: until {TARGET:.0%} of what is held out is read right, of the base, from the first step"
    yield "on. *of the sum*: samples a second over the whole job, of the peers' speeds. *in the end*: accuracy."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "", f"![Accuracy by time]({PICTURE})", "")
    heads = ("", "time to accuracy, s", "samples until then", "of one alone", "of the sum", "in the end", "repeats")
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}")
    for way in WAYS:
        yield f"| {way.name} | {' | '.join(_row(journal, way))} |"
    if (ideal := ideal_s(journal)) is not None:
        of_one = _of_one(journal, ideal)
        yield f"| the sum of speeds, at bsp's samples | {ideal:.1f} | {_samples(journal, IN_STEP)} | {of_one} | 1 | | |"
    yield ""
    chosen = dict.fromkeys(
        name for way in WAYS for entry in journal.of(case_name(way)) for name in entry.figures if name.startswith("on ")
    )
    yield from (f"- What auto said, {text}" for text in chosen)


def _row(journal: Journal, way: Way) -> list[str]:
    repeats = journal.repeats(case_name(way))
    if not repeats:
        return ["not measured", *([""] * 5)]
    reached = journal.figures(case_name(way), "reached_s")
    missed = f" (not reached: {repeats - len(reached)} of {repeats})" if len(reached) < repeats else ""
    return [
        (spread(reached, 1) if reached else "-") + missed,
        _samples(journal, way),
        _of_one(journal, median(reached)) if reached else "",
        spread(journal.figures(case_name(way), "of the sum")),
        spread(journal.figures(case_name(way), "accuracy"), 3),
        f"{repeats}",
    ]


def _samples(journal: Journal, way: Way) -> str:
    samples = journal.figures(case_name(way), "reached_samples")
    return spread(samples, 0) if samples else ""


def _of_one(journal: Journal, reached_s: float) -> str:
    alone = journal.figures(case_name(ALONE), "reached_s")
    return f"{median(alone) / reached_s:.2f}" if alone else ""


def ideal_s(journal: Journal) -> float | None:
    """Seconds to the accuracy where all compute all the time and learn as bsp does by samples."""
    samples = journal.figures(case_name(IN_STEP), "reached_samples")
    return median(samples) / sum(peer.samples_s for peer in peers()) if samples else None


def picture(journal: Journal) -> str:
    """Accuracy by time, of each way's first repeat."""
    curves = {}
    for way in WAYS:
        if entries := journal.of(case_name(way)):
            figures = entries[0].figures
            curves[way.name] = list(zip(figures["at_s"], figures["accuracies"], strict=True))
    panel = Panel("part read right, of what is held out", "seconds (a tenth of theirs)", curves)
    return panels_svg(f"Accuracy by time, {PEERS} unequal peers", [panel])


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page and its picture; returns where they are."""
    texts = {PAGE: page(journal), PICTURE: picture(journal)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]

"""The page of the goals about laptops that come and go, or are slow: from what is measured."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from meshtraind.storage.background_pacing import PRICE_MAX
from tests.bench.journal import Journal, spread
from tests.bench.proof import goodput, slow_laptop

PAGE = "goodput.md"
GOODPUT_GOAL, RATE_GOAL, SLOW_GOAL = 0.88, 0.95, 0.85


def page(journal: Journal) -> str:
    """In Markdown."""
    lines = [
        "# Kills, returns, and a slow laptop",
        "",
        "```",
        "python -m tests.bench.proof goodput rejoin slow   # on a machine that does nothing else",
        "python -m tests.bench.proof --page",
        "```",
        "",
        "Four real daemons on two cores. *median (from the least to the most)* of the repeats; each has daemons of its",
        "own.",
        "",
        *_goodput(journal),
        *_rejoin(journal),
        *_slow(journal),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _goodput(journal: Journal) -> Iterator[str]:
    yield from ("## Samples kept under kills", "")
    yield (
        f"A step is a sleep of {goodput.STEP_S:g} s. Of a random one the daemon, whose learner ends with it, or the "
        "learner alone is"
    )
    yield f"killed; a daemon is started again at once; at least {goodput.LEFT} of the learners is left. *kept*: what"
    yield "the base has gained, counted by the model itself. *of what computed*: beside the part of the learners that"
    yield "did. Who comes back runs through all epochs that are over, a step for each, before it takes part, and the"
    yield "others go on meanwhile (X4): the shorter epochs are, the longer that takes."
    yield from ("", f"**Expected, before it ran.** {goodput.EXPECTED}", "")
    yield "| | samples kept a second | of left alone | learners computing | of what computed | kills | twice | goal | |"
    yield f"|{'---|' * 9}"
    for rounds in goodput.EPOCH_ROUNDS:
        yield from (_kills_row(journal, kills) for kills in goodput.of_epochs(rounds))
    yield from ("", *_away(journal))


def away_s(journal: Journal, kills: goodput.Kills) -> float | None:
    """For how long a kill takes one learner away, from the part that computes; None where nothing is killed, or it was
    not measured."""
    computing = journal.figures(kills.name, "computing")
    if kills.every_s is None or not computing:
        return None
    return goodput.PEERS * (1 - median(computing)) * kills.every_s


def _away(journal: Journal) -> Iterator[str]:
    every = [kills for rounds in goodput.EPOCH_ROUNDS for kills in goodput.of_epochs(rounds)]
    found = [(kills.name, away_s(journal, kills)) for kills in every]
    told = [f"{seconds:.1f} s ({name})" for name, seconds in found if seconds is not None]
    often_s = min(every_s for every_s in goodput.WINDOWS_S if every_s is not None)
    most_s = goodput.PEERS * (1 - GOODPUT_GOAL) * often_s
    if told:
        yield f"**What stands in the way.** A kill takes one learner away for {', '.join(told)}."
        yield "Some 2 s of each are Python and torch ([recovery.md](recovery.md)), the rest is what it runs through;"
        yield "the others' next round comes after 0.3 s. To leave"
        yield f"{GOODPUT_GOAL:g} of four with a kill every {often_s:g} s a return could take {most_s:.1f} s. Where"
        yield from (
            "kills follow each other so fast, rounds that are cut off take more: their samples are computed anew.",
            "",
        )


def kept_parts(journal: Journal, kills: goodput.Kills) -> list[float]:
    """Samples kept, by those of the job that is left alone, of each repeat; none where one of both was not measured."""
    base = journal.figures(goodput.Kills(None, kills.rounds).name, "kept_s")
    return [each / median(base) for each in journal.figures(kills.name, "kept_s")] if base else []


def _kills_row(journal: Journal, kills: goodput.Kills) -> str:
    ratios = kept_parts(journal, kills)
    if not ratios:
        return f"| {kills.name} | not measured | | | | | | | |"
    kept, computing = (journal.figures(kills.name, figure) for figure in ("kept_s", "computing"))
    of_computing = [one / other for one, other in zip(ratios, computing, strict=True)]
    killed, twice = (sum(journal.figures(kills.name, figure)) for figure in ("kills", "twice"))
    goal = "" if kills.every_s is None else f"at least {GOODPUT_GOAL:g}"
    verdict = "" if kills.every_s is None else _verdict(ratios, GOODPUT_GOAL)
    return (
        f"| {kills.name} | {spread(kept, 1)} | {spread(ratios)} | {spread(computing)} | {spread(of_computing)} "
        f"| {killed:.0f} | {twice:.0f} | {goal} | {verdict} |"
    )


def _rejoin(journal: Journal) -> Iterator[str]:
    yield from ("## The others' speed while one comes back", "")
    rate = journal.figures(goodput.REJOIN, "rate")
    if not rate:
        yield from ("Not measured.", "")
        return
    whole = journal.figures(goodput.REJOIN, "whole_s")
    yield (
        f"It loads 46 MB at {goodput.REJOIN_MBIT:g} Mbit/s ([recovery.md](recovery.md)). Rounds a second of the other "
        f"three, by those before: **{spread(rate)}**, goal at least"
    )
    yield f"{RATE_GOAL:g}: {_verdict(rate, RATE_GOAL)}. It computes again after {spread(whole, 0)} s."
    yield ""
    yield f"That is a choice: pieces of the state may take {PRICE_MAX:.0%} of the time of the others' rounds, which is"
    yield "measured while they come (`storage/background_pacing.py`). At half of that the goal would be met, and the"
    yield "returner would compute again after twice the time: three laptops would keep some percent more of their"
    yield from ("speed, the fourth would have none for as long again, and all together would have fewer samples.", "")


def _slow(journal: Journal) -> Iterator[str]:
    yield from ("## One of four is 3x slower, and nobody has said so", "")
    yield (
        f"Laptops are shares of a core ({', '.join(f'{cores:.2f}' for cores in slow_laptop.CORES)}) on cables of "
        f"{slow_laptop.MBIT:g} Mbit/s; `meshtrain submit`"
    )
    yield "without a flag. *the sum*: of the script's speeds on each, without a job."
    yield from ("", f"**Expected, before it ran.** {slow_laptop.EXPECTED}", "")
    entries = journal.of(slow_laptop.NAME)
    if not entries:
        yield from ("Not measured.", "")
        return
    settled = journal.figures(slow_laptop.NAME, "of the sum")
    whole = journal.figures(slow_laptop.NAME, "of the sum, whole job")
    yield f"- **{spread(settled)} of the sum** once batches have their sizes, goal at least {SLOW_GOAL:g}:"
    yield f"  {_verdict(settled, SLOW_GOAL)}; over the whole job {spread(whole)}."
    yield from _profile(journal)
    chosen = dict.fromkeys(name for entry in entries for name in entry.figures if name.startswith("on "))
    yield from (f"- What it said, {text}" for text in chosen)
    yield ""


def _profile(journal: Journal) -> Iterator[str]:
    """Where each laptop's share of a core goes while batches have their sizes: means of the repeats."""
    entries = [entry.figures for entry in journal.of(slow_laptop.NAME)]
    kinds = ("useful", "learners", "daemons")
    laptops = [
        [fmean(of_rank) for of_rank in zip(*(entry[kind] for entry in entries if kind in entry), strict=True)]
        for kind in kinds
    ]
    if not all(laptops):
        return
    useful, learners, daemons = ([f"{value:.2f}" for value in each] for each in laptops)
    waits = [f"{1 - one - other:.2f}" for one, other in zip(*laptops[1:], strict=True)]
    yield "- **Where the rest is**, by rank, of each laptop's share of a core: the learner computes"
    yield f"  {', '.join(learners)} (what its samples take alone: {', '.join(useful)}), its daemon"
    yield f"  {', '.join(daemons)}, and nothing for {', '.join(waits)}, as it waits for a round or stands"
    costs = ", ".join(f"{learner / use:.2f}" for use, learner in zip(*laptops[:2], strict=True))
    yield "  between two slices of its share. A sample takes as much more processor time as alone, where batches have"
    yield f"  128 samples: {costs}. A part of a step takes as long whatever its batch, so that small batches are dear,"
    yield "  and the others wait for the laptop that has them; what is planned takes times to grow with batches."


def _verdict(values: Sequence[float], least: float) -> str:
    return "**met**" if median(values) >= least else "**not met**"


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page; returns where it is."""
    (folder / PAGE).write_text(page(journal), encoding="utf-8")
    return [folder / PAGE]

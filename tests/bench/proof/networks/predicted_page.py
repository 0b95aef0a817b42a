"""The page of predictions beside measurements: all cells of the proof in which both are known."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from meshwire.collectives.strategy import TOPOLOGIES
from meshwire.planning.choose import job_settings
from meshwire.planning.mesh_plan import PAYS_FROM
from meshwire.planning.quality import Quality
from tests.bench.journal import Journal
from tests.bench.proof.networks import grid, grid_page
from tests.bench.proof.networks.paced_models import QUALITIES
from tests.bench.proof.networks.predicted import (
    BY_HAND,
    EXPECTED,
    EXPECTED_RANDOM,
    MESHES,
    STEP_S,
    VALUES,
    Mesh,
    case_name,
    random_meshes,
    random_name,
)
from tests.bench.proof.networks.wifi import MEASURED, measured_name, model_of
from tests.bench.proof.networks.wifi_page import quality_figure, seconds

PAGE = "predicted.md"
CORES = 2  # of the machine on which all pages were made
BUSY = 2 / 3  # of all cores: above, who waits for a core waits for others' work
ALONE, PLANNED = "one alone", ", planned"
NEAR = 0.9  # of the best that was typed: who chooses is asked for no more
MEDIAN_GOAL, TENTH_GOAL, REGRET_GOAL, ALONE_GOAL = 0.05, 0.15, 0.05, 0.05


@dataclass(frozen=True)
class Cell:
    """A job whose step was predicted, and then measured.

    Attributes:
        mesh: laptops, what they train, their network: cells of one mesh can be chosen between.
        settings: as typed.
        alone_s: of a step on one laptop.
        cores_used: of what this machine's cores could do meanwhile, the part that all laptops together have used;
            None: that was not looked at.
    """

    mesh: str
    settings: str
    members: int
    alone_s: float
    planned_s: float
    measured_s: float
    cores_used: float | None = None

    @property
    def shows_the_machine(self) -> bool:
        """Whether the cores that all laptops share here were what it waited for."""
        return self.cores_used is not None and self.cores_used > BUSY

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured; below 0: it was too fast."""
        return self.planned_s / self.measured_s - 1

    @property
    def planned_of_one(self) -> float:
        """Samples a second of all, in those of one laptop alone."""
        return self.members * self.alone_s / self.planned_s

    @property
    def of_one(self) -> float:
        """The same, as measured."""
        return self.members * self.alone_s / self.measured_s

    @property
    def lost_by_the_word(self) -> float:
        """What is lost by doing what the prediction says, together or alone, where the other would have been faster;
        a part of the speed."""
        if self.planned_of_one >= PAYS_FROM:
            return max(0.0, 1 - self.of_one)
        return max(0.0, 1 - 1 / self.of_one)


def cells(journal: Journal) -> list[Cell]:
    """All that were measured, those of one mesh together."""
    stated = [
        cell
        for mesh in MESHES
        for cell in _of_mesh(journal, case_name(mesh), f"{VALUES / 1e6:g} M values, {mesh}", mesh)
    ]
    drawn = [cell for mesh in random_meshes() for cell in _of_drawn(journal, mesh)]
    return [*stated, *drawn, *_of_wifi(journal), *_of_grid(journal)]


def _of_mesh(journal: Journal, case: str, about: str, mesh: Mesh) -> Iterator[Cell]:
    """All that is both measured and planned in the newest repeat of a case."""
    for entry in journal.of(case)[-1:]:
        figures = entry.figures
        for name in [name.removesuffix(PLANNED) for name in figures if name.endswith(PLANNED)]:
            numbers = (figures["alone"][0], figures[f"{name}{PLANNED}"][0], median(figures[name]))
            yield Cell(about, name, mesh.members, *numbers)


def _of_drawn(journal: Journal, mesh: Mesh) -> Iterator[Cell]:
    return _of_mesh(journal, random_name(mesh), mesh.about, mesh)


@dataclass(frozen=True)
class Chosen:
    """What was chosen in a cell that was drawn, and the best that was typed there.

    Attributes:
        alone: it is predicted not to pay, so one laptop trains.
        of_one: samples a second that count, in those of one laptop alone: measured, times what one is worth.
        typed_of_one: of the best of those that a person might type, one laptop alone among them.
    """

    settings: str
    alone: bool
    of_one: float
    typed: str
    typed_of_one: float

    @property
    def of_typed(self) -> float:
        """How soon the chosen one is at a loss, as a part of the best that was typed: below 1 that would have been
        sooner."""
        return self.of_one / self.typed_of_one


def chosen_in(journal: Journal, mesh: Mesh, quality: Quality) -> Chosen | None:
    """None where it is not measured."""
    entries, begin = journal.of(random_name(mesh)), f"{quality}: "
    if not entries:
        return None
    found = {cell.settings: cell for cell in _of_drawn(journal, mesh)}
    (chosen,) = (name.removeprefix(begin) for name in entries[-1].figures if name.startswith(begin))
    allowed = [job for job in BY_HAND if quality.allows(job.settings.quality)]
    typed = {str(job): job.settings.worth * found[str(job)].of_one for job in allowed}
    typed[ALONE] = 1.0
    best = max(typed, key=lambda name: typed[name])
    worth = _worth(chosen)
    alone = worth * found[chosen].planned_of_one < PAYS_FROM
    return Chosen(chosen, alone, 1.0 if alone else worth * found[chosen].of_one, best, typed[best])


def _worth(name: str) -> float:
    """Of a sample with settings that are called so."""
    sync, *more = name.split()
    codec = more[0] if more and more[0].partition(":")[0] not in TOPOLOGIES else None
    return job_settings(codec, sync).worth


def _of_wifi(journal: Journal) -> Iterator[Cell]:
    for name, net, members, _ in MEASURED:
        for entry in journal.of(measured_name(name, net, members))[-1:]:
            figures = entry.figures
            for quality in QUALITIES:
                key, measured_s = quality_figure(figures, f"{quality}: ")
                numbers = (median(figures["alone"]), figures[f"{quality}, planned"][0], measured_s)
                where = f"{model_of(name).about}, {net.holds(members)}"
                yield Cell(where, key.removeprefix(f"{quality}: "), members, *numbers)


def _of_grid(journal: Journal) -> Iterator[Cell]:
    alone, alone_cpu = (journal.figures(grid.ALONE, figure) for figure in ("step_s", "cpu_s"))
    for mbit in grid.MBIT if alone else ():
        seen = set()
        for way in (*grid.WAYS, *grid.AUTO):
            entry = grid_page.newest(journal, mbit, way)
            if entry is not None and (settings := grid_page.settings_of(entry)) not in seen:
                seen.add(settings)
                step_s = median(grid_page.steps_s(journal, entry))
                numbers = (median(alone), entry.figures["planned_s"][0], step_s)
                used_s = grid.MEMBERS * (median(entry.figures["daemons_cpu_s"]) + median(alone_cpu))
                where = f"{grid.ABOUT}, {grid.MEMBERS} on cables of {mbit:g} Mbit/s"
                yield Cell(where, settings, grid.MEMBERS, *numbers, used_s / (CORES * step_s))


def regret(together: Sequence[Cell]) -> float:
    """What the fastest by prediction of one mesh is slower than the fastest there is, one laptop alone among them."""
    best = max(1.0, *(cell.of_one for cell in together))
    chosen = max(together, key=lambda cell: cell.planned_of_one)
    return 1 - (chosen.of_one if chosen.planned_of_one >= PAYS_FROM else 1.0) / best


IN_THE_WAY = (
    "Butterfly and tree are planned a tenth too fast, and not by the shared cores: at a quarter of the rate and of the "
    "pace (25 Mbit/s, steps of 1.6 s) a ring takes 1.5 % (fp16) and 2.4 % (fp32) longer than planned, a butterfly 9 % "
    "and a tree 8 %. Counted every 40 ms there, a butterfly's uplinks are busy for 0.7 to 0.95 of the time while "
    "everybody has something to send: what one member waits for lies behind what others wait for, in several TCP flows "
    "that share a cable, where a ring has one. Cubic in place of BBR makes up for a fifth of it; a plan that has an "
    "uplink shared by several receivers finds nothing of it."
)


def page(journal: Journal) -> str:
    """In Markdown."""
    return "\n".join(_lines(journal)).rstrip() + "\n"


def _lines(journal: Journal) -> Iterator[str]:
    yield from ("# What is predicted, beside what jobs take", "", "```")
    yield "python -m tests.bench.proof predicted random wifi grid grid-periods   # on a machine that does nothing else"
    yield from ("python -m tests.bench.proof --page", "```", "")
    yield f"Real daemons with TLS in the lab train learners whose computing is paced: {VALUES / 1e6:g} M values with"
    yield f"steps of {1000 * STEP_S:g} ms here, and the models of [WiFi](wifi.md) and of [others' grid](grid.md). The"
    yield "prices are those of `whatif` and `plan`, and a learner's steps are timed as `submit` times a script's;"
    yield "nothing of them was fitted to these jobs. *of one*: samples a second of all, in those of one laptop alone."
    yield "All laptops share two cores here; predictions are of laptops that do not: where all daemons compute at once,"
    yield "most so on fast links, jobs take longer than predicted."
    yield from ("", f"**Expected, before it ran.** {EXPECTED}", "")
    found = cells(journal)
    if not found:
        yield "Not measured."
        return
    free = [cell for cell in found if not cell.shows_the_machine]
    yield f"In {len(found) - len(free)} cells, which are marked, all laptops together have used more than {BUSY:.0%} of"
    yield from ("this machine's cores: they show the machine, and are not judged.", "")
    yield from _summary(free)
    yield from (f"**What stands in the way.** {IN_THE_WAY}", "")
    yield from _drawn(journal)
    yield from ("## All cells", "")
    yield from ("| | step: measured | predicted | by it | of one: measured | predicted |", f"|{'---|' * 6}")
    for mesh, together in groupby(found, lambda cell: cell.mesh):
        yield f"| **{mesh}** | | | | | |"
        for one in together:
            mark = " (shows the machine)" * one.shows_the_machine
            numbers = (seconds(one.measured_s), seconds(one.planned_s), f"{one.error:+.1%}", f"{one.of_one:.2f}")
            yield f"| `{one.settings}`{mark} | {' | '.join(numbers)} | {one.planned_of_one:.2f} |"


def _drawn(journal: Journal) -> Iterator[str]:
    yield from ("## What is chosen, in cells that were drawn", "")
    typed = ", ".join(f"`{job}`" for job in BY_HAND)
    yield "Laptops, model, step and network as they fell, with a seed. Beside what is chosen: the best of what a person"
    yield f"might type ({typed}; for `safe` the first three) and one laptop alone. *of one*: samples a second, times"
    yield "what one is [worth](grid.md#loss-at-equal-tokens), in those of one laptop alone. *of it*: the chosen one's"
    yield f"by the typed one's; **{NEAR:g} and more is near enough**."
    yield from ("", f"**Expected, before it ran.** {EXPECTED_RANDOM}", "")
    rows = []
    near = dict.fromkeys(QUALITIES, 0)
    for mesh in random_meshes():
        cells_of = []
        for quality in QUALITIES:
            if (one := chosen_in(journal, mesh, quality)) is None:
                break
            near[quality] += one.of_typed >= NEAR
            what = ALONE if one.alone else f"`{one.settings}`"
            best = one.typed if one.typed == ALONE else f"`{one.typed}`"
            cells_of += [f"{what} {one.of_one:.2f}", f"{best} {one.typed_of_one:.2f}", f"{one.of_typed:.2f}"]
        else:
            rows.append(f"| {mesh.about} | {' | '.join(cells_of)} |")
    if not rows:
        yield from ("Not measured.", "")
        return
    heads = (*("", "`safe`, of one", "typed", "of it"), *("`fast`, of one", "typed", "of it"))
    yield from (f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows, "")
    counts = " and ".join(f"`{quality}` in {near[quality]}" for quality in QUALITIES)
    yield from (f"Near enough: {counts} of {len(rows)}.", "")


def judged(found: Sequence[Cell]) -> list[tuple[str, float, float]]:
    """What is asked of predictions, what was found, and what is the most that it may be."""
    errors = sorted(abs(cell.error) for cell in found)
    tenth = errors[math.ceil(0.9 * len(errors)) - 1]
    regrets = {mesh: regret(list(together)) for mesh, together in groupby(found, lambda cell: cell.mesh)}
    worst = max(regrets, key=lambda mesh: regrets[mesh])
    lost = max(found, key=lambda cell: cell.lost_by_the_word)
    return [
        ("error of a step, median", median(errors), MEDIAN_GOAL),
        ("error of a step, nine of ten are below", tenth, TENTH_GOAL),
        (f"the fastest by prediction is slower than the best, at most by ({worst})", regrets[worst], REGRET_GOAL),
        (
            f"lost by the wrong word, together or alone, at most ({lost.mesh}, `{lost.settings}`)",
            lost.lost_by_the_word,
            ALONE_GOAL,
        ),
    ]


def _summary(found: Sequence[Cell]) -> Iterator[str]:
    yield from (f"| of {len(found)} cells | found | goal | |", "|---|---|---|---|")
    for what, value, goal in judged(found):
        yield f"| {what} | {value:.1%} | {goal:.0%} | {'**met**' if value <= goal else 'not met'} |"
    yield ""


def write(journal: Journal, folder: Path) -> list[Path]:
    """The page; returns where it is."""
    (folder / PAGE).write_text(page(journal), encoding="utf-8")
    return [folder / PAGE]

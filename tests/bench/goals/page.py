"""The page that follows from the journal: every goal with what was before, what is now, and what stands in the way."""

import re
from pathlib import Path
from statistics import median

from tests.bench.goals.catalogue import GOALS, OUTSIDE, SECTIONS, Goal
from tests.bench.journal import Case, Journal, Section, spread

REASONS = Path(__file__).with_name("reasons.md")
DIGITS_MAX = 5
HEAD = "| what | before | now | repeats | goal | |"


def page(journal: Journal, reasons: dict[str, str]) -> str:
    """In Markdown.

    Args:
        reasons: by section, what stands in the way of goals that are not met; shown only where one is not.
    """
    lines = [
        "# The goals of speed, measured",
        "",
        "```",
        "python -m tests.bench.goals all",
        "python -m tests.bench.goals loss",
    ]
    lines += ["python -m tests.bench.goals --page", "```", "", *_conditions(journal), ""]
    for section in SECTIONS:
        names = {case.name for case in section.cases}
        goals = [goal for goal in GOALS if goal.case in names]
        lines += [f"## {section.name}: {section.about}", ""]
        if goals:
            lines += [HEAD, f"|{'---|' * (HEAD.count('|') - 1)}", *(_row(journal, goal) for goal in goals), ""]
        if figures := _all_figures(journal, section):
            lines += [*figures, ""]
        if any(_verdict(journal, goal) == "not met" for goal in goals):
            lines += ["**What stands in the way.** " + reasons.get(section.name, "Not looked into."), ""]
    return "\n".join(lines).rstrip() + "\n"


def _conditions(journal: Journal) -> list[str]:
    quiet = {case.name for section in SECTIONS if section.quiet for case in section.cases}
    seen = [entry.conditions for entry in journal.lines if not entry.short and entry.case in quiet]
    text = [
        "Made from `goals.jsonl`, which has every turn. Sides run in turn, and each repeat has processes of its own: a",
        "ratio pairs two turns of one round. *now*: the median of all pairs, and from the least to the most.",
        f"*before*: as measured from {OUTSIDE} (82080e9), unless it says otherwise. How each is measured:",
        "[the README](../goals/README.md).",
        "",
    ]
    if not seen:
        return [*text, "Nothing is measured yet."]
    versions = sorted({f"torch {one.versions['torch']}, Python {one.versions['python']}" for one in seen})
    commits = sorted({one.versions["commit"] for one in seen})
    busy, load = [one.busy_percent for one in seen], [one.load for one in seen]
    return [
        *text,
        f"{'; '.join(versions)}; code: {', '.join(commits)}; {min(one.at for one in seen)[:10]}.",
        f"In the second before a case began other work took {spread(busy, 0)} % of the cores; the load was",
        f"{spread(load, 1)}, this command's own cases before it included.",
    ]


def _verdict(journal: Journal, goal: Goal) -> str:
    values = journal.figures(goal.case, goal.figure)
    if not values:
        return "not measured"
    if goal.met_by(median(values)):
        return "met"
    equal = journal.figures(goal.case, goal.equal) if goal.equal else []
    return "within noise" if goal.within(median(values), equal) else "not met"


def _row(journal: Journal, goal: Goal) -> str:
    values = journal.figures(goal.case, goal.figure)
    digits = 2
    while values and digits < DIGITS_MAX and goal.met_by(round(median(values), digits)) != goal.met_by(median(values)):
        digits += 1  # a figure that misses its goal by a hair is not shown as one that reaches it
    now = spread(values, digits) if values else ""
    verdict = _verdict(journal, goal)
    bold = "**met**" if verdict == "met" else verdict
    return f"| {goal.what} | {goal.before} | {now} | {journal.repeats(goal.case)} | {goal.text} | {bold} |"


def _all_figures(journal: Journal, section: Section) -> list[str]:
    rows = [_figures_of(journal, case) for case in section.cases if journal.repeats(case.name)]
    return [f"- {row}" for row in rows]


def _figures_of(journal: Journal, case: Case) -> str:
    names: dict[str, None] = {}
    for entry in journal.lines:
        if entry.case == case.name and not entry.short:
            names |= dict.fromkeys(entry.figures)
    shown = []
    for name in names:
        values = journal.figures(case.name, name)
        digits = 0 if median(values) >= 100 else 1 if median(values) >= 10 else 2
        shown.append(f"`{name}` {spread(values, digits)}")
    return f"{case.name}: {', '.join(shown)}"


def reasons_of(text: str) -> dict[str, str]:
    """By section: what stands below each heading of a file of reasons."""
    parts = re.split(r"^## (\w+)\n", text, flags=re.M)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}

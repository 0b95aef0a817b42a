"""The command goes on where it was stopped, and its page says what the file says."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.goals.__main__ import FAILED
from tests.bench.goals.catalogue import GOALS, SECTIONS, Goal
from tests.bench.goals.page import REASONS, page, reasons_of
from tests.bench.goals.profiles import innermost
from tests.bench.journal import (
    Case,
    Conditions,
    Entry,
    Figures,
    Journal,
    Section,
    add_options,
    measure,
    parsed,
    spread,
)
from tests.bench.journal import run as journal_run
from tests.bench.kept_lines import KeptLinesError

QUIET = Conditions(0.1, 1.0, "2026-11-26T10:00:00+00:00", {"commit": "abc", "torch": "2.13.0", "python": "3.11"})
CASES = {case.name: case for section in SECTIONS for case in section.cases}


class Machine:
    """Cases that are counted instead of measured.

    Args:
        breaks: (case, repeat) whose measuring ends so.
    """

    def __init__(self, breaks: dict[tuple[str, int], BaseException] | None = None) -> None:
        self.measured: list[tuple[str, int]] = []
        self._breaks = breaks or {}

    def section(self, *names: str) -> Section:
        return Section("some", "", tuple(self._case(name) for name in names))

    def _case(self, name: str) -> Case:
        def measured(repeat: int, _short: bool) -> Figures:
            self.measured.append((name, repeat))
            if (error := self._breaks.get((name, repeat))) is not None:
                raise error
            return {"speed": [1.0 + repeat]}

        return replace(CASES[name], measure=measured, lacks=lambda: None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for a second at what else the machine does."""
    monkeypatch.setattr(Conditions, "now", lambda: QUIET)


def run(path: Path, section: Section, repeats: int = 2, *, short: bool = False) -> list[str]:
    journal = Journal(path)
    return measure(journal, [section], journal.missing([section], repeats, short=short), FAILED, short=short)


def test_a_second_run_goes_on_behind_an_interruption(tmp_path: Path) -> None:
    """Each case and repeat is measured once; what ctrl-C broke is measured again, and nothing else."""
    path = tmp_path / "goals.jsonl"
    first = Machine({("gpt m=1", 0): KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run(path, first.section("resnet m=1", "gpt m=1"))
    assert first.measured == [("resnet m=1", 0), ("gpt m=1", 0)]
    second = Machine()
    assert run(path, second.section("resnet m=1", "gpt m=1")) == []
    assert second.measured == [("gpt m=1", 0), ("resnet m=1", 1), ("gpt m=1", 1)]
    third = Machine()
    run(path, third.section("resnet m=1", "gpt m=1"))
    assert third.measured == []


def test_a_case_that_fails_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "goals.jsonl"
    first = Machine({("resnet m=1", 0): TimeoutError("no daemon")})
    assert run(path, first.section("resnet m=1", "gpt m=1"), 1) == ["resnet m=1"]
    second = Machine()
    assert run(path, second.section("resnet m=1", "gpt m=1"), 1) == []
    assert second.measured == [("resnet m=1", 0)]


def test_what_the_machine_lacks_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    section = machine.section("resnet m=1", "gpt m=1")
    section = replace(section, cases=(section.cases[0], replace(section.cases[1], lacks=lambda: "root is needed")))
    assert run(tmp_path / "goals.jsonl", section, 1) == ["gpt m=1"]
    assert machine.measured == [("resnet m=1", 0)]
    said = capsys.readouterr().err
    assert said.index("root is needed") < said.index("[1/1]")


def command(tmp_path: Path, typed: str, machine: Machine, *names: str) -> tuple[int, list[str]]:
    """What a command of these cases ends with, and the cases that its pages were written behind, if they were."""
    pages: list[str] = []

    def write(journal: Journal) -> list[Path]:
        pages.extend(entry.case for entry in journal.lines)
        return [tmp_path / "page.md"]

    parser = argparse.ArgumentParser()
    add_options(parser, ["some"], tmp_path / "goals.jsonl", 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["command", *typed.split()])
        options = parsed(parser, ["some"])
    return journal_run(options, [machine.section(*names)] * bool(options.sections), FAILED, write), pages


def test_a_command_measures_what_is_asked_for_and_writes_pages_only_then(tmp_path: Path) -> None:
    machine = Machine()
    assert command(tmp_path, "some --only gpt", machine, "resnet m=1", "gpt m=1") == (0, [])
    assert machine.measured == [("gpt m=1", 0)]
    assert command(tmp_path, "--page", machine, "resnet m=1") == (0, ["gpt m=1"])
    assert machine.measured == [("gpt m=1", 0)]


def test_a_command_says_by_its_exit_code_what_became_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1: a case failed, and pages are written of the others; 130: ctrl-C, and no page; 1: its file is another's."""
    failing = Machine({("resnet m=1", 0): TimeoutError("no daemon")})
    assert command(tmp_path, "some --page", failing, "resnet m=1", "gpt m=1") == (1, ["gpt m=1"])
    broken = Machine({("resnet m=1", 0): KeyboardInterrupt()})
    assert command(tmp_path, "some --page", broken, "resnet m=1") == (130, [])
    assert "goes on behind what is in" in capsys.readouterr().err
    (tmp_path / "goals.jsonl").write_text("{}\n")
    assert command(tmp_path, "some --page", Machine(), "resnet m=1") == (1, [])
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["", "other", "some --repeats 0", "some --only ("])
def test_what_makes_no_sense_is_refused_before_anything_is_measured(tmp_path: Path, typed: str) -> None:
    machine = Machine()
    with pytest.raises(SystemExit) as refused:
        command(tmp_path, typed, machine, "resnet m=1")
    assert (refused.value.code, machine.measured) == (2, [])


def test_short_runs_are_no_results(tmp_path: Path) -> None:
    """They leave all that is missing missing, and are on no page."""
    path = tmp_path / "goals.jsonl"
    run(path, Machine().section("resnet m=1"), short=True)
    machine = Machine()
    run(path, machine.section("resnet m=1"), 1)
    assert machine.measured == [("resnet m=1", 0)]
    assert Journal(path).figures("resnet m=1", "speed") == [1.0]
    assert Journal(path).repeats("resnet m=1") == 1


def test_a_line_that_is_not_its_own_is_named(tmp_path: Path) -> None:
    path = tmp_path / "goals.jsonl"
    run(path, Machine().section("resnet m=1"), 1)
    path.write_text(path.read_text() + json.dumps({"case": "resnet m=1"}) + "\n")
    with pytest.raises(KeptLinesError, match="line 2"):
        Journal(path)


def filled(tmp_path: Path, case: str, **figures: list[float]) -> Journal:
    journal = Journal(tmp_path / "goals.jsonl")
    journal.add(Entry(case, 0, False, figures, QUIET))
    return journal


def lines_of(text: str, goal: Goal) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {goal.what} |")]
    return line


def test_a_goal_is_judged_by_the_median_of_all_pairs(tmp_path: Path) -> None:
    """At least means at least; what is not met has its reason below, and what is met has none."""
    goal = next(goal for goal in GOALS if goal.case == "resnet m=1")
    reasons = {"learner": "The copy.", "tiny": "Two waits."}
    below = page(filled(tmp_path, "resnet m=1", speed=[0.5, 0.94, 3.0]), reasons)
    assert lines_of(below, goal).endswith("| 0.72 | 0.94 (0.50 to 3.00) | 1 | at least 0.95 | not met |")
    assert "The copy." in below
    assert "Two waits." not in below
    (tmp_path / "goals.jsonl").unlink()
    reached = page(filled(tmp_path, "resnet m=1", speed=[0.5, 0.95, 3.0]), reasons)
    assert lines_of(reached, goal).endswith("| **met** |")
    assert "The copy." not in reached


def test_at_most_means_at_most(tmp_path: Path) -> None:
    goal = next(goal for goal in GOALS if goal.figure == "mb")
    assert lines_of(page(filled(tmp_path, "idle daemon", mb=[60.0]), {}), goal).endswith("| **met** |")
    (tmp_path / "goals.jsonl").unlink()
    assert lines_of(page(filled(tmp_path, "idle daemon", mb=[60.1]), {}), goal).endswith("| not met |")


def test_a_loss_is_judged_by_how_far_equal_things_are_apart(tmp_path: Path) -> None:
    """The hook beside itself from another first basis says so, in either direction; what is further off is not met."""
    goal = next(goal for goal in GOALS if goal.equal is not None)
    assert goal.equal is not None
    for loss, again, verdict in (
        *((0.9, 1.0, "**met**"), (1.3, 1.0, "not met"), (1.3, 1.4, "within noise"), (1.3, 0.7, "within noise")),
        (1.5, 1.4, "not met"),
    ):
        journal = filled(tmp_path, goal.case, **{goal.figure: [loss], goal.equal: [1.0, again]})
        assert lines_of(page(journal, {}), goal).endswith(f"| {verdict} |"), (loss, again)
        (tmp_path / "goals.jsonl").unlink()
    journal = filled(tmp_path, goal.case, **{goal.figure: [1.01]})
    assert lines_of(page(journal, {}), goal).endswith("| not met |"), "nothing says how far"


def test_a_page_without_any_result_says_so(tmp_path: Path) -> None:
    text = page(Journal(tmp_path / "none.jsonl"), {})
    assert "Nothing is measured yet." in text
    assert text.count("not measured |") == len(GOALS)


def test_every_goal_is_of_a_case_that_there_is() -> None:
    assert {goal.case for goal in GOALS} <= CASES.keys()
    assert len({goal.what for goal in GOALS}) == len(GOALS)


def test_reasons_are_of_sections_that_there_are() -> None:
    reasons = reasons_of(REASONS.read_text("utf-8"))
    assert reasons.keys() <= {section.name for section in SECTIONS}
    assert all(reasons.values())


def test_all_sections_of_a_quiet_machine_take_half_an_hour_or_so() -> None:
    """Three repeats: at most 35 minutes together, none more than 15."""
    minutes = [3 * sum(case.seconds for case in section.cases) / 60 for section in SECTIONS if section.quiet]
    assert sum(minutes) <= 35
    assert max(minutes) <= 15


def test_a_profile_counts_the_innermost_functions() -> None:
    """By library or package, and by function; callers count nothing."""
    stacks = "main;run;add (numpy/core/umath.so) 20\nmain;mul (numpy/core/umath.so) 20\nmain;read (libc.so.6) 50\n"
    stacks += "main;take (meshwire/frames/parser.py:3);see (meshwire/frames/parser.py:9) 10\n"
    by_library, by_function = innermost(stacks).split("by function\n")
    assert by_library.splitlines() == [" 50.0%  read (libc.so.6)", " 40.0%  umath.so", " 10.0%  Python: meshwire"]
    assert by_function.splitlines()[:2] == [" 50.0%  read (libc.so.6)", " 20.0%  add (numpy/core/umath.so)"]


def test_a_spread_of_equal_values_is_one_value() -> None:
    assert spread([2.0, 2.0]) == "2.00"
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"

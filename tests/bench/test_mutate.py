"""Where a bug is planted: in the one function that it names, wherever that lies, and nowhere else."""

from pathlib import Path

import pytest

from tests.bench.bugs import BUGS, Bug
from tests.bench.mutate import ROOT, DoesNotApply, place, planted

SOURCE = '''
def other(value: int) -> int:
    return value + 1


class Counter:
    def count(self, value: int) -> int:
        """Café: offsets are of characters."""
        if value:
            return value + 1
        return 0

    async def twice(self, value: int) -> int:
        return (value + 1) * (value + 1)
'''


def bug(function: str, old: str = "value + 1") -> Bug:
    return Bug("a bug", "meshwire.counter", function, old, "value", "tests/wire/test_counter.py")


def test_a_bug_is_planted_in_its_function_alone() -> None:
    text = planted(SOURCE, bug("Counter.count"))
    assert text == SOURCE.replace("            return value + 1\n", "            return value\n")


@pytest.mark.parametrize("function", ["count", "Counter.twice", "Counter.gone", "Counter"])
def test_a_text_that_is_not_there_once_does_not_apply(function: str) -> None:
    with pytest.raises(DoesNotApply):
        planted(SOURCE, bug(function))


def test_a_function_is_found_in_another_module(tmp_path: Path) -> None:
    moved = tmp_path / "protocol" / "meshwire" / "counting.py"
    moved.parent.mkdir(parents=True)
    moved.write_text(SOURCE, "utf-8")
    assert place(tmp_path, bug("Counter.count"))[0] == moved
    (moved.parent / "twin.py").write_text(SOURCE, "utf-8")
    with pytest.raises(DoesNotApply, match="2 modules"):
        place(tmp_path, bug("Counter.count"))
    (moved.parent / "counter.py").write_text(SOURCE, "utf-8")
    assert place(tmp_path, bug("Counter.count"))[0].name == "counter.py", "the module that is named goes first"


@pytest.mark.slow
def test_each_bug_can_be_planted() -> None:
    """Its text is still there: whoever changes the code writes its bugs anew."""
    for planned in BUGS:
        place(ROOT, planned)


def test_each_bugs_test_lies_where_it_is_said_to() -> None:
    """Else the bug is never tried: pytest finds nothing to run."""
    modules = {bug.name: bug.test.split(" -k ")[0].split("::")[0] for bug in BUGS}
    missing = {name: module for name, module in modules.items() if not (ROOT / module).is_file()}
    assert not missing


def test_each_bug_has_a_name_of_its_own_and_changes_something() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert all(bug.old != bug.new for bug in BUGS)

"""Whether tests notice: bugs planted one after the other in a copy of the tree, each with the test that must fail.

A bug is found by the name of its function, so a file may move; one whose text is not there any more is named, and is to
be written anew or dropped. Nothing is planted in the working tree.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path

from tests.bench.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
PACKAGES = ("meshtrain", "daemon/meshtraind", "protocol/meshwire")
COPIED = (*PACKAGES, "tests", "README.md", "pyproject.toml")
TIMEOUT_S = 180.0  # of one test; longer is caught as well: it hangs
FAILED, PASSED = 1, 0  # pytest's exit codes; all others mean that it could not run


class Outcome(Enum):
    """What became of a bug."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    DOES_NOT_APPLY = "does not apply"
    NO_TEST = "its test does not pass without it"


class DoesNotApply(Exception):
    """The text of a bug is not, or not once, where it should be."""


@lru_cache(maxsize=512)  # each module once, whatever the number of bugs that are looked for in it
def spans(source: str) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Where functions lie in a text, by qualified name ("Class.method", or "Class"): offsets of begin and end."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: dict[str, list[tuple[int, int]]] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                assert child.end_lineno is not None
                found.setdefault(name, []).append((starts[child.lineno - 1], starts[child.end_lineno]))
                look(child, f"{name}.")
            else:
                look(child, prefix)

    look(ast.parse(source), "")
    return found


def planted(source: str, bug: Bug) -> str:
    """The text with the bug. Raises DoesNotApply."""
    within = [(first, end) for first, end in spans(source).get(bug.function, ()) if bug.old in source[first:end]]
    count = sum(source[first:end].count(bug.old) for first, end in within)
    if count != 1:
        raise DoesNotApply(f"{bug.function} holds {bug.old!r} {count} times")
    ((first, end),) = within
    changed = source[first:end].replace(bug.old, bug.new)
    ast.parse(f"if True:\n{changed}" if changed[0].isspace() else changed)  # the whole module takes far longer
    return source[:first] + changed + source[end:]


def place(root: Path, bug: Bug) -> tuple[Path, str]:
    """The file of a bug, and its text with it; in another module than before if there is one. Raises DoesNotApply."""
    last = bug.module.rpartition(".")[2]
    found, why = [], DoesNotApply(f"there is no {bug.function} with {bug.old!r}")
    for path in _files(root, last):
        source = path.read_text("utf-8")
        if bug.old not in source or bug.function not in spans(source):  # parsing takes long
            continue
        try:
            found.append((path, planted(source, bug)))
        except DoesNotApply as error:
            why = error
        if found and path.stem == last:
            break
    if len(found) != 1:
        raise why if not found else DoesNotApply(f"{len(found)} modules have a {bug.function} with that text")
    return found[0]


def _files(root: Path, first: str) -> Iterator[Path]:
    """All modules, those of this name first; the others are looked for only when they are asked for."""
    for pattern in (f"{first}.py", "*.py"):
        found = [path for package in PACKAGES for path in (root / package).rglob(pattern)]
        yield from sorted(path for path in found if pattern != "*.py" or path.stem != first)


def copied(target: Path) -> None:
    """The tree, as far as tests need it."""
    for name in COPIED:
        source, to = ROOT / name, target / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "results"))
        else:
            shutil.copyfile(source, to)


def run(root: Path, test: str) -> int | None:
    """pytest's exit code; None: it took too long. `test`: a module or node, perhaps with ` -k WORDS`."""
    node, _, words = test.partition(" -k ")
    paths = [str(root), *(str((root / package).parent) for package in PACKAGES[1:])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-m", "", "-p", "no:cacheprovider", node]
    command += ["-k", words] if words else []
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=told, stderr=told, start_new_session=True)
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()


def tried(root: Path, bug: Bug, sound: dict[str, bool]) -> tuple[Outcome, str]:
    """Plants one bug in the copy, runs its test, and takes it out again. `sound`: which tests pass without any."""
    try:
        path, text = place(root, bug)
    except DoesNotApply as error:
        return Outcome.DOES_NOT_APPLY, str(error)
    if bug.test not in sound:
        sound[bug.test] = run(root, bug.test) == PASSED
    if not sound[bug.test]:
        return Outcome.NO_TEST, bug.test
    before = path.read_text("utf-8")
    path.write_text(text, "utf-8")
    try:
        code = run(root, bug.test)
    finally:
        path.write_text(before, "utf-8")
    if code is None:
        return Outcome.CAUGHT, "its test hangs"
    if code == PASSED:
        return Outcome.SURVIVED, bug.test
    return Outcome.CAUGHT, "" if code == FAILED else f"pytest ended with {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 unless every bug was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mutate", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="bugs whose name begins so; may be repeated")
    parser.add_argument("--list", action="store_true", help="name them and their tests, and plant none")
    options = parser.parse_args(arguments)
    chosen = [bug for bug in BUGS if not options.only or any(bug.name.startswith(name) for name in options.only)]
    if not chosen:
        parser.error(f"no bug's name begins with {' or '.join(options.only)}: see --list")
    if options.list:
        for bug in chosen:
            print(f"{bug.name:34} {bug.module}.{bug.function}\n{'':34} {bug.test}")
            try:
                place(ROOT, bug)
            except DoesNotApply as error:
                print(f"{'':34} {Outcome.DOES_NOT_APPLY.value}: {error}")
        return 0
    outcomes: list[Outcome] = []
    sound: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        root = Path(folder)
        copied(root)
        for bug in chosen:
            began_s = time.monotonic()
            outcome, more = tried(root, bug, sound)
            outcomes.append(outcome)
            print(f"{outcome.value:15} {bug.name:34} {time.monotonic() - began_s:5.1f} s  {more}", flush=True)
    counts = [f"{outcomes.count(outcome)} {outcome.value}" for outcome in Outcome if outcome in outcomes]
    print(f"{len(chosen)} bugs: {', '.join(counts)}")
    return 0 if set(outcomes) == {Outcome.CAUGHT} else 1


if __name__ == "__main__":
    raise SystemExit(main())

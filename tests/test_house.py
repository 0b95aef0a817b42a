"""The rules of the house that a machine can see: who may import whom, what is shipped, where things lie."""

import ast
import asyncio
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "meshtrain": ROOT / "meshtrain",
    "meshtraind": ROOT / "daemon/meshtraind",
    "meshwire": ROOT / "protocol/meshwire",
}
TOP_LEVEL = {
    *(
        ".ci",
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
    ),
    *("protocol", "daemon", "meshtrain", "tests", "deploy"),
}
# An __init__.py in one of these would shadow other people's packages of that name.
NO_PACKAGES = ("daemon", "protocol", "tests", "deploy")
FOLDERS_WITHOUT_MAP = {
    ".ci",  # one script; tests/README.md tells of it
    *(".github", ".github/workflows"),  # a README there would be shown in place of the top one
    # These are copied into a user's own folder; meshtrain/examples/README.md tells of them.
    *("meshtrain/examples/templates", "meshtrain/examples/templates/gpt", "meshtrain/examples/templates/mlp"),
}

# What the protocol may build on: data, arithmetic and checks; nothing that waits, draws, or touches the machine.
PURE = {
    *("abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "ipaddress"),
    *("itertools", "json", "math", "operator", "re", "statistics", "string", "struct", "types", "typing"),
    *("unicodedata", "msgpack", "pydantic", "meshwire"),
}


@cache
def tracked() -> tuple[str, ...]:
    """What a clone holds."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git clone")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for path in done.stdout.split("\0") if path and (ROOT / path).exists())


@cache
def modules(package: str) -> tuple[tuple[str, ast.Module], ...]:
    """(path, tree) of every module of a package."""
    paths = sorted(PACKAGES[package].rglob("*.py"))
    assert paths
    return tuple((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))) for path in paths)


def imported(tree: ast.AST, *, for_types_too: bool) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import anywhere in a module, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the direction"
            assert node.module is not None
            yield node.module.split(".")[0], node.lineno
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types_too:
            for branch in node.orelse:
                yield from imported(branch, for_types_too=for_types_too)
        else:
            yield from imported(node, for_types_too=for_types_too)


def importers(package: str, of: set[str], *, for_types_too: bool = True) -> list[str]:
    return [
        f"{path}:{line} imports {name}"
        for path, tree in modules(package)
        for name, line in imported(tree, for_types_too=for_types_too)
        if name in of
    ]


def test_meshwire_is_pure() -> None:
    """The protocol: no asyncio, sockets, clocks, randomness, threads, torch, numpy; it imports neither neighbour."""
    impure = [
        f"{path}:{line} imports {name}"
        for path, tree in modules("meshwire")
        for name, line in imported(tree, for_types_too=True)
        if name not in PURE
    ]
    assert not impure


def test_imports_point_one_way() -> None:
    """meshwire <- meshtrain, meshwire <- meshtraind: those two never import each other."""
    assert not importers("meshtraind", {"meshtrain"})
    assert not importers("meshtrain", {"meshtraind"})


def test_torch_stays_with_the_training_modules() -> None:
    """The daemon never imports torch; of meshtrain only `train` and the examples do."""
    assert not importers("meshtraind", {"torch", "safetensors"})
    elsewhere = importers("meshtrain", {"torch", "safetensors"}, for_types_too=False)
    assert not [found for found in elsewhere if not found.startswith(("meshtrain/train/", "meshtrain/examples/"))]


@pytest.mark.parametrize("module", ["meshtrain", "meshtrain.cli", "meshtrain.cli.app", "meshtraind.cli", "meshwire"])
def test_starting_up_loads_neither_torch_nor_numpy(module: str) -> None:
    """A command answers at once, an idle daemon is small, and a hub has no torch to load."""
    code = f"import {module}, sys; print(*sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    paths = [str(folder.parent) for folder in PACKAGES.values()]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_folders_around_the_packages_are_no_packages() -> None:
    """`import daemon` and `import protocol` mean other people's packages, also from a clone's root."""
    assert not [f"{folder}/__init__.py" for folder in NO_PACKAGES if (ROOT / folder / "__init__.py").exists()]
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_wheel_holds_exactly_three_packages(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith("NOTICE.md") for name in names), "the licences of dependencies"
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_top_level_holds_only_what_was_agreed() -> None:
    assert {path.split("/")[0] for path in tracked()} <= TOP_LEVEL


def test_every_folder_has_a_map() -> None:
    """A README in each folder says what every file in it is."""
    folders = {parent.as_posix() for path in tracked() for parent in Path(path).parents} - {"."}
    without = {folder for folder in folders - FOLDERS_WITHOUT_MAP if not (ROOT / folder / "README.md").exists()}
    assert not without


@pytest.mark.parametrize(
    "folder",
    [
        "protocol/meshwire",
        "protocol/meshwire/messages",
        "daemon/meshtraind",
        "daemon/meshtraind/codecs",
        "meshtrain",
        "meshtrain/train",
        "meshtrain/cli",
        "meshtrain/examples",
    ],
)
def test_a_map_names_every_module_of_its_folder_and_none_that_is_gone(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text("utf-8")
    there = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
    named = set(re.findall(r"`(\w+\.py)`", text))
    assert not there - named, "modules that the map does not name"
    everywhere = {path.name for package in PACKAGES.values() for path in package.rglob("*.py")}
    assert not named - everywhere - {path.name for path in (ROOT / "tests").rglob("*.py")}, "modules that are gone"


RULES_NOT_BUILT = {"R6"}  # several learners on one machine


def quoted_by_quick_tests() -> set[str]:
    """The numbers of the rules that stand in test modules, but for tests that are marked slow; "R0 to R5" is six."""
    quoted: set[str] = set()
    for path in sorted((ROOT / "tests").glob("*/*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        slow = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
        ]
        whole = [node for node in tree.body if isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node.value)]
        if any(ast.unparse(node.targets[0]) == "pytestmark" for node in whole):
            continue
        lines = path.read_text("utf-8").splitlines()
        for node in slow:
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        text = "\n".join(lines)
        quoted.update(re.findall(r"\b[A-Z][0-9]{1,2}a?\b", text))
        for letter, first, last in re.findall(r"\b([A-Z])([0-9]{1,2}) to \1([0-9]{1,2})\b", text):
            quoted.update(f"{letter}{number}" for number in range(int(first), int(last) + 1))
    return quoted


def test_plain_pytest_proves_every_rule() -> None:
    """Who runs the README's command has every rule proved once; slow tests prove them again, at greater length."""
    rules = set(re.findall(r"^- \*\*([A-Z][0-9]+a?)\b", (ROOT / "protocol/RULES.md").read_text("utf-8"), re.MULTILINE))
    assert len(rules) > 40
    assert not sorted(rules - quoted_by_quick_tests() - RULES_NOT_BUILT)


def test_no_document_installs_a_strangers_package() -> None:
    """On the package index `meshtrain` is somebody else's; installing it runs that code."""
    command = re.compile(r"(pip3?|pipx|uv( pip| tool)?)\s+install\s+([\w./=\-]+\s+)*[\"']?meshtrain\b(?!d)")
    assert command.search("pip install -U meshtrain")
    saying = [
        path
        for path in tracked()
        if path.endswith((".md", ".py", ".toml", ".service", ".yml")) and path != "tests/test_house.py"
        if command.search((ROOT / path).read_text("utf-8"))
    ]
    assert not saying


def test_tasks_are_started_in_one_place() -> None:
    """A task that nobody awaits can be collected and loses its error: only meshtraind.runtime.tasks starts one."""
    starters = {"create_task", "ensure_future"}
    found = [
        f"{path}:{node.lineno}"
        for package in PACKAGES
        for path, tree in modules(package)
        if path != "daemon/meshtraind/runtime/tasks.py"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in starters)
        or (isinstance(node, ast.Name) and node.id in starters)
    ]
    assert not found


def runtime_requirements() -> dict[str, Requirement]:
    """What `pip install .` needs, by normalised name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {canonicalize_name(one.name): one for one in map(Requirement, project["dependencies"])}


def pinned_versions() -> dict[str, list[str]]:
    """The versions in deploy/constraints.txt by name: several where they depend on the Python."""
    found: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.\-]+)==(\S+)", (ROOT / "deploy/constraints.txt").read_text("utf-8"), re.M):
        found.setdefault(canonicalize_name(name), []).append(version)
    return found


def test_the_constraints_satisfy_what_is_required() -> None:
    """Every run-time dependency has a version in deploy/constraints.txt, within the range of pyproject.toml."""
    required, pinned = runtime_requirements(), pinned_versions()
    assert not required.keys() - pinned.keys(), "dependencies without a version: make deploy/constraints.txt anew"
    outside = [
        f"{name}=={version}, required: {requirement.specifier}"
        for name, requirement in required.items()
        for version in pinned[name]
        if version not in requirement.specifier
    ]
    assert not outside


def test_every_pinned_file_has_a_hash_and_no_index_is_named() -> None:
    """`pip install --require-hashes` refuses what has none; where files come from is whoever installs's choice."""
    text = (ROOT / "deploy/constraints.txt").read_text("utf-8")
    blocks = re.split(r"^(?=\w)", re.sub(r"^\s*#.*\n", "", text, flags=re.M), flags=re.M)[1:]
    assert len(blocks) == sum(map(len, pinned_versions().values()))
    assert not [block.split()[0] for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}", block)]
    assert not re.search(r"://|--index-url|--find-links", text)


def test_the_notice_names_every_dependency() -> None:
    """Whoever passes meshtrain on finds all licences in one place."""
    notice = {
        canonicalize_name(word) for word in re.findall(r"[\w\-]+", (ROOT / "deploy/NOTICE.md").read_text("utf-8"))
    }
    builds_only = {"hatchling", "packaging", "pluggy", "tomlkit", "trove-classifiers"}
    assert not pinned_versions().keys() - builds_only - notice


def test_every_promise_names_a_test_that_exists() -> None:
    """.github/SECURITY.md says what is promised to whom; what it names as proof is there."""
    text = (ROOT / ".github/SECURITY.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists()
        or not re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text("utf-8"), re.M)
    ]
    assert not missing
    tables = text.partition("## What is not promised")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows
    assert not [row for row in rows if "::" not in row], "promises without a test"


@pytest.mark.asyncio
async def test_asyncio_watches_itself() -> None:
    """Tests run in asyncio's debug mode, which reports what was never awaited and what blocks the loop."""
    assert asyncio.get_running_loop().get_debug()

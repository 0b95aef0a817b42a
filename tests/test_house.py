"""The rules of the house that a machine can see: who may import whom, what is shipped, where things lie."""

import ast
import asyncio
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
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
    "daemon/meshtraind/dashboard/static",  # the page's files, which are served; the room's README tells of them
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


def imported(tree: ast.AST, for_types_too: bool) -> Iterator[tuple[str, int]]:
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
                yield from imported(branch, for_types_too)
        elif not isinstance(node, ast.expr):  # in which no statement is
            yield from imported(node, for_types_too)


@cache
def imports(package: str, *, for_types_too: bool = True) -> tuple[tuple[str, str, int], ...]:
    """(path, top-level package, line) of every import of a package's modules."""
    return tuple((path, *found) for path, tree in modules(package) for found in imported(tree, for_types_too))


def importers(package: str, of: set[str], *, for_types_too: bool = True) -> list[str]:
    found = imports(package, for_types_too=for_types_too)
    return [f"{path}:{line} imports {name}" for path, name, line in found if name in of]


def test_meshwire_is_pure() -> None:
    """The protocol: no asyncio, sockets, clocks, randomness, threads, torch, numpy; it imports neither neighbour."""
    impure = [f"{path}:{line} imports {name}" for path, name, line in imports("meshwire") if name not in PURE]
    assert not impure


def test_imports_point_one_way() -> None:
    """meshwire <- meshtrain, meshwire <- meshtraind: those two never import each other."""
    assert not importers("meshtraind", {"meshtrain"})
    assert not importers("meshtrain", {"meshtraind"})


def test_torch_stays_with_the_training_modules() -> None:
    """The daemon never imports torch; of meshtrain `train`, the torch backend and the examples do."""
    assert not importers("meshtraind", {"torch", "safetensors"})
    elsewhere = importers("meshtrain", {"torch", "safetensors"}, for_types_too=False)
    rooms = ("meshtrain/train/", "meshtrain/torch_backend/", "meshtrain/examples/")
    assert not [found for found in elsewhere if not found.startswith(rooms)]


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
    """A README in each folder says what every file in it is. Of tests, which lie as what they prove does, one for all
    rooms of a package.
    """
    folders = {parent.as_posix() for path in tracked() for parent in Path(path).parents} - {"."}
    folders = {folder for folder in folders if not re.fullmatch(r"tests/(wire|daemon|train)/\w+", folder)}
    without = {folder for folder in folders - FOLDERS_WITHOUT_MAP if not (ROOT / folder / "README.md").exists()}
    assert not without


@cache
def paths_of_modules() -> tuple[str, ...]:
    """Every Python file of the three packages and of the tests, as absolute paths."""
    return tuple(path.as_posix() for top in [*PACKAGES.values(), ROOT / "tests"] for path in top.rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({path.parent for top in PACKAGES.values() for path in top.rglob("*.py")}))
def test_a_room_has_a_door_sign(folder: Path) -> None:
    """Its README names all that lies in it, and nothing that is gone."""
    if folder.relative_to(ROOT).as_posix() in FOLDERS_WITHOUT_MAP:
        return
    text = (folder / "README.md").read_text("utf-8")
    there = {path.name for path in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    named = re.findall(r"`(?:meshtrain/|daemon/|protocol/)?((?:\w+/)*\w+\.py)`", text)
    assert not there - set(named), "modules that it does not name"
    rooms = {path.parent.name for path in folder.glob("*/*.py")} - {"templates"}
    assert not rooms - set(re.findall(r"\]\((?:\w+/)*?(\w+)/README\.md\)", text)), "rooms that it does not name"
    assert not [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in paths_of_modules())]


OTHERS_FILES = {"_state.py", "dgc/memory.py"}  # of h11, and of a paper's authors


def test_a_file_that_is_named_is_there() -> None:
    """In guides and docstrings, by the end of its path: who renames one renames it there. X and NAME stand for any."""
    ours = [f"/{path}" for path in tracked()]
    gone = set()
    for path in tracked():
        if path.endswith((".md", ".py")) and path != "CHANGELOG.md":  # which tells of what was
            for name in re.findall(r"`\.*/?((?:\w+/)*\w+\.py)`", (ROOT / path).read_text("utf-8")):
                placeholder = re.search(r"(?<![a-z])(X|NAME)\.py$", name)
                if not placeholder and name not in OTHERS_FILES and not any(file.endswith(f"/{name}") for file in ours):
                    gone.add(f"{path}: {name}")
    assert not gone


@pytest.mark.parametrize("folder", sorted({path.parent for top in PACKAGES.values() for path in top.rglob("*.py")}))
def test_a_room_is_small_enough_to_look_around_in(folder: Path) -> None:
    """At most 15 files; codecs are one file each, and are not counted."""
    if folder == PACKAGES["meshtraind"] / "codecs":
        return
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 15


@cache
def classes() -> tuple[tuple[str, ast.ClassDef], ...]:
    """(path, class) of all classes of the three packages but for templates, which are copied into a user's folder."""
    return tuple(
        (path, node)
        for package in PACKAGES
        for path, tree in modules(package)
        if "/examples/" not in path
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )


def test_a_class_name_means_one_thing() -> None:
    """Who reads a name knows which class it is, wherever in the project it stands."""
    found: dict[str, list[str]] = {}
    for path, node in classes():
        found.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_what_is_made_of_many_things_is_made_of_few_objects() -> None:
    """A constructor takes at most eight parameters: what always comes together is one object."""
    long = [
        f"{path}: {node.name} takes {count}"
        for path, node in classes()
        for made in constructors(node)
        if (count := len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1) > 8
    ]
    assert not long


@cache
def names_of_functions() -> frozenset[str]:
    """The names that our modules give to types of functions, and `Callable` itself."""
    nodes = (node for package in PACKAGES for _, tree in modules(package) for node in tree.body)
    given = ((node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign))
    named = {ast.unparse(name) for name, value in given if ast.unparse(value).startswith("Callable[")}
    return frozenset({"Callable", *named})


def constructors(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Its `__init__`, if it has one."""
    return [made for made in node.body if isinstance(made, ast.FunctionDef) and made.name == "__init__"]


def functions_given(node: ast.ClassDef) -> list[str]:
    """The parameters of a class's constructor, a dataclass's fields included, that are functions."""
    parameters = [
        (each.arg, each.annotation)
        for made in constructors(node)
        for each in ast.walk(made.args)
        if isinstance(each, ast.arg)
    ]
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
        parameters += [(ast.unparse(field.target), field.annotation) for field in fields]
    words = {name: set(re.findall(r"\w+", ast.unparse(kind))) for name, kind in parameters if kind is not None}
    return [name for name, kind in words.items() if kind & names_of_functions()]


# What these are made of is arithmetic: entries of a table, each with its formulas.
TABLES_OF_FORMULAS = {"Family", "Topology"}


def test_who_is_asked_for_several_things_has_a_name() -> None:
    """Two functions for one object are somebody's methods: a Protocol names them, and a class implements it."""
    several = {node.name: (path, given) for path, node in classes() if len(given := functions_given(node)) > 1}
    assert not {name: what for name, what in several.items() if name not in TABLES_OF_FORMULAS}


def test_nothing_is_made_of_what_is_made_later() -> None:
    """A lambda in a constructor that names an attribute which is not there yet hides a wrong order."""
    early = []
    for path, node in classes():
        for made in constructors(node):
            own = [
                each for each in ast.walk(made) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            ]
            stored = {each.attr: each.lineno for each in own if isinstance(each.ctx, ast.Store)}
            for function in ast.walk(made):
                if isinstance(function, ast.Lambda):
                    named = [each for each in ast.walk(function) if each in own]
                    late = [each for each in named if stored.get(each.attr, 0) > function.lineno]
                    early += [f"{path}:{each.lineno} {node.name} names {ast.unparse(each)}" for each in late]
    assert not early


@cache
def imported_modules() -> Mapping[str, set[str]]:
    """What each of our modules imports of our modules, anywhere in it: at the top, in functions, for types alone."""
    names: dict[str, ast.Module] = {}
    for package, top in PACKAGES.items():
        for path, tree in modules(package):
            parts = (package, *(ROOT / path).relative_to(top).with_suffix("").parts)
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
    found: dict[str, set[str]] = {}
    for name, tree in names.items():
        found[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name].update(full & names.keys() or {node.module or ""})
        found[name] = (found[name] & names.keys()) - {name}
    return found


def test_no_module_imports_itself_by_a_detour() -> None:
    """Who is in a circle can be read only together with all others in it. Lazy imports and those for types count."""
    waiting = dict(imported_modules())
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not {name: sorted(needs & waiting.keys()) for name, needs in waiting.items()}


def floors(folder: str) -> list[str]:
    """The rooms and single files of a folder, bottom up, as the table in its README has them: "rounds", "app"."""
    text = (ROOT / folder / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (?:`([\w/]+)\.py`|\[([\w/]+)/\]\()", text, re.MULTILINE)
    return [file or room for file, room in rows]


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("meshwire", "protocol/meshwire"),
        ("meshtraind", "daemon/meshtraind"),
        ("meshtrain", "meshtrain"),
        ("meshtrain.train", "meshtrain/train"),
        ("meshtrain.cli", "meshtrain/cli"),
    ],
)
def test_rooms_import_only_what_lies_below(package: str, folder: str) -> None:
    """The map of a package is the order of its layers, bottom up, and the only place where it is written down."""
    order = floors(folder)

    def floor(module: str) -> int | None:
        """None: another package, or the entry `__main__` and the package itself, which anybody may be."""
        inner = module.removeprefix(package).removeprefix(".").replace(".", "/")
        if not module.startswith(f"{package}.") or inner == "__main__":
            return order.index("__init__") if module == package and "__init__" in order else None
        fits = [room for room in order if f"{inner}/".startswith(f"{room}/")]
        assert fits, f"{folder}/README.md has no row for {module}"
        return order.index(max(fits, key=len))

    wrong = [
        f"{module} imports {needed}, which the map has above it"
        for module, needs in imported_modules().items()
        for needed in needs
        if (here := floor(module)) is not None and (there := floor(needed)) is not None and there > here
    ]
    assert not wrong


def test_who_catches_everything_passes_it_on_or_says_why() -> None:
    """A bug that is caught is a bug that nobody finds. Cleaning up and raising needs no reason."""
    silent = []
    for path, tree in (found for package in PACKAGES for found in modules(package)):
        lines = (ROOT / path).read_text("utf-8").splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            broad = re.search(r"\b(Base)?Exception\b", caught)
            why = "#" in lines[node.lineno - 1] + lines[node.lineno]
            if broad and not isinstance(node.body[-1], ast.Raise) and not why:
                silent.append(f"{path}:{node.lineno}")
    assert not silent


def quoted_by_quick_tests() -> set[str]:
    """The numbers of the rules that stand in test modules, but for tests that are marked slow; "R0 to R5" is six."""
    quoted: set[str] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text("utf-8")
        tree = ast.parse(text if "mark.slow" in text else "")  # what is not marked need not be understood
        slow = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if any(ast.unparse(decorator) == "pytest.mark.slow" for decorator in node.decorator_list)
        ]
        whole = [node for node in tree.body if isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node.value)]
        if any(ast.unparse(node.targets[0]) == "pytestmark" for node in whole):
            continue
        lines = text.splitlines()
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
    assert not sorted(rules - quoted_by_quick_tests())


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


def test_every_equality_names_tests_that_exist() -> None:
    """tests/train/EQUALITIES.md says where each is proved, in process and on real daemons."""
    text = (ROOT / "tests/train/EQUALITIES.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / path).read_text("utf-8"), re.M)
    ]
    assert not missing


@pytest.mark.asyncio
async def test_asyncio_watches_itself() -> None:
    """Tests run in asyncio's debug mode, which reports what was never awaited and what blocks the loop."""
    assert asyncio.get_running_loop().get_debug()

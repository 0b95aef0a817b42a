"""What runs with which torch: makes an environment for each version, runs a stated set in it, and writes a page.

    python -m tests.torch_backend.versions --torch 2.6.0 2.9.1 [--index-url URL] [--suite]
    python -m tests.torch_backend.versions --environment ../venv-2.14 [--note TEXT] [--suite]

Each version of `--torch` gets a virtual environment under `--into`, which is kept and used again. By default wheels are
those of PyTorch's own index for CPUs; `--index-url ""` takes what pip finds. An `--environment` is one that there is
already, with torch and what the tests need. About four minutes a version on two cores. The page is
`tests/bench/results/torch_versions.md`; a version that was run before and not now keeps its line there.
"""

import argparse
import ast
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.torch_backend.test_real_groups import SLICE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "bench" / "results" / "torch_versions.md"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
NOT_FOR_THIS = ("torch", "ruff", "mypy", "types-psutil")  # of the development extra; torch comes first, and alone
TIMEOUT_S = 900.0
REAL_JOBS = ("tests/torch_backend/test_real_groups.py", "tests/torch_backend/test_real_reconfigure.py")
LINE = re.compile(r"<!-- (\{.*\}) -->")

BEGINS = """# What was run with which torch

```
python -m tests.torch_backend.versions --torch 2.6.0 2.9.1
```

pip takes `torch>=2.6,<2.14`; CI runs the newest of these, and all tests. A wider range would make pip take builds with
CUDA. With the others this was run, on Linux x86-64, two cores:

- *mt.prepare*: the quick tests of tests/train: numerics against one process, every codec and mode, packing.
- *groups*: the quick tests of tests/torch_backend: every collective, the store, reconfiguration.
- *torch's suite*: torch's own tests for torch.distributed, three ranks on three daemons: those that CI runs, or, where
  about 90 are counted, all that do not ask for a GPU or more ranks.
- *real jobs*: the slow tests of tests/torch_backend: DDP scripts for torchrun, killed ranks and daemons.
- *demo*: `meshtrain demo --steps 20` ends well.
"""

MIXED = """
Why: Muon comes with torch 2.9, and where it is missing `--sync muloco` is refused by name. With 2.6.0 and 2.9.1 the
ten of torch's suite miss their marks in the profiler, which are lost where they end in another thread; what is
exchanged is right. `test_ddp_logging_data_cpu` compares the backend's name with "gloo". Of the real jobs one was that
slice of the suite.

Going on with those that are left (`enable_reconfigure=True`) is torch's from 2.14 on, and was run with it; with the
others by what torch would call.

## Several versions in one job

`submit` names it ("torch differs: 2.13.0+cpu on anna, 2.14.1 on bert; ...") and goes on. Nothing that travels is
torch's own but pickles (`all_gather_object`, checkpoints), so both ways work between versions. A kernel of one
version may compute another last bit than that of another. Replicas of mt.prepare are compared (O9): one that differs
is named and loads the others' state, which costs time whenever it happens. With torch.distributed nothing compares
the ranks' weights, as with gloo. `enable_reconfigure` needs 2.14 on all.

Run by hand, 2.13.0 on two daemons and 2.14.1 on a third:

| script | what came of it |
|---|---|
| mt.prepare, SGD, 160 rounds | succeeded; replicas compared after each round, always bit-equal |
| DDP, SGD | succeeded; the ranks' weights bit-equal |
| ZeRO-1, PowerSGD and fp16 hooks, Join | succeeded; results as in one process |
| FSDP2, DTensor, distributed checkpoints; minGPT | succeeded; results as they should be |
"""


@dataclass(frozen=True)
class CheckResult:
    """What became of one part of the set.

    Attributes:
        passed, failed: how many tests.
        names: of those that failed.
    """

    passed: int
    failed: int
    seconds: float
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """A cell of the table."""
        return f"{self.passed} of {self.passed + self.failed}"


@dataclass(frozen=True)
class VersionRun:
    """All that was run with one torch, and how it was installed."""

    torch: str
    python: str
    date: str
    note: str
    results: dict[str, CheckResult] = field(default_factory=dict)

    def json(self) -> str:
        """As the page keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "VersionRun":
        """Reads what `json` has written."""
        values = json.loads(text)
        given = values["results"]
        results = {name: CheckResult(**{**each, "names": tuple(each["names"])}) for name, each in given.items()}
        return cls(**{**values, "results": results})


def make_environment(torch: str, into: Path, index_url: str) -> Path:
    """The interpreter of an environment with this torch and this project. Raises CalledProcessError."""
    folder = into / f"torch-{torch}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    index = ["--index-url", index_url] if index_url else []
    subprocess.run([*pip, *index, f"torch=={torch}"], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (*project["dependencies"], *project["optional-dependencies"]["dev"])
    others = [each for each in wanted if re.split(r"[^\w-]", each)[0] not in NOT_FOR_THIS]
    subprocess.run([*pip, *others], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)  # else pip would replace torch
    return python


def run(python: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """A command of this project in an environment: its exit code, and what it has said."""
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("VIRTUAL_ENV", None)
    try:
        done = subprocess.run(
            [str(python), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"not done after {TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout + done.stderr


def run_tests(python: Path, *arguments: str) -> CheckResult:
    """Tests by pytest. What is no test's result counts as one that failed."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code, said = run(python, ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments])
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = [f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in failed]
    if code and not names:
        sys.stderr.write(said[-2000:])
        names = [f"pytest {' '.join(arguments)}: exit code {code}"]
    return CheckResult(
        len(cases) - len(failed) - len(skipped),
        len(names),
        round(time.monotonic() - began_s),
        tuple(sorted(set(names))),
    )


def run_suite(python: Path, names: Sequence[str]) -> CheckResult:
    """torch's own tests; skipped ones do not count."""
    began_s = time.monotonic()
    _, said = run(python, ["-m", "tests.torch_backend.conformance", *(["--tests", *names] if names else [])])
    failed = tuple(re.findall(r"^FAIL (\w+)$", said, re.MULTILINE))
    counted = re.search(r"^torch \S+ world \d+: (\{.*\})$", said, re.MULTILINE)
    if counted is None:
        sys.stderr.write(said[-2000:])
        return CheckResult(0, 1, round(time.monotonic() - began_s), ("the suite did not end",))
    counts = ast.literal_eval(counted[1])
    return CheckResult(counts.get("pass", 0), len(failed), round(time.monotonic() - began_s), failed)


def run_demo(python: Path) -> CheckResult:
    """The demo, as anybody would."""
    began_s = time.monotonic()
    code, said = run(python, ["-m", "meshtrain.cli", "demo", "--steps", "20", "--json"])
    if code:
        sys.stderr.write(said[-2000:])
    names = (f"exit code {code}",) if code else ()
    return CheckResult(int(not code), int(bool(code)), round(time.monotonic() - began_s), names)


def run_all(python: Path, note: str, *, suite: bool) -> VersionRun:
    """The whole set in one environment."""
    _, about = run(
        python, ["-c", "import torch, platform; print('about', torch.__version__, platform.python_version())"]
    )
    found = re.search(r"^about (\S+) (\S+)$", about, re.MULTILINE)
    if found is None:
        raise SystemExit(f"torch cannot be imported by {python}:\n{about[-2000:]}")
    one = VersionRun(found[1], found[2], datetime.datetime.now(datetime.UTC).date().isoformat(), note)
    parts: dict[str, Callable[[], CheckResult]] = {
        "mt.prepare": lambda: run_tests(python, "tests/train"),
        "groups": lambda: run_tests(python, "-n2", "tests/torch_backend"),
        "torch's suite": lambda: run_suite(python, () if suite else SLICE),
        "real jobs": lambda: run_tests(python, "-n0", "-m", "slow", "-k", "not own_suite", *REAL_JOBS),
        "demo": lambda: run_demo(python),
    }
    for name, part in parts.items():
        one.results[name] = result = part()
        failed = f": {', '.join(result.names)}" if result.names else ""
        sys.stdout.write(f"torch {one.torch}, {name}: {result.text} in {result.seconds:.0f} s{failed}\n")
        sys.stdout.flush()
    return one


def in_short(names: Sequence[str]) -> list[str]:
    """Tests that failed; of one file with many of them how many."""
    files = Counter(name.partition("::")[0] for name in names if "::" in name)
    many = {name for name, count in files.items() if count > 2}
    few = [name for name in names if name.partition("::")[0] not in many]
    return [*(f"{files[name]} of {name}" for name in sorted(many)), *few]


def page(runs: Sequence[VersionRun]) -> str:
    """The results as Markdown."""
    columns = list(dict.fromkeys(name for one in runs for name in one.results))
    lines = [
        BEGINS,
        f"| torch | Python | {' | '.join(columns)} | run on |",
        f"|---|---|{'---|' * len(columns)}---|",
    ]
    for one in runs:
        cells = [one.results[name].text if name in one.results else "not run" for name in columns]
        lines.append(f"| {one.torch} | {one.python} | {' | '.join(cells)} | {one.date} |")
    lines += ["", "What failed, and how torch was installed:", ""]
    for one in runs:
        failed = [f"{what}: {', '.join(in_short(part.names))}" for what, part in one.results.items() if part.names]
        told = "; ".join([*([one.note] if one.note else []), *(failed or ["nothing failed"])])
        lines.append(f"- **{one.torch}**: {told}.")
    return "\n".join([*lines, MIXED, *(f"<!-- {one.json()} -->" for one in runs)]) + "\n"


def known() -> list[VersionRun]:
    """What the page says so far."""
    return [VersionRun.load(found[1]) for found in LINE.finditer(PAGE.read_text())] if PAGE.exists() else []


def write(runs: Sequence[VersionRun]) -> None:
    """Writes the page: of each version what was run last."""
    newest = {one.torch: one for one in (*known(), *runs)}
    in_order = sorted(newest.values(), key=lambda one: [int(each) for each in re.findall(r"\d+", one.torch)[:3]])
    PAGE.write_text(page(in_order))


def main() -> int:
    """The exit code: 1 where something failed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--torch", nargs="*", default=(), metavar="VERSION", help="make an environment of each")
    arguments.add_argument("--into", type=Path, default=ROOT / ".venvs", help="where environments are made")
    arguments.add_argument("--index-url", default=CPU_WHEELS, help='where torch is taken from; "": wherever pip looks')
    arguments.add_argument("--environment", type=Path, help="an environment that there is already")
    arguments.add_argument("--note", default="", help="how its torch was installed, for the page")
    arguments.add_argument("--suite", action="store_true", help="all of torch's tests, and not a slice")
    asked = arguments.parse_args()
    pythons = [make_environment(each, asked.into, asked.index_url) for each in asked.torch]
    if asked.environment is not None:
        pythons.append(asked.environment.absolute() / "bin" / "python")
    failed = False
    for python in pythons:
        one = run_all(python, asked.note, suite=asked.suite)
        write([one])
        failed = failed or any(part.failed for part in one.results.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

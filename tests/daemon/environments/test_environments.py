"""Environments for jobs that bring a list of packages: made from wheels of a folder, without a network."""

import asyncio
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshtraind.environments import environments as module
from meshtraind.environments.environments import FOLDER, UNUSED_S_MAX, Environments, python_of
from meshtraind.environments.packages import lacking_modules
from meshtraind.transport.connection import RequestFailed

TIMEOUT_S = 60.0


def wheel(folder: Path, name: str, version: str, text: str, requires: str = "") -> None:
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        info = f"{name}-{version}.dist-info"
        file.writestr(f"{name}.py", text)
        file.writestr(f"{info}/METADATA", about)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip installs from, and nothing else."""
    wheels = tmp_path / "wheels"
    wheel(wheels, "meshtinypackage", "1.0", "ANSWER = 42\n")
    wheel(wheels, "meshwantsoldtorch", "1.0", "", requires="torch==0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def said(python: Path, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ignored(_text: str) -> None:
    """Nobody waits."""


@pytest.mark.asyncio
async def test_which_modules_a_script_would_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies where the daemon was started is not there for a script."""
    (tmp_path / "no_such_module_of_anybody.py").touch()
    monkeypatch.chdir(tmp_path)
    assert await lacking_modules(("json", "no_such_module_of_anybody", "numpy")) == ("no_such_module_of_anybody",)
    assert await lacking_modules(()) == ()


@pytest.mark.asyncio
async def test_without_a_list_a_script_has_the_daemons_python(tmp_path: Path) -> None:
    assert await Environments(tmp_path).make((), ignored) == Path(sys.executable) == python_of(tmp_path, ())
    assert not list(tmp_path.iterdir())


def test_each_list_has_an_environment_of_its_own_in_whatever_order(tmp_path: Path) -> None:
    lists = [("einops",), ("wandb",), ("einops", "wandb"), ("einops>=0.8",)]
    assert len({python_of(tmp_path, wanted) for wanted in lists}) == len(lists)
    assert python_of(tmp_path, ("wandb", "einops")) == python_of(tmp_path, ("einops", "wandb"))


@pytest.mark.asyncio
@pytest.mark.parametrize("has", [True, False])
async def test_pip_is_copied_only_where_the_daemons_packages_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    """Copying it takes longer than all else."""
    ran: list[Sequence[str]] = []

    async def run(argv: Sequence[str], *_rest: object) -> str:
        ran.append(argv)
        return "enough is seen"

    (tmp_path / "packages" / ("pip" if has else "another")).mkdir(parents=True)
    monkeypatch.setattr(module, "_parents", lambda: [str(tmp_path / "packages")])
    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(RequestFailed, match="enough is seen"):
        await Environments(tmp_path).make(("meshtinypackage",), ignored)
    assert ("--without-pip" in ran[0]) == has


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_environment_has_what_was_asked_for_beside_what_the_daemon_has(tmp_path: Path, index: Path) -> None:
    environments, told = Environments(tmp_path), list[str]()
    wanted = ("meshtinypackage>=1.0",)
    python = await environments.make(wanted, told.append)
    assert python == python_of(tmp_path, wanted)
    assert set(told) == {"installing 1 package for the job"}
    assert said(python, "import meshtinypackage; print(meshtinypackage.ANSWER)") == "42"
    ours = "import numpy, meshwire, sys; print(numpy.__file__, meshwire.__file__)"
    assert said(python, ours) == said(Path(sys.executable), ours)
    assert not list(python.parents[1].rglob("pip")), "it installs by the daemon's"
    # It is found again, also by a daemon that has begun since, and its list in another order; nothing is installed.
    began_s = time.monotonic()
    (index / "meshtinypackage-1.0-py3-none-any.whl").unlink()
    told.clear()
    assert await Environments(tmp_path).make(wanted, told.append) == python
    assert not told
    assert time.monotonic() - began_s < 2.0
    # What nobody has used for long is deleted, and what is used is not.
    await environments.trim()
    assert python.exists()
    old_s = time.time() - UNUSED_S_MAX - 1
    os.utime(python.parents[1] / "complete", (old_s, old_s))
    await environments.trim()
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        pytest.param(
            "meshnobodyhasthis==3",
            "No matching distribution found for meshnobodyhasthis==3",
            marks=pytest.mark.long,
        ),
        (
            "meshwantsoldtorch",
            r"meshwantsoldtorch 1\.0 depends on torch==0\.1; The user requested \(constraint\) torch[^ ;]*==",
        ),
    ],
)
async def test_what_cannot_be_installed_is_named_and_leaves_nothing(tmp_path: Path, wanted: str, why: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(RequestFailed, match=why):
        await Environments(tmp_path).make((wanted,), ignored)
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("index")
async def test_an_installation_that_is_given_up_ends_its_processes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOLD_S", 0.05)
    times = 0

    def give_up(_text: str) -> None:
        nonlocal times
        times += 1
        if times == 5:
            raise RequestFailed("the job has ended")

    environments = Environments(tmp_path)
    with pytest.raises(RequestFailed, match="the job has ended"):
        await environments.make(("meshtinypackage",), give_up)
    assert not list((tmp_path / FOLDER).iterdir())
    # The next one is not in its way, nor two that want the same at once.
    both = await asyncio.gather(*(environments.make(("meshtinypackage",), ignored) for _ in range(2)))
    assert both[0] == both[1]
    assert both[0].exists()


@pytest.mark.asyncio
async def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSTALL_S_MAX", 0.0)
    with pytest.raises(RequestFailed, match="not installed within"):
        await Environments(tmp_path).make(("meshtinypackage",), ignored)
    assert not list((tmp_path / FOLDER).iterdir())

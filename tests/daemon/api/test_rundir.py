"""DATA/run: one daemon per data folder, found and trusted by its own user only."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshtraind.api.rundir
from meshtraind.api.rundir import SOCKET_PATH_BYTES_MAX, RunDir, RunDirError

AS_ROOT = os.name == "posix" and os.geteuid() == 0


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_clients_find_the_daemon_while_it_runs_and_not_after(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    with RunDir(data) as run:
        run.announce(listen="0.0.0.0:29610", endpoint=f"unix:{run.socket_path}")
        described = json.loads((data / "run" / "daemon.json").read_text())
        assert described["pid"] == os.getpid()
        assert described["listen"] == "0.0.0.0:29610"
        assert described["endpoint"] == f"unix:{run.socket_path}"
        token_file = Path(described["token_file"])
        assert token_file.read_text() == run.token
        for private in (token_file, data / "run" / "daemon.json", data / "run" / "lock"):
            assert mode(private) == 0o600
        assert run.socket_path is not None
        assert mode(data / "run") == mode(run.socket_path.parent) == 0o700
        assert not list((data / "run").glob("*.new"))
    assert not token_file.exists()
    assert not (data / "run" / "daemon.json").exists()


def test_a_second_daemon_is_refused_and_told_which_one_runs(tmp_path: Path) -> None:
    with RunDir(tmp_path / "data") as first:
        first.announce(listen="x", endpoint="y")
        with pytest.raises(RunDirError, match=rf"runs on .*data already \(process {os.getpid()}\).*meshtrain down"):
            RunDir(tmp_path / "data")
        assert (tmp_path / "data/run/token").read_text() == first.token, "the first one is unharmed"
        with RunDir(tmp_path / "other") as other:
            assert other.socket_path != first.socket_path
    with RunDir(tmp_path / "data") as next_:
        assert next_.token != first.token


def test_a_killed_daemon_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """The lock dies with its process, whatever it left behind; its socket is replaced."""
    code = (
        "import os, socket, sys\n"
        "from pathlib import Path\n"
        "from meshtraind.api.rundir import RunDir\n"
        "run = RunDir(Path(sys.argv[1]))\n"
        "run.announce(listen='x', endpoint='y')\n"
        "socket.socket(socket.AF_UNIX).bind(str(run.socket_path))\n"
        "print(run.socket_path, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(meshtraind.api.rundir.__file__).parents[3]
    paths = os.pathsep.join(str(root / part) for part in ("daemon", "protocol"))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    left = Path(done.stdout.strip())
    assert left.is_socket(), done.stderr
    with RunDir(tmp_path / "data") as run:
        assert run.socket_path == left
        assert not left.exists()


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(RunDirError, match=r"data folder .*data cannot be used: File exists; .*--data-dir"):
        RunDir(tmp_path / "data")


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(RunDirError, match=r"data cannot be used: Permission denied; make it writable.*--data-dir"):
        RunDir(tmp_path / "data")


def test_a_runtime_folder_that_others_may_enter_is_refused(tmp_path: Path, runtime_folder: Path) -> None:
    """Whoever may write there could put a socket of his own in our place."""
    (runtime_folder / "meshtrain").mkdir()
    (runtime_folder / "meshtrain").chmod(0o755)
    with pytest.raises(RunDirError, match="does not belong to your user alone: remove it"):
        RunDir(tmp_path / "data")
    (runtime_folder / "meshtrain").rmdir()
    with RunDir(tmp_path / "data"):
        pass  # the refused start has let go of the lock


def test_a_link_in_the_runtime_folders_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder that all users share, somebody else may have been there first."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"meshtrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="does not belong to your user alone"):
        RunDir(tmp_path / "data")


def test_the_socket_fits_however_deep_the_data_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 bytes; a data folder's may be longer."""
    data = tmp_path / ("d" * 100) / ("e" * 100)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    with RunDir(data) as run:
        assert run.socket_path is not None
        assert len(os.fsencode(run.socket_path)) <= SOCKET_PATH_BYTES_MAX
    long = tmp_path / ("r" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(RunDirError, match=r"too long for a socket.*set XDG_RUNTIME_DIR"):
        RunDir(data)


def test_two_folders_of_one_relative_name_have_two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon started in another folder with the same `--data-dir D` must not remove the first one's socket."""
    sockets = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        with RunDir(Path("data")) as run:
            sockets.add(run.socket_path)
    assert len(sockets) == 2


def test_one_folder_under_two_names_is_one_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with RunDir(tmp_path / "data"), pytest.raises(RunDirError, match="runs on"):
        RunDir(tmp_path / "link")

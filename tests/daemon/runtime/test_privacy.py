"""The data folder is this user's alone, whatever it was before."""

import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.client import Client
from meshtraind.api.rundir import RunDir, RunDirError
from meshtraind.runtime.privacy import PrivacyError, make_private, protect_data
from meshwire.messages.local import GetStatus, Status
from tests.daemon.api.test_app import config, running

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def wide_umask() -> Iterator[None]:
    """As open as a careless user's."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def test_a_new_data_folder_is_its_users_alone_and_nothing_is_said(tmp_path: Path) -> None:
    data = tmp_path / "deep/data"
    assert protect_data(data) == ()
    assert [mode(folder) for folder in (data, data / "run", data / "jobs", data / "blobs")] == [0o700] * 4
    assert protect_data(data) == ()


def test_an_old_data_folder_is_narrowed_in_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("identity", "run", "jobs/1kx3m9q2v7bd/out", "jobs/1kx3m9q2v7be"):
        (data / name).mkdir(parents=True)
    for name in ("jobs.db", "daemon.log"):
        (data / name).touch()
    (data / "identity").chmod(0o700)
    data.chmod(0o755)
    with RunDir(data) as run:
        assert run.notes == (f"others than you could look into {data} (mode 755); now only you can",)
    for folder in (data, data / "run", data / "jobs", *(data / "jobs").iterdir()):
        assert mode(folder) == 0o700, folder
    assert [mode(data / file) for file in ("jobs.db", "daemon.log")] == [0o600] * 2
    with RunDir(data) as run:
        assert run.notes == ()
    (data / "jobs/1kx3m9q2v7bd").chmod(0o750)
    (data / "jobs.db").chmod(0o640)
    assert protect_data(data) == (), "nobody could come so far"
    assert (mode(data / "jobs/1kx3m9q2v7bd"), mode(data / "jobs.db")) == (0o700, 0o600)


@pytest.mark.parametrize("what", ["shared by all", "with other things"])
def test_a_folder_that_others_may_need_is_refused_and_left_as_it_is(tmp_path: Path, what: str) -> None:
    """As root, `--data-dir /tmp` would otherwise lock everybody out of it."""
    data = tmp_path / "data"
    data.mkdir()
    if what == "shared by all":
        (data / "run").mkdir()
        data.chmod(0o1777)
    else:
        (data / "thesis.tex").touch()
    before = mode(data)
    with pytest.raises(RunDirError, match=r"no folder of meshtrain's own.* such as --data-dir .*data/meshtrain"):
        RunDir(data)
    assert mode(data) == before
    assert protect_data(data / "meshtrain") == ()


def test_what_cannot_be_narrowed_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", lambda *_: None)
        with pytest.raises(PrivacyError, match="its file system keeps no modes"):
            make_private(tmp_path / "a")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(PrivacyError, match="belongs to another user"):
        make_private(tmp_path / "a")


@pytest.mark.asyncio
async def test_a_daemon_says_in_its_status_that_others_could_look(tmp_path: Path) -> None:
    (tmp_path / "anna").mkdir()
    async with running(config(tmp_path, "anna")):
        client = await asyncio.to_thread(Client.connect, tmp_path / "anna")
        status = await asyncio.to_thread(client.request, GetStatus(), timeout_s=10, name="status")
        client.close()
        assert isinstance(status, Status)
        assert status.warnings == (f"others than you could look into {tmp_path / 'anna'} (mode 777); now only you can",)
        for path in (tmp_path / "anna").rglob("*"):
            assert not mode(path) & 0o077, path

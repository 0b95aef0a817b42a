"""What tests of commands share: an endpoint in place of a daemon, and a folder to submit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.fakedaemon import Endpoint


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands meet this test's daemon, if any, and no terminal, and `submit` chooses nothing by itself."""
    monkeypatch.setenv("MESHTRAIN_NO_PLAN", "1")
    monkeypatch.setenv("MESHTRAIN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "sets [1]").mkdir(parents=True)
    (folder / "train.py").write_text("print('hi')\n")
    (folder / "sets [1]" / "a.bin").write_bytes(bytes(100))
    (folder / "secret.txt").touch()
    (folder / ".gitignore").write_text("secret.txt\n")
    monkeypatch.chdir(folder)
    return folder

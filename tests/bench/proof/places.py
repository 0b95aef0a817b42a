"""Where proofs run: daemons that cases share, started when the first of them asks; commands as a person types them."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from platformdirs import user_cache_path

from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from tests.bench.codecjob import write_data

NOTHING_CHOSEN = "nothing chosen"
NAMES = ("anna", "bert", "cleo", "dora")


class ProofError(Exception):
    """A case could not be measured; says why."""


class LocalPlace:
    """Four daemons on this machine's loopback, and the data that jobs ship. Nothing of it stays."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._scratch: Path | None = None
        self._mesh: LocalMesh | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_mesh()
        self._stack.close()

    def daemons(self) -> Sequence[LocalDaemon]:
        """All four, linked. Raises LocalMeshError."""
        if self._mesh is None:
            mesh = LocalMesh(NAMES, lambda _line: None)
            mesh.__enter__()
            self._mesh = mesh
        return self._mesh.daemons

    def end_mesh(self) -> None:
        """A mesh in which a job failed is not used again."""
        if self._mesh is not None:
            self._mesh.__exit__(None, None, None)
            self._mesh = None

    def scratch(self) -> Path:
        """A folder that is empty at first: for what cases share."""
        if self._scratch is None:
            self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-proof-")))
        return self._scratch

    def folder(self) -> Path:
        """With the data of every model in `data`. Raises DigitsError."""
        folder = self.scratch()
        if not (folder / "data").exists():
            write_data(folder / "data", user_cache_path("meshtrain") / "digits")
        return folder


def printed(command: Sequence[str], folder: Path, timeout_s: float) -> tuple[str, str]:
    """What a command prints that runs in a folder, and says beside it. Raises ProofError: it fails, or takes longer."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=env, cwd=folder)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ProofError(f"{' '.join(command)} took more than {timeout_s:.0f} s") from None
        for file in (out, errors):
            file.seek(0)
        said = errors.read().decode(errors="replace")
        if code:
            raise ProofError(f"{' '.join(command)} ended with exit code {code}: {said[-1500:]}")
        return out.read().decode(), said


def chosen_in(said: str) -> str:
    """What `submit` says that it has chosen."""
    found = re.search(r"^chosen: (.*)$", said, re.M)
    return NOTHING_CHOSEN if found is None else found[1]

"""How a script steps, measured in a copy of what a job ships, and kept: the same files, arguments and versions on the
same processor are measured once."""

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from meshtrain.cli.planning.codec_prices import processor_model
from meshtrain.cli.planning.other_programs import NOTABLE_PART, OtherPrograms
from meshtrain.cli.submission.measuring import trace
from meshtrain.cli.ui.progress import Stages
from meshtrain.datadir import data_folder
from meshtrain.packing.shipped_folders import lay_out
from meshwire.planning.step_trace import TracedScript

if TYPE_CHECKING:
    from meshtrain.packing.tree import Packed

FOLDER = "profiles"  # below the data folder
KEPT_MAX = 64  # the newest ones; of a model with a thousand tensors one has 100 kB
TIMEOUT_S = 60.0  # who submits waits for it
VERSIONS = ("meshtraind", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Shipped:
    """A script as a job runs it.

    Attributes:
        source: the working directory.
        data: the data folder; `data_place` is where the script finds it below the working directory.
        args, env: the script's.
        python: the interpreter that runs it here.
        module: its name, where it is run as by `python -m`.
    """

    script: str
    source: "Packed"
    data: "Packed | None"
    data_place: str | None
    args: Sequence[str]
    env: Sequence[tuple[str, str]]
    python: str = sys.executable
    module: str | None = None

    @property
    def runs(self) -> str:
        """What a person types to run it here, without a job."""
        return f"python {self.script}" if self.module is None else f"python -m {self.module}"

    def key(self) -> str:
        """Names all that decides how it steps on this machine."""
        decides = [
            self.source.manifest.digest().hex(),
            None if self.data is None else self.data.manifest.digest().hex(),
            *(self.python, self.data_place, self.script, self.module, list(self.args), list(self.env)),
            *(processor_model(), platform.python_version(), [_version(name) for name in VERSIONS]),
        ]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def profile(shipped: Shipped, data_dir: Path | None, stages: Stages) -> tuple[TracedScript, str | None]:
    """How it steps, as it was measured before or is now, and what a person should know of that.

    What was measured beside other programs is not kept. Raises what `trace` raises.
    """
    folder = data_folder(data_dir) / FOLDER
    file = folder / f"{shipped.key()}.json"
    with suppress(OSError, ValidationError):  # there is none yet, or one that is broken: it is made anew
        return TracedScript.model_validate_json(file.read_bytes()), None
    programs = OtherPrograms()
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as name:
        root = Path(name)
        lay_out_copy(shipped, root)
        data = None if shipped.data is None else shipped.data.root
        runs = shipped.python, shipped.module
        traced = trace(root, shipped.script, shipped.args, dict(shipped.env), data, stages, TIMEOUT_S, *runs)
    if programs.part() < NOTABLE_PART:
        _keep(file, traced)
    return traced, programs.note()


def lay_out_copy(shipped: Shipped, root: Path) -> None:
    """What a script writes beside itself is not the user's: it runs on a copy."""
    lay_out(shipped.source, root)
    if shipped.data is not None and shipped.data_place is not None:
        place = root / shipped.data_place
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(shipped.data.root, target_is_directory=True)


def _keep(file: Path, traced: TracedScript) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(traced.model_dump_json(), encoding="utf-8")
    part.replace(file)
    kept = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in kept[KEPT_MAX:]:
        old.unlink(missing_ok=True)


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):  # from a source tree that is not installed
        return version(name)
    return None

"""What a person says of all runs of a session: the options of `meshtrain submit` under the same names."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from pydantic import ValidationError

from meshtrain.errors import UsageError
from meshtrain.packing.shipped_folders import DATA_FOLDER
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY
from meshwire.messages.local import Submit

CLOUDPICKLE = ("cloudpickle>=3",)  # without which no environment loads a function
NEVER_SHIPPED = ("*.ipynb", ".ipynb_checkpoints/")  # a notebook changes whenever it is saved


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """See `mt.session`. None: not said, which leaves it to `submit`'s default.

    Attributes:
        folder: the working directory, which is shipped.
        data_dir: the daemon's, of which there may be several on one machine.
    """

    peers: int | None = None
    on: Sequence[str] = ()
    sync: str | None = None
    codec: str | None = None
    topology: str | None = None
    learners: int = 1
    masks: str | None = None
    scale_lr: str | None = None
    straggler: str | None = None
    visibility: str | None = None
    own: str | None = None
    shares: str | None = None
    on_nan: str = "stop"
    seed: int | None = None
    checkpoint_every: str = CHECKPOINT_EVERY
    data: Path | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    requirements: Sequence[str] = ()
    independent: bool = False
    folder: Path | None = None
    data_dir: Path | None = None

    def root(self) -> Path:
        """The folder that is shipped. Raises UsageError for one that nobody means."""
        root = (self.folder if self.folder is not None else Path.cwd()).resolve()
        if not root.is_dir():
            raise UsageError(f"mt.session(folder=...): {root} is not a folder")
        if root == Path.home().resolve() or root == Path(root.anchor):
            raise UsageError(
                f"the working directory is {root}, all of which would be shipped: keep the notebook in a folder of its "
                "own, or name one with mt.session(folder=...)"
            )
        return root

    def data_folder(self, root: Path) -> Path | None:
        """The data that is shipped: what was said, else ./data where there is one."""
        if self.data is not None:
            return self.data
        usual = root / DATA_FOLDER
        return usual if usual.is_dir() else None

    def check_group(self, name: str) -> None:
        """Raises UsageError for options that a function which uses torch.distributed cannot have."""
        of_rounds = ("sync", "codec", "topology", "learners", "masks", "scale_lr")
        if said := [option for option in of_rounds if getattr(self, option) not in (None, 1)]:
            raise UsageError(
                f"{name} uses torch.distributed, whose collectives are exact, on one rank a device: "
                f"{', '.join(f'{option}=' for option in said)} {'is' if len(said) == 1 else 'are'} for functions with "
                "mt.prepare"
            )

    def submission(
        self,
        name: str,
        root: Path,
        manifest: str,
        script: str,
        data: tuple[Path, str, str | None] | None,
        modules: Sequence[str],
        *,
        dry_run: bool,
    ) -> Submit:
        """The job of one run.

        Args:
            root, manifest: of what is shipped.
            data: the data folder, its manifest, and where the script finds it.

        Raises UsageError: an option is of the wrong kind.
        """
        try:
            return Submit(
                name=name,
                root=str(root),
                manifest=manifest,
                data_root=None if data is None else os.fspath(data[0]),
                data_manifest=None if data is None else data[1],
                data_path=None if data is None else data[2],
                script=script,
                args=(),
                env=tuple((str(key), str(value)) for key, value in self.env.items()),
                on=_names(self.on),
                peers=self.peers,
                sync=self.sync or "bsp",
                codec=self.codec,
                topology=self.topology,
                learners=self.learners,
                masks=self.masks,
                scale_lr=self.scale_lr,
                straggler=self.straggler,
                visibility=self.visibility,
                own=self.own,
                shares=self.shares,
                on_nan=cast(Literal["stop", "skip"], self.on_nan),
                seed=self.seed,
                checkpoint_every=self.checkpoint_every,
                bucket_bytes=None,
                hash_every=0,
                trace=False,
                dry_run=dry_run,
                independent=self.independent,
                requirements=(*self.requirements, *(CLOUDPICKLE if self.requirements else ())),
                modules=() if self._says_where_modules_are() else tuple(modules),
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            what = " ".join(str(part) for part in first["loc"])
            raise UsageError(f"mt.session({what}=...): {first['msg']}") from None

    def _says_where_modules_are(self) -> bool:
        return any(name.startswith("PYTHON") for name in self.env)


def _names(on: Sequence[str]) -> tuple[str, ...]:
    """`on` as a list, or as typed behind --on."""
    names = on.split(",") if isinstance(on, str) else on
    return tuple(name.strip() for name in names)

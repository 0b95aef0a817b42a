"""The world of a script that `meshtrain submit --dry-run` runs: `mt.prepare` tells its size and ends it (M1)."""

import os
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from meshtrain.train import optimizers, tensors
from meshtrain.train.alone import Alone
from meshtrain.train.memory import model_size
from meshwire.footprint import Measurement
from meshwire.local import MEASURE_VARIABLE

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


class Measuring(Alone):
    """One machine, no daemon, no training.

    Args:
        file: where the measurement is written, in a folder that this process may fill.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    @classmethod
    def take(cls) -> "Measuring | None":
        """The world that the environment asks for; None without such a wish."""
        told = os.environ.get(MEASURE_VARIABLE)
        return cls(Path(told)) if told else None

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """Never returns. Raises what it raises in any job, whatever its `--sync` and `--codec`, and SystemExit."""
        self._end(model, optimizer)

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """As `prepare`."""
        self._end(model, optimizer)

    @property
    def output_dir(self) -> Path:
        """Away from the user's own folder: there are no results."""
        folder = self._file.with_name("out")
        folder.mkdir(exist_ok=True)
        return folder

    def _end(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> NoReturn:
        optimizers.check(optimizer)
        specs, places = tensors.collect(model)
        built = tensors.build(model, optimizers.describe(optimizer, specs, places))
        measurement = Measurement(manifest=built.manifest, size=model_size(built, optimizer))
        self._file.write_text(measurement.model_dump_json(), encoding="utf-8")
        raise SystemExit(0)

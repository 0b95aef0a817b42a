"""The world of a script that `meshtrain submit --dry-run` runs: `mt.prepare` writes its size down and ends it."""

import os
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from meshtrain.train.model.memory_needs import model_size
from meshtrain.train.model.tensors import ModelTensors
from meshtrain.train.single import SingleProcess
from meshtrain.train.step.preparation import check_optimizer, describe_model
from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.memory_layout.footprint import Measurement
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_SCALE_LR_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_VARIABLE,
)
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.rate_rule import RateRule, rate_rule_of

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


class MeasuringProcess(SingleProcess):
    """A script runs up to `mt.prepare`, which writes down how large model and optimizer are, and ends it.

    Args:
        file: where the measurement is written, in a folder that this process may fill.
        sync, codec, scale_lr: of the job that would be submitted.
    """

    def __init__(self, file: Path, sync: SyncSettings, codec: CodecSpec, scale_lr: RateRule | None = None) -> None:
        super().__init__()
        self._file = file
        self._sync = sync
        self._codec = codec
        self._scale_lr = scale_lr

    @classmethod
    def take(cls) -> "MeasuringProcess | None":
        """The world that the environment asks for; None without such a wish."""
        told = os.environ.get(MEASURE_VARIABLE)
        if not told:
            return None
        sync, codec = sync_settings(os.environ[MEASURE_SYNC_VARIABLE]), os.environ[MEASURE_CODEC_VARIABLE]
        scale_lr = rate_rule_of(os.environ.get(MEASURE_SCALE_LR_VARIABLE), sync)
        return cls(Path(told), sync, parse_codec(codec), scale_lr)

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """Never returns. Raises what it raises in such a job, and SystemExit."""
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
        measurement, _ = measured_model(model, optimizer, self._sync, self._codec, self._scale_lr)
        write_whole(self._file, measurement.model_dump_json())
        raise SystemExit(0)


def write_whole(file: Path, text: str) -> None:
    """The file is there once all of it is: who waits for it ends this process then."""
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def measured_model(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: SyncSettings,
    codec: CodecSpec,
    scale_lr: RateRule | None = None,
) -> tuple[Measurement, ModelTensors]:
    """What a script has prepared. Raises what `mt.prepare` raises in such a job."""
    check_optimizer(optimizer, sync, scale_lr)
    prepared = describe_model(model, optimizer, sync, codec, None)
    size = model_size(prepared.tensors, optimizer, prepared.of_muon)
    return Measurement(manifest=prepared.tensors.manifest, size=size), prepared.tensors

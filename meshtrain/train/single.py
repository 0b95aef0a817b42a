"""What `meshtrain`'s functions do when the script runs without a job: one process, in which nothing is changed."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from meshtrain.train.device import best_device, device_of
from meshtrain.train.partial.progressive import find
from meshwire.memory_layout.shared_slots import SCRIPT_DATA_VARIABLE

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


def local_data_dir() -> Path:
    """$MESHTRAIN_DATA, ./data if there is one, or the working directory."""
    told = os.environ.get(SCRIPT_DATA_VARIABLE)
    if told:
        return Path(told)
    return Path("data") if Path("data").is_dir() else Path()


class SingleProcess:
    """One machine without a daemon, which trains alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def prepare(self, model: M, optimizer: O, scaler: torch.amp.GradScaler | None = None) -> tuple[M, O]:
        """The same objects. A model that grows does so by the optimizer's steps."""
        self._device = device_of(model)
        growing = find(model)
        if growing is not None:
            rounds = itertools.count(2)
            growing.enter_round(1)
            optimizer.register_step_post_hook(lambda *_: growing.enter_round(next(rounds)))
        return model, optimizer

    def prepare_with_loader(
        self, model: M, optimizer: O, loader: L, scaler: torch.amp.GradScaler | None = None
    ) -> tuple[M, O, L]:
        """The same objects."""
        return *self.prepare(model, optimizer), loader

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """torch's own."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def steps(self, count: int) -> Iterator[int]:
        """1 to `count`."""
        return iter(range(1, count + 1))

    def log(self, values: Mapping[str, object]) -> None:
        """Nobody watches."""

    @property
    def device(self) -> torch.device:
        """Where the prepared model lies, before that the best device."""
        return self._device or best_device()

    def barrier(self) -> None:
        """Everybody is here."""

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nothing to keep from being sent."""
        return nullcontext()

    def base(self) -> AbstractContextManager[None]:
        """The model's state is the only one."""
        return nullcontext()

    @property
    def data_dir(self) -> Path:
        """See `local_data_dir`."""
        return local_data_dir()

    @property
    def output_dir(self) -> Path:
        """./out, made when asked for."""
        folder = Path("out")
        folder.mkdir(exist_ok=True)
        return folder

    def finish(self) -> None:
        """There is nobody to tell."""

"""Scripts that do something around `optimizer.step()`, and learners that run them, in a job or by themselves."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.train.replicas import Batch, net


@dataclass(frozen=True)
class Script:
    """What a script has beside model and optimizer."""

    name: str
    parts: tuple[tuple[int, ...], ...] = ((0,), (1, 2, 3))
    """Positions of parameters, cut in two by hand."""
    norm: bool = False
    frozen: bool = False
    groups: bool = False
    schedule: bool = False
    clip: bool = False
    accumulate: bool = False
    scaled: bool = False
    compiled: bool = False
    backend: str = "eager"
    """Of `torch.compile`. This one traces the model and makes no code of it, which takes no time."""
    dtype: torch.dtype = torch.float32


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Learner:
    """A learner that runs such a script, with a model and optimizer of its own.

    Args:
        make: an optimizer, of parameters or groups of them.
    """

    def __init__(self, script: Script, make: Callable[[Any], torch.optim.Optimizer] = momentum) -> None:
        self.script = script
        self.model = net(norm=script.norm).to(script.dtype)
        if script.frozen:
            self.model[0].bias.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 0.01}] if script.groups else trained
        self.optimizer = make(groups)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) if script.scaled else None

    def begin(self) -> None:
        """Behind `mt.prepare`."""
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7) if self.script.schedule else None
        self.forward = torch.compile(self.model, backend=self.script.backend) if self.script.compiled else self.model

    def step(
        self,
        of: Batch,
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
        no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.optimizer.zero_grad()
        self.backward(of, no_sync)
        self.apply(clip)
        self.advance()

    def backward(
        self,
        of: Batch,
        no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        share: float = 1.0,
    ) -> None:
        """One pass, or two where it accumulates; the loss is multiplied by `share`."""
        micro = [*zip(of[0].chunk(2), of[1].chunk(2), strict=True)] if self.script.accumulate else [of]
        for at, (x, y) in enumerate(micro, 1):
            with contextlib.nullcontext() if at == len(micro) else no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.script.scaled):
                    loss = nn.functional.mse_loss(self.forward(x.to(self.script.dtype)), y.to(self.script.dtype))
                loss = loss * share
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def apply(
        self,
        clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
        each: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> None:
        """What makes a step of gradients; `each` is done to every one of them."""
        if self.script.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clip(self.model.parameters(), 0.2)
        for p in self.model.parameters():
            if p.grad is not None:
                each(p.grad)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def advance(self) -> None:
        """What stands behind each step of a script."""
        if self.schedule is not None:
            self.schedule.step()

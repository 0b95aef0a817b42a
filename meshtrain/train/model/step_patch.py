"""Puts another function in place of an optimizer's `step`, until the mesh lets go of it."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Step = Callable[[Callable[[], Any] | None], Any]  # takes what a script may give: a closure


class ReplacedStep:
    """Makes `optimizer.step()` another function, `step`, from its creation on."""

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        original = optimizer.step
        self._optimizer = optimizer
        self._closed = False

        @functools.wraps(original)
        def replacement(closure: Callable[[], Any] | None = None) -> Any:
            # For learning rate schedulers: with s>0 the first steps apply nothing, and are steps all the same.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return original(closure) if self._closed else step(closure)

        # As a scheduler marks a step that it watches: whenever it is made, it leaves this one in place.
        replacement._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._before = optimizer.__dict__.get("step")
        optimizer.step = replacement  # type: ignore[method-assign]
        self._replacement = replacement

    def close(self) -> None:
        """The optimizer steps as it did before, unless somebody else has replaced its step since."""
        self._closed = True
        if self._optimizer.__dict__.get("step") is self._replacement:
            del self._optimizer.step
            if self._before is not None:
                self._optimizer.step = self._before  # type: ignore[method-assign]

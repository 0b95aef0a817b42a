"""torch's compiler is imported by scripts that compile something, and not by each one that makes an optimizer.

Importing `torch._dynamo` takes about as long as all else of torch. Every optimizer does so when it is made, and at each
step, to say what is not to be traced. Before it is imported nothing is traced, so nobody is there to hear that; from
then on torch's own functions are called. To the compiler a step is one frame more than without a job. Where a
torch has other names than these, it imports its compiler as ever.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
DISABLED = "__dynamo_disable"  # where torch keeps, with a function, what is called in its place

_unheard: list[Callable[..., Any]] = []  # that have themselves there


def leave_functions(module: ModuleType) -> None:
    """Functions that the compiler is not to trace are called as they are, until it is there: `torch._compile`."""
    disable = getattr(module, "_disable_dynamo", None)
    if disable is None:
        return

    def disable_later(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        called = disable(fn, recursive)
        if fn is not None and COMPILER not in sys.modules:  # and not on `called`, which may be such a function, too
            setattr(fn, DISABLED, fn)
            _unheard.append(fn)
        return called

    module.__dict__["_disable_dynamo"] = disable_later


def leave_steps(module: ModuleType) -> None:
    """Steps do not ask for breaks of a graph that nobody makes: `torch.optim.optimizer`."""
    separate = getattr(module, "_use_grad_for_differentiable", None)
    if separate is None:
        return
    torch = sys.modules["torch"]

    def separate_later(step: Callable[..., Any]) -> Callable[..., Any]:
        separated = separate(step)

        @functools.wraps(step)
        def stepped(*args: Any, **options: Any) -> Any:
            if COMPILER in sys.modules:
                return separated(*args, **options)
            with torch.set_grad_enabled(args[0].defaults["differentiable"]):
                return step(*args, **options)

        return stepped

    module.__dict__["_use_grad_for_differentiable"] = separate_later


def give_back(_module: ModuleType) -> None:
    """The compiler is there: what torch keeps is its own again."""
    while _unheard:
        delattr(_unheard.pop(), DISABLED)


CHANGES: Mapping[str, Callable[[ModuleType], None]] = {
    "torch._compile": leave_functions,
    "torch.optim.optimizer": leave_steps,
    COMPILER: give_back,
}
"""What is done to a module once it has been executed, by its name."""

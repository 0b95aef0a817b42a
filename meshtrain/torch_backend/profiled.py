"""Marks of operations in torch's profiler, as gloo's: from the call to the end, which is in another thread."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.torch_backend.relay import GroupError, MessageTransfer

End = Callable[[], None]
_autograd: Any = torch.autograd  # whose stubs leave these out


def _nothing() -> None:
    """No profiler runs."""


def begin(what: str, tensors: Sequence[torch.Tensor]) -> End:
    """Begins a mark, named as torch's own are. Returns what ends it, in whichever thread."""
    if not _autograd._profiler_enabled():
        return _nothing
    handle = _autograd._record_function_with_args_enter(f"{dist.get_backend()}:{what}", *tensors)
    return lambda: _autograd._record_function_with_args_exit(handle)


def mark_transfer(what: str, tensor: torch.Tensor, transfer: MessageTransfer, timeout_s: float) -> None:
    """Marks a send or a receive, if a profiler runs; a thread of its own sees it end."""
    end = begin(what, [tensor])
    if end is _nothing:
        return

    def wait() -> None:
        with contextlib.suppress(GroupError):  # whoever waits for it is told
            transfer.wait(time.monotonic() + timeout_s, what)
        end()

    threading.Thread(target=wait, name=f"meshtrain profile {what}", daemon=True).start()

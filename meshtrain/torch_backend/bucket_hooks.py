"""What `meshtrain submit --codec` does for DistributedDataParallel: gradients travel compressed, by torch's own hooks.

A group sees an all-reduce and not whose values they are; DDP knows which are gradients. So the model is given torch's
communication hook for the codec when it is made, as a script would do by `register_comm_hook`. All else stays exact:
control tensors, subgroups, what the script reduces itself.
"""

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from meshtrain.errors import UsageError
from meshwire.codecs.registry import FP32
from meshwire.codecs.spec import CodecSpec

POWERSGD_START_MIN = 2  # torch's own: DDP plans its buckets anew behind the first step

log = logging.getLogger("meshtrain")


def install(codec: CodecSpec) -> None:
    """Sees to the hooks of every DistributedDataParallel that is made from now on.

    Args:
        codec: of the gradients in the default group.
    """
    init, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    compresses = codec != FP32

    @functools.wraps(init)
    def with_hook(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if compresses and self.process_group is dist.group.WORLD:
            register(self, _state(codec), _hook(codec))
            if dist.get_rank() == 0:
                log.info("DistributedDataParallel sends its gradients as %s; all else is exact", codec)

    @functools.wraps(register)
    def registering(self: Any, state: Any, hook: Any) -> None:
        if compresses and self.process_group is dist.group.WORLD:
            raise UsageError(
                "the script registers a communication hook of its own: submit it without --codec, or without that hook"
            )
        register(self, state, one_by_one(hook) if _sends_in_callbacks(hook) else hook)

    DistributedDataParallel.__init__ = with_hook  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = registering  # type: ignore[method-assign]


def one_by_one(hook: Any) -> Any:
    """The hook, which has each bucket reduced before the next one begins.

    PowerSGD sends the second factor in a callback of the first one's future. With two buckets under way these callbacks
    run in another order on each rank, and what one sends for the first bucket another would take for the second; with
    gloo as well.
    """

    @functools.wraps(hook)
    def waiting(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


def _sends_in_callbacks(hook: Any) -> bool:
    """PowerSGD, also in half precision: of torch's own hooks the only ones."""
    name, module = getattr(hook, "__name__", ""), getattr(hook, "__module__", "")
    return module == powerSGD_hook.__name__ or name.endswith("compress_wrapper_hook")


def _state(codec: CodecSpec) -> Any:
    """Of the hook, for one model; None: the default group."""
    if codec.name != "powersgd":
        return None
    return powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(codec.number("rank")),
        start_powerSGD_iter=max(POWERSGD_START_MIN, codec.warmup),
        min_compression_rate=codec.number("min_rate"),
    )


def _hook(codec: CodecSpec) -> Any:
    if codec.name == "fp16":
        return default_hooks.fp16_compress_hook
    if codec.name == "bf16":
        return _bf16_hook
    hook = powerSGD_hook.powerSGD_hook
    return one_by_one(default_hooks.fp16_compress_wrapper(hook) if codec.choice("values") == "fp16" else hook)


def _bf16_hook(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks at this annotation
) -> torch.futures.Future[torch.Tensor]:
    """torch's, under another name: by that one DDP refuses it beside any backend but NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)

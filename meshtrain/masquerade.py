"""Makes unmodified scripts use the backend: in a job, every name of a backend for CPU tensors means this one.

Scripts say "gloo", libraries insist on it (Accelerate, Lightning and HF Trainer on a CPU), many say "nccl" and mean
whatever there is; so `init_process_group` and `new_group` take these for `meshtrain`, and `get_backend` answers "gloo".
"""

import functools
import importlib
from types import ModuleType
from typing import Any

MEANT = frozenset({"gloo", "nccl", "nccl2", "nccl-lazy", "mpi", "ucc", "xccl", "meshtrain"})
CLAIMED = "gloo"


def is_meant(backend: str | None) -> bool:
    """Whether a script that names this backend gets this one: a name, or names by device as "cpu:gloo,cuda:nccl"."""
    if backend is None:
        return True
    return MEANT.issuperset(part.rpartition(":")[2].strip() for part in backend.lower().split(","))


def install(c10d: ModuleType) -> None:
    """Replaces what scripts call in torch.distributed.distributed_c10d, which has just been executed.

    The backend itself is imported by the first call: until then torch.distributed is half made.
    """
    init, new, get = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def named(backend: Any) -> Any:
        from meshtrain.torch_backend.process_group import BACKEND
        from meshtrain.torch_backend.registration import register

        register()
        return BACKEND if is_meant(None if backend is None else str(backend)) else backend

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> Any:
        from meshtrain.torch_backend import registration

        handlers = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
        handlers._rendezvous_handlers["env"] = registration.rendezvous
        options.pop("device_id", None)  # of a GPU: there is none in these groups
        return init(named(backend), *args, **options)

    @functools.wraps(new)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
        return new(ranks, timeout, None if backend is None else named(backend), *args, **options)

    @functools.wraps(get)
    def get_backend(group: Any = None) -> Any:
        answer = get(group) if group is not None else get()
        return c10d.Backend(CLAIMED) if str(answer).lower() == "meshtrain" else answer

    c10d.__dict__.update(init_process_group=init_process_group, new_group=new_group, get_backend=get_backend)
    c10d.Backend.default_device_backend_map["cpu"] = "meshtrain"

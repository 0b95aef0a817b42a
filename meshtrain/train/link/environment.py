"""What a daemon tells its learner when it spawns it (`meshwire.memory_layout.shared_slots`)."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from meshtrain.errors import UsageError
from meshtrain.machine import memory_descriptor
from meshwire.memory_layout.kept_state import KEPT_FD_VARIABLE
from meshwire.memory_layout.shared_slots import (
    ENDPOINT_VARIABLE,
    JOB_VARIABLE,
    MEMORY_FD_VARIABLE,
    TOKEN_VARIABLE,
)
from meshwire.messages.group import EITHER_OR


@dataclass(frozen=True)
class Environment:
    """Where the daemon is, and what the learner may use.

    Attributes:
        endpoint: unix:PATH or tcp:HOST:PORT.
        memory_fd: descriptor of the shared memory; the learner sizes it.
        kept_fd: of the memory for what outlives this process (J3, kept base); None: there is none.
    """

    endpoint: str
    token: str = field(repr=False)
    job: str
    memory_fd: int
    kept_fd: int | None = None

    @classmethod
    def take(cls, variables: MutableMapping[str, str] = os.environ) -> "Environment | None":
        """Reads the variables; None without a job. The token is removed: what the script starts must not inherit it.

        Raises UsageError in a process that the script has started.
        """
        if ENDPOINT_VARIABLE not in variables:
            return None
        token = variables.pop(TOKEN_VARIABLE, None)
        missing = [name for name in (JOB_VARIABLE, MEMORY_FD_VARIABLE) if name not in variables]
        if token is None or missing:
            raise UsageError(
                "meshtrain belongs to the process that the daemon started, and this is another one: call its functions "
                "in the script itself, under `if __name__ == '__main__':`, and hand the values to other processes"
            )
        return cls(
            endpoint=variables[ENDPOINT_VARIABLE],
            token=token,
            job=variables[JOB_VARIABLE],
            memory_fd=memory_descriptor(variables[MEMORY_FD_VARIABLE]),
            kept_fd=memory_descriptor(variables[KEPT_FD_VARIABLE]) if KEPT_FD_VARIABLE in variables else None,
        )


_taken: Environment | None = None
_user: str | None = None  # of the job's exchange in this process


def environment_of_job(user: str) -> Environment | None:
    """The environment of this process, for one of the two ways to exchange something in a job; None without a job.

    Args:
        user: `mt.prepare` or `torch.distributed`; "" takes part in no exchange.

    Raises UsageError where the script uses the other one too.
    """
    global _taken, _user
    if user and _user not in (None, user):
        raise UsageError(EITHER_OR)
    _user = user or _user
    if _taken is None:
        _taken = Environment.take()
    return _taken

"""The environment variables of a learner: what torchrun would set, what the owner asked for, what meshtrain needs."""

import os

from meshwire.local import JOB_VARIABLE
from meshwire.messages.job import JobSpec

MASTER_PORT = "29500"  # torchrun's default; nothing of meshtrain listens there


def learner_environment(spec: JobSpec, rank: int, members: int, *, threads: int, master_host: str) -> dict[str, str]:
    """All variables but those of the endpoint and the shared memory.

    Args:
        threads: how many the learner may use (M3).
        master_host: where rank 0 is, for scripts that open a connection of their own.
    """
    return {
        "OMP_NUM_THREADS": str(threads),  # torch's own, too, unless the script or its owner say otherwise
        **dict(spec.env),
        "RANK": str(rank),
        "WORLD_SIZE": str(members),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(members),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(members),
        "MASTER_ADDR": master_host,
        "MASTER_PORT": MASTER_PORT,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": spec.job,
        "PYTHONUNBUFFERED": "1",
        JOB_VARIABLE: spec.job,
    }


def learner_threads(learners_here: int) -> int:
    """M3: a fair share of this machine's cores."""
    return max(1, (os.cpu_count() or 1) // learners_here)

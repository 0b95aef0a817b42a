"""The environment variables of a learner: what the owner asked for, and what meshtrain needs.

Not torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, ...): libraries that find them open a process group of their own, which
trains outside the job, without encryption.
"""

import os

from meshwire.memory_layout.shared_slots import JOB_VARIABLE
from meshwire.messages.job import JobSpec


def learner_environment(spec: JobSpec, *, threads: int) -> dict[str, str]:
    """The learner's environment variables, but for those of the endpoint and the shared memory.

    Args:
        threads: how many the learner may use (M3).
    """
    return {
        "OMP_NUM_THREADS": str(threads),  # torch's own, too, unless the script or its owner say otherwise
        **dict(spec.env),
        "PYTHONUNBUFFERED": "1",
        JOB_VARIABLE: spec.job,
    }


def learner_threads(learners_here: int) -> int:
    """How many threads a learner may use: a fair share of this machine's cores (M3)."""
    return max(1, (os.cpu_count() or 1) // learners_here)

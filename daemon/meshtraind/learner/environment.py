"""The environment variables of a learner: what the owner asked for, what meshtrain needs, and torchrun's.

Of torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, ...) scripts and libraries know that they are one of several. Who finds
them opens a process group: so a script gets none whose devices train each by itself, and none that calls mt.prepare.
With `submit --engine torchrun` (P9) all scripts have them, as torchrun's would.
"""

import os
import re
from dataclasses import astuple, dataclass
from pathlib import Path

from meshtraind.learner.own_groups import GLOO_INTERFACE_VARIABLE, Meeting
from meshwire.memory_layout.shared_slots import JOB_VARIABLE
from meshwire.messages.job import JobSpec

_PREPARE = re.compile(r"\b(mt|meshtrain)\.prepare\b|from meshtrain import [^\n]*\bprepare\b")


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """Which script of how many this one is.

    Attributes:
        rank, members: of the job, or of its world where it restarts its scripts (P6).
        restarts: how many failures came before this world.
        restarts_max: how many may.
        said: of this restart, a line of the script's log; empty: it is none.
        meeting: where scripts meet that exchange by gloo (P9); None: daemons carry all.
    """

    rank: int
    members: int
    restarts: int = 0
    restarts_max: int = 0
    said: str = ""
    meeting: Meeting | None = None


def learner_environment(spec: JobSpec, place: ScriptPlace, *, prepares: bool, threads: int) -> dict[str, str]:
    """The learner's environment variables, but for those of the endpoint and the shared memory.

    Args:
        prepares: the script calls mt.prepare.
        threads: how many the learner may use (M3).
    """
    without = place.meeting is None and (spec.independent or prepares)
    return {
        **({} if without else _torchrun(spec, place)),
        "OMP_NUM_THREADS": str(threads),  # torch's own, too, unless the script or its owner say otherwise
        **dict(spec.env),
        "PYTHONUNBUFFERED": "1",
        JOB_VARIABLE: spec.job,
    }


def calls_prepare(script: Path) -> bool:
    """Whether a script's text calls mt.prepare. One that does so in another of its files has torchrun's variables, of
    which libraries alone take notice: Lightning, Accelerate."""
    try:
        return _PREPARE.search(script.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False  # whoever runs it says so


def _torchrun(spec: JobSpec, place: ScriptPlace) -> dict[str, str]:
    """What torchrun sets, with one rank a device. The address is of no port where daemons have the store."""
    meeting = place.meeting
    address, port, interface = ("127.0.0.1", 1, None) if meeting is None else astuple(meeting)
    rank, members = place.rank, place.members
    here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(members)}
    role = {"ROLE_NAME": "default", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(members)}
    elastic = {
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(place.restarts_max),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(members),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **({} if interface is None else {GLOO_INTERFACE_VARIABLE: interface}),
        "ACCELERATE_USE_CPU": "true",  # else it trains each device by itself, without a word, where LOCAL_RANK is set
        **here,
        **role,
        **elastic,
    }


def learner_threads(learners_here: int, max_cpu_percent: int) -> int:
    """How many threads a learner may use: a fair share of the cores that this machine's owner leaves to them (M3)."""
    return max(1, (os.cpu_count() or 1) * max_cpu_percent // 100 // learners_here)

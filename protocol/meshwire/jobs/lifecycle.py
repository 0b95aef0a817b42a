"""A job's life on one daemon: all states, events and transitions in one table (after h11's `_state.py`)."""

import hashlib
import re
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints

from meshwire import limits
from meshwire.message_base import DeviceId, Name, Wire


class JobState(StrEnum):
    OFFERED = "offered"  # proposed to this daemon, not yet accepted
    FETCHING = "fetching"  # receiving its files
    READY = "ready"  # all files here, waiting for every member to be ready
    STARTING = "starting"  # folder written, learner being started
    RUNNING = "running"
    FINISHING = "finishing"  # own learner is done; serving rounds and results until all are
    CANCELLING = "cancelling"  # somebody cancelled; the learner is being stopped
    FAILING = "failing"  # something failed; the learner is being stopped
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # it may begin again (J5): the daemon ended while the job was on it, or no base of it was left


class JobEvent(StrEnum):
    ACCEPT = "accept"
    FILES_COMPLETE = "files complete"
    START = "start"  # every member is ready
    LEARNER_STARTED = "learner started"  # on a hub: the others' learners have
    LEARNER_DONE = "learner done"  # exit code 0
    ALL_DONE = "all done"  # every member has announced the end of its learner
    FAIL = "fail"  # here or at any member
    CANCEL = "cancel"
    STOPPED = "stopped"  # nothing of a failing or cancelled job runs here any more
    LOSE = "lose"  # its daemon died, which is found at the next start; or no base of it is left on any device


_S, _E = JobState, JobEvent

# Before a learner exists there is nothing to stop: failure and cancellation end the job at once.
_WAITING = {_E.FAIL: _S.FAILED, _E.CANCEL: _S.CANCELLED, _E.LOSE: _S.LOST}
_STARTED = {_E.FAIL: _S.FAILING, _E.CANCEL: _S.CANCELLING, _E.LOSE: _S.LOST}
# While stopping, the first cause stands: members' news of the same end cross on the way and change nothing.
_CROSSING = (_E.LEARNER_STARTED, _E.LEARNER_DONE, _E.ALL_DONE, _E.FAIL, _E.CANCEL)

TRANSITIONS: MappingProxyType[JobState, MappingProxyType[JobEvent, JobState]] = MappingProxyType(
    {
        state: MappingProxyType(row)
        for state, row in {
            _S.OFFERED: {_E.ACCEPT: _S.FETCHING, **_WAITING},
            _S.FETCHING: {_E.FILES_COMPLETE: _S.READY, **_WAITING},
            _S.READY: {_E.START: _S.STARTING, **_WAITING},
            _S.STARTING: {_E.LEARNER_STARTED: _S.RUNNING, **_STARTED},
            _S.RUNNING: {_E.LEARNER_DONE: _S.FINISHING, **_STARTED},
            _S.FINISHING: {_E.ALL_DONE: _S.SUCCEEDED, **_STARTED},
            _S.CANCELLING: {
                **dict.fromkeys(_CROSSING, _S.CANCELLING),
                _E.STOPPED: _S.CANCELLED,
                _E.LOSE: _S.LOST,
            },
            _S.FAILING: {
                **dict.fromkeys(_CROSSING, _S.FAILING),
                _E.STOPPED: _S.FAILED,
                _E.LOSE: _S.LOST,
            },
            _S.SUCCEEDED: {},
            _S.FAILED: {},
            _S.CANCELLED: {},
            _S.LOST: {},
        }.items()
    }
)

TERMINAL_STATES = frozenset(state for state, row in TRANSITIONS.items() if not row)

# What `submit` and `logs -f` end with. 2 is left to usage errors; 130 is a shell's for an interruption.
EXIT_CODES = MappingProxyType({_S.SUCCEEDED: 0, _S.FAILED: 1, _S.LOST: 3, _S.CANCELLED: 130})


class IllegalTransitionError(Exception):
    """An event that has no meaning in a job's state: a bug in the caller, or a peer out of step."""


def advance(state: JobState, event: JobEvent) -> JobState:
    """The state after `event`. Raises IllegalTransitionError naming both."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransitionError(f"a job that is {state.value} has no event {event.value!r}") from None


# Crockford's base32 in lower case: its characters sort like their values, and none is mistaken for another.
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
JOB_ID_CHARS = 12  # 60 bits: a million jobs have two equal ids once in two million times
_ID_RANDOM_BYTES = 8

JOB_ID_PATTERN = rf"^[{_ID_ALPHABET}]{{{JOB_ID_CHARS}}}$"
JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]


def new_job_id(random_bytes: bytes) -> str:
    """Twelve characters of chance from the first on, so that a person needs to type but two or three of them.

    They say nothing of the time: a job knows when it was submitted.

    Args:
        random_bytes: at least 8, uniformly random.
    """
    if len(random_bytes) < _ID_RANDOM_BYTES:
        raise ValueError(f"{len(random_bytes)} random bytes, a job id needs {_ID_RANDOM_BYTES}")
    chance = int.from_bytes(random_bytes[:_ID_RANDOM_BYTES], "big")
    return "".join(_ID_ALPHABET[chance >> 5 * place & 31] for place in range(JOB_ID_CHARS))


def job_number(job_id: str) -> int:
    """The job's number in frame headers (W1): the first 8 bytes of SHA-256 of the id, as a u64."""
    if not re.fullmatch(JOB_ID_PATTERN, job_id):
        raise ValueError(f"{job_id!r} is not a job id")
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big")


class JobRecord(Wire):
    """What a daemon remembers of a job, and tells whoever lists jobs. Times are Unix seconds."""

    id: JobId
    name: Name
    spec: dict[str, JsonValue]
    state: JobState
    members: Annotated[tuple[DeviceId, ...], Field(max_length=limits.MEMBERS_MAX)]  # in ring order
    submitter: DeviceId
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None  # of this device's learner, where it had one
    error: Annotated[str, StringConstraints(max_length=limits.ERROR_CHARS_MAX)] | None = None

"""A member of a running job is killed, and comes back: a loss that its codec's state has to survive."""

import time
from collections.abc import Callable, Sequence

from meshtrain.demo.localmesh import LocalDaemon
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosDaemon

AWAITED_S = 300.0
POLL_S = 0.1


def lose_and_return(daemons: Sequence[LocalDaemon], job: str, rounds: int) -> None:
    """Kills the last daemon once a quarter of the rounds is over, and starts it again when the others have gone on.

    Raises:
        TimeoutError: if its learner does not compute again before the job ends, or something takes too long.
        LocalMeshError: if the daemon does not start.
    """
    first, lost = daemons[0], daemons[-1]
    assert isinstance(lost, ChaosDaemon)
    everybody = tuple(range(len(daemons)))
    _await(first, job, lambda seen: seen.rounds >= rounds // 4, "a quarter of the rounds")
    lost.kill()
    try:
        alone = _await(first, job, lambda seen: seen.present == everybody[:-1], "a generation without the last member")
        _await(first, job, lambda seen: seen.rounds > alone.rounds + 1, "rounds without it")
    finally:
        lost.start()
        lost.wait()
    _await(first, job, lambda seen: seen.learning == everybody, "its return")


def _await(daemon: LocalDaemon, job: str, condition: Callable[[JobSummary], bool], what: str) -> JobSummary:
    deadline_s = time.monotonic() + AWAITED_S
    while not condition(seen := jobs.summary(daemon, job)):
        if seen.ended_at_s is not None:
            raise TimeoutError(f"the job ended before {what}: {seen.error or seen.state}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {AWAITED_S:g} s for {what}")
        time.sleep(POLL_S)
    return seen

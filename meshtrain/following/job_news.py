"""What happens to a job's members while somebody follows it, told at the right moment."""

import time

from meshtrain.following.speed import SpeedWatch
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from meshwire.messages.job import JobSummary
from meshwire.peer_news import losses, news, script_failed

FAILURE_HOLD_S = 2.0  # news of a script that has failed waits so long: if it fails everywhere, the end tells it


class JobNews:
    """Lines for a person, each told once."""

    def __init__(self) -> None:
        self._seen: JobSummary | None = None
        self._held: list[str] = []  # in order
        self._held_until_s = 0.0
        self._speed = SpeedWatch()

    def look(self, job: JobSummary) -> list[str]:
        """The lines about members that are to be shown now."""
        before, self._seen = self._seen, job
        now_s = time.monotonic()
        if before is None:
            return losses(job)
        if script_failed(before, job):
            self._held_until_s = now_s + FAILURE_HOLD_S
        self._held += news(before, job)
        if (slower := self._speed.look(job, now_s)) is not None:
            self._held.append(slower)
        if job.state is JobState.FAILING or job.state in TERMINAL_STATES:  # its end tells all of it
            self._held.clear()
        elif now_s < self._held_until_s:
            return []
        told, self._held = self._held, []
        return told

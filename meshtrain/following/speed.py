"""Notices that a job is slower than was predicted when its settings were chosen."""

from meshwire.job_figures import samples_s
from meshwire.messages.job import JobSummary
from meshwire.sync_modes.settings_changes import SettingsChanges, newest_codec
from meshwire.text import printable

SLOWER = 0.75  # of what was predicted: nine of ten predictions are nearer than that (tests/bench/results/predicted.md)
SLOWER_FOR_S = 60.0  # before it is told: evaluations and checkpoints take less


class SpeedWatch:
    """Notices that a job is, and stays, slower than was predicted, as when a laptop was carried into another room."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._changes: SettingsChanges = ()  # when it was looked at last
        self._told = False

    def look(self, job: JobSummary, now_s: float) -> str | None:
        """A line about it, once for all settings that the job goes over to; else None."""
        codec = newest_codec(job.codec or "", job.changes)
        if job.changes != self._changes:
            self._changes, self._since_s, self._told = job.changes, None, False
        measured_s = samples_s(job)
        if job.prediction is None or measured_s is None or measured_s >= SLOWER * job.prediction.samples_s:
            self._since_s = None
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s < self._since_s + SLOWER_FOR_S or self._told:
            return None
        self._told = True
        told = f"for a minute it has made {measured_s / job.prediction.samples_s:.0%} of what was predicted"
        step = job.prediction.step
        if job.changes and job.changes[-1].by == "plan":
            return f"{told}, also with {printable(codec)}: meshtrain doctor says why the network has become slower"
        if step is not None and not any(one.by == "person" for one in job.changes):
            return (
                f"{told}: where the network has become slower, it goes over to a codec or a period that sends less by "
                "itself, if one helps; meshtrain doctor says why it is slower"
            )
        return (
            f"{told}: where the network has become slower, meshtrain doctor says why, and meshtrain change {job.job} "
            f"--codec X, with one that sends less than {printable(codec)}, has it go on faster"
        )

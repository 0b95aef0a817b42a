"""Has a job go over to another codec or period by itself, where its links are not what it was planned for."""

from meshtraind.storage.job_record import Job
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import JobSummary
from meshwire.planning.replan import Replanned, Replanner, StepForecast
from meshwire.sync_modes.settings_changes import SettingsInForce, SettingsWish, newest_sync


class SettingsChoice:
    """Looks at a job once a second. The lowest rank that computes asks for all, and only as long as no person has:
    settings that somebody has chosen stay."""

    def __init__(self, job: Job) -> None:
        self._job = job
        prediction = job.spec.prediction
        forecast = None if prediction is None else prediction.step
        self._replanner = None if forecast is None else Replanner(forecast, job.spec.sync.round_steps)

    def look(self, summary: JobSummary, step: int, now_s: float) -> Replanned | None:
        """The settings to ask for now, if there are any.

        Args:
            step: of the learner here, as it counts them: of several local ones, or passes, which its round is of.
        """
        replanner = self._replanner
        if replanner is None or self._job.state is not JobState.RUNNING:
            return None
        if not summary.learning or min(summary.learning) != self._job.rank:
            return None
        if any(change.by == "person" for change in summary.changes):
            return None
        settings = self._job.in_force(summary.changes)
        taken = step * newest_sync(self._job.spec.sync, summary.changes).round_steps
        return replanner.look(
            *(now_s, taken, settings, slowness(summary, replanner.forecast), summary.learning),
            # A script that counts with `mt.steps` has worked out its last round from the period (X6).
            keeps_period=any(report.metrics.rounds_planned for report in summary.ranks),
        )


def wish_for(settings: SettingsInForce, now: SettingsInForce) -> SettingsWish:
    """What all are asked for, as the plan's own: what is otherwise now."""
    codec = None if settings.codec == now.codec else settings.codec
    return SettingsWish(codec=codec, period=None if settings.period == now.period else settings.period, by="plan")


def slowness(summary: JobSummary, forecast: StepForecast) -> float:
    """How many times as long the slowest member computes for a step as was predicted of the slowest; 1 where nobody has
    told."""
    of_steps_s = [
        report.metrics.batch / report.metrics.samples_per_s
        for report in summary.ranks
        if report.rank in summary.learning and report.metrics.batch and report.metrics.samples_per_s > 0
    ]
    return max(of_steps_s) / forecast.compute_s if of_steps_s and forecast.compute_s > 0 else 1.0

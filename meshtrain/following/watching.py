"""A job watched until it ends, and what there is to tell when it has."""

from collections.abc import Callable

from meshtrain.client import Client, ask
from meshtrain.following.shown_text import human_seconds, script_text
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobState
from meshwire.message_base import Wire
from meshwire.messages.job import JobSummary
from meshwire.messages.local import Watch, Watched
from meshwire.peer_news import failures, losses, outcome_notes
from meshwire.text import printable

WATCH_TIMEOUT_S = 14 * 86400.0  # the longest that one command follows a job
WATCH_SILENCE_S = 30.0  # it is told about the job every second


def watch_job(client: Client, job: str, show: Callable[[JobSummary], None], tell: Callable[[str], None]) -> JobSummary:
    """Shows every update of a job until it has ended; returns the last state, which it has not shown.

    Args:
        tell: is given a line for each device that joins this one's meanwhile.
    """

    def on_event(event: Wire) -> None:
        if isinstance(event, Watched):
            for device in event.joined:
                tell(f"{printable(device.name)} joined, added by {printable(device.added_by)}")
            show(event.summary)

    reply = ask(
        client,
        Watch(job=job),
        Watched,
        name=f"job {job}",
        timeout_s=WATCH_TIMEOUT_S,
        on_event=on_event,
        silence_s=WATCH_SILENCE_S,
    )
    return reply.summary


def has_ended(job: JobSummary) -> bool:
    """Whether nothing of it will change any more."""
    return job.state in TERMINAL_STATES


def outcome_lines(job: JobSummary) -> list[str]:
    """How a job ended, and why it failed: for stderr."""
    took = ""
    if job.started_at_s is not None and job.ended_at_s is not None:
        took = f" after {human_seconds(job.ended_at_s - job.started_at_s)}"
    facts = [f"{job.rounds} rounds"] if job.rounds else []
    if job.replicas_equal is not None:
        verdict = "bit-equal" if job.replicas_equal else "DIFFERENT"
        many = "" if job.hashes_compared == 1 else "s"
        facts.append(f"replicas {verdict} ({job.hashes_compared} comparison{many})")
    lines = [f"job {job.job} ({printable(job.name)}) {job.state}{took}" + "".join(f", {fact}" for fact in facts)]
    if job.state == JobState.SUCCEEDED:
        return lines + [f"note: {note}" for note in outcome_notes(job)]
    notes = [f"note: {loss}" for loss in losses(job)]
    if job.state == JobState.CANCELLED:
        if job.error:
            lines = [f"{lines[0]}, {printable(job.error.removeprefix('cancelled '))}"]
        return lines + notes
    lines += [*notes, *(script_text(text) for text in failures(job))]
    if any(report.failure for report in job.ranks):
        lines.append(f"All that the scripts said: meshtrain logs {job.job}")
    return lines

"""A job handed to the daemon: what it answers, and following it from there."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.exits import EXIT_INTERRUPTED
from meshtrain.cli.ui.follow import follow_job
from meshtrain.cli.ui.job import find_job
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import plain, print_json, say
from meshtrain.client import Client, ask
from meshtrain.errors import RequestError
from meshtrain.following.shown_text import printable_lines
from meshwire.job_figures import prediction_text
from meshwire.message_base import Wire
from meshwire.messages.config import NotifyOfJob
from meshwire.messages.envelope import Done
from meshwire.messages.local import Resubmit, Submit, SubmitProgress, Submitted
from meshwire.text import printable

# Copying and sending a data folder of the largest size over a home network takes days; the daemon ends a transfer
# that stands still long before.
SUBMIT_TIMEOUT_S = 7 * 86400.0
NOTIFY_TIMEOUT_S = 10.0


def send(client: Client, body: Submit | Resubmit, stages: Stages, notify: str | None = None) -> Submitted:
    """Waits until all members have what they need, or until it is known what would be sent (`dry_run`).

    Args:
        notify: command that this device runs when the job ends or needs help; None: as its owner has set.
    """

    def show(event: Wire) -> None:
        if isinstance(event, SubmitProgress):
            stages.show(event.text, event.done_bytes, event.total_bytes)

    try:
        submitted = ask(client, body, Submitted, name="submit", timeout_s=SUBMIT_TIMEOUT_S, on_event=show)
    except KeyboardInterrupt:
        say("\nInterrupted while submitting. See whether the job was started: meshtrain jobs")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if notify is not None:
        try:
            ask(client, NotifyOfJob(job=submitted.job, command=notify), Done, name="notify", timeout_s=NOTIFY_TIMEOUT_S)
        except RequestError as error:  # the job has begun all the same
            say(f"note: --notify: {error}")
    return submitted


def started(
    submitted: Submitted,
    notes: Sequence[str],
    data_dir: Path | None,
    *,
    detach: bool,
    json: bool,
    predicted: bool = False,
) -> int:
    """Tells of a job that has begun, and follows it unless `detach`. Returns the exit code.

    Args:
        predicted: in the end, tell how fast it was beside what was predicted.
    """
    for note in notes:
        say(f"note: {printable_lines(note)}")
    job, members = submitted.job, submitted.members
    where = ", ".join(printable(member.name) for member in members)
    say(f"job {job} on {len(members)} {'device' if len(members) == 1 else 'devices'}: {where}")
    for command in (f"logs -f {job}", f"cancel {job}", f"get {job}", "jobs"):
        say(f"  meshtrain {command}")
    document: dict[str, Any] = {"job": job, "members": [plain(member) for member in members], "notes": list(notes)}
    if detach:
        if json:
            print_json(document)
        else:
            print(job, flush=True)
        return 0
    say("Following; ctrl-C detaches, the job goes on.")
    code = follow_job(data_dir, job, members, logs=sys.stderr if json else None)
    if json or predicted:
        with connected(data_dir) as client:
            summary = find_job(client, job)
        if (told := prediction_text(summary)) is not None:
            say(told)
        if json:
            print_json({**document, "summary": plain(summary), "exit_code": code})
    return code

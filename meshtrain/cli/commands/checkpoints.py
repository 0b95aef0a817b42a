"""`checkpoints`: the saved states of a job, and whether they can be used."""

import time
from collections.abc import Sequence

from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import reported
from meshtrain.cli.ui.job import find_job
from meshtrain.cli.ui.options import DataDir, Json, LatestJob
from meshtrain.cli.ui.terminal import plain, print_json, print_table, say
from meshtrain.client import ask
from meshtrain.following.shown_text import human_seconds
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.jobs.files import human_bytes
from meshwire.messages.job import Checkpoints, CheckpointSummary, JobSummary, ListCheckpoints
from meshwire.text import printable

READ_TIMEOUT_S = 600.0  # every file is read, on all members


@reported
def checkpoints(
    job: LatestJob = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """List the saved states of a job, on this device and on its members that are linked now, and check them.

    Every file is read and compared with its hash, which takes a while for large models. One that was given up is of a
    history that was not kept after a partition: `submit --resume` takes it only by its whole name.
    """
    with connected(data_dir) as client:
        found = find_job(client, job)
        name = f"checkpoints of {found.job}"
        reply = ask(client, ListCheckpoints(job=found.job), Checkpoints, name=name, timeout_s=READ_TIMEOUT_S)
    if json:
        print_json(plain(reply))
        return
    for member in reply.unasked:
        say(f"{printable(member)} does not answer: what it has is not shown")
    if not reply.checkpoints:
        say(f"No checkpoints of job {found.job} ({printable(found.name)}).")
        return
    now_s = time.time()
    rows = [_row(found, checkpoint, now_s) for checkpoint in reply.checkpoints]
    print_table(("ROUND", "CREATED", "SIZE", "RANK", "DEVICE", "STATE"), rows, wrapping="STATE")


def _row(job: JobSummary, checkpoint: CheckpointSummary, now_s: float) -> Sequence[str]:
    created_s, size_bytes = checkpoint.created_at_s, checkpoint.size_bytes
    state = "ok" if checkpoint.wrong is None else printable(checkpoint.wrong)
    return (
        str(CheckpointName(checkpoint.round, checkpoint.given_up or "")),
        "-" if created_s is None else f"{human_seconds(now_s - created_s)} ago",
        "-" if size_bytes is None else human_bytes(size_bytes),
        str(checkpoint.rank),
        printable(job.members[checkpoint.rank].name) if checkpoint.rank < len(job.members) else "?",
        f"given up, {state}" if checkpoint.given_up else state,
    )

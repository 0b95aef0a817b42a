"""What the shell offers after TAB: jobs and paired devices, as the daemon knows them.

Whoever presses TAB waits, and an error would stand in the line that is being typed. So nothing is offered where no
daemon answers at once; the command itself says why when it is run.
"""

from pathlib import Path

import typer

from meshtrain.client import Client
from meshtrain.datadir import data_folder
from meshtrain.errors import MeshtrainError
from meshwire.message_base import Wire
from meshwire.messages.job import Found
from meshwire.messages.local import GetJobs, GetPeers, Peers
from meshwire.text import printable

ANSWER_TIMEOUT_S = 1.0

Offer = tuple[str, str]  # what is typed, and what the shell says of it


def complete_jobs(context: typer.Context, incomplete: str) -> list[Offer]:
    """Ids of jobs, the newest first."""
    reply = _answer(context, GetJobs())
    jobs = sorted(reply.jobs, key=lambda job: job.created_at_s, reverse=True) if isinstance(reply, Found) else []
    return [(job.job, printable(f"{job.name}, {job.state}")) for job in jobs if job.job.startswith(incomplete)]


def complete_peers(context: typer.Context, incomplete: str) -> list[Offer]:
    """Names of devices that are paired, or wait for a person's word: `unpair` takes both."""
    reply = _answer(context, GetPeers())
    peers = reply.peers if isinstance(reply, Peers) else ()
    paired = [peer for peer in peers if peer.state != "seen"]
    return [(printable(peer.name), peer.state) for peer in paired if peer.name.startswith(incomplete)]


def _answer(context: typer.Context, question: Wire) -> Wire | None:
    typed = context.params.get("data_dir")
    try:
        client = Client.connect(data_folder(Path(typed) if typed else None), ANSWER_TIMEOUT_S)
        try:
            return client.request(question, timeout_s=ANSWER_TIMEOUT_S, name="completion")
        finally:
            client.close()
    except (MeshtrainError, TimeoutError, OSError):
        return None

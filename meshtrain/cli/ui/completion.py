"""What the shell offers after TAB: jobs, paired devices and settings, as the daemon knows them.

Whoever presses TAB waits, and an error would stand in the line that is being typed. So nothing is offered where no
daemon answers at once; the command itself says why when it is run.
"""

import re
import time
from collections import Counter
from pathlib import Path

import typer

from meshtrain.cli.ui.job import newest_first
from meshtrain.client import Client
from meshtrain.datadir import data_folder
from meshtrain.errors import MeshtrainError
from meshwire.message_base import Wire
from meshwire.messages.config import ConfigShown, GetConfig
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs, GetPeers, GetStatus, Peers, Status

ANSWER_TIMEOUT_S = 1.0
_WORD = re.compile(r"[^\W_][\w.@%+,-]*")  # what bash, zsh and fish all take as it is; ":" ends a word in bash

ID_CHARS = 8  # of a device's id, where its name cannot be typed as it is

Offer = tuple[str, str]  # what is typed, and what the shell says of it


def complete_jobs(context: typer.Context, incomplete: str) -> list[Offer]:
    """Ids of jobs, the newest first; behind them names that begin so, once something is typed."""
    jobs = _jobs(context)
    offers = [(job.job, _said(f"{job.name}, {job.state}")) for job in jobs if job.job.startswith(incomplete)]
    if incomplete:
        newest = {job.name: job for job in reversed(jobs) if job.name.startswith(incomplete)}
        for name, job in newest.items():
            if _WORD.fullmatch(name) and not any(one.job.startswith(name.lower()) for one in jobs):
                offers.append((name, _said(f"{job.job}, {job.state}")))
    return offers


def complete_ranks(context: typer.Context, incomplete: str) -> list[Offer]:
    """Names of the devices of the job that is meant, or their ranks where a name cannot be typed."""
    # Behind an option that lacks its value click has read no argument yet, and has kept what was typed before.
    typed, jobs = context.params.get("job") or next(iter(context.args), None), _jobs(context)
    meant = [job for job in jobs if not typed or job.job.startswith(typed) or job.name == typed]
    members = meant[0].members if meant else ()
    names = Counter(member.name for member in members)
    offers = [
        (member.name if names[member.name] == 1 and _WORD.fullmatch(member.name) else str(rank), _said(member.name))
        for rank, member in enumerate(members)
    ]
    return [(offer, said) for offer, said in offers if offer.startswith(incomplete)]


def complete_trainers(context: typer.Context, incomplete: str) -> list[Offer]:
    """Of a list with commas the last one: names of this device and of those that are linked."""
    before, comma, last = incomplete.rpartition(",")
    status, peers = _answer(context, GetStatus()), _answer(context, GetPeers())
    names = [status.name] if isinstance(status, Status) else []
    names += [peer.name for peer in peers.peers if peer.state == "linked"] if isinstance(peers, Peers) else []
    taken = set(before.split(","))
    return [
        (f"{before}{comma}{name}", _said(name))
        for name in names
        if name.startswith(last) and name not in taken and _WORD.fullmatch(name)
    ]


def complete_waiting(context: typer.Context, incomplete: str) -> list[Offer]:
    """Devices that wait for a person's word."""
    return [(typed, said) for typed, said in complete_peers(context, incomplete) if "waiting" in said]


def _jobs(context: typer.Context) -> list[JobSummary]:
    reply = _answer(context, GetJobs())
    return newest_first(reply.jobs) if isinstance(reply, Found) else []


def complete_peers(context: typer.Context, incomplete: str) -> list[Offer]:
    """Names of devices that are paired, or wait for a person's word: `unpair` takes both.

    A name that a shell would read as something else, or that several have, is offered as the beginning of the id.
    """
    reply = _answer(context, GetPeers())
    peers = [peer for peer in reply.peers if peer.state != "seen"] if isinstance(reply, Peers) else []
    names = Counter(peer.name for peer in peers)
    offers: list[Offer] = []
    for peer in peers:
        if names[peer.name] == 1 and _WORD.fullmatch(peer.name):
            offers.append((peer.name, peer.state))
        else:
            offers.append((peer.device[:ID_CHARS], _said(f"{peer.name}, {peer.state}")))
    return [(typed, said) for typed, said in offers if typed.startswith(incomplete)]


def complete_settings(context: typer.Context, incomplete: str) -> list[Offer]:
    """Keys of `meshtrain config`."""
    reply = _answer(context, GetConfig())
    entries = reply.entries if isinstance(reply, ConfigShown) else ()
    return [(one.key, _said(str(one.value))) for one in entries if one.key.startswith(incomplete)]


def _said(text: str) -> str:
    """What zsh may be told beside an offer: it evaluates that, and another device has chosen names."""
    return "".join(char if char.isalnum() or char in " .,_-" else "_" for char in text)


def _answer(context: typer.Context, question: Wire) -> Wire | None:
    typed = context.params.get("data_dir")
    end_s = time.monotonic() + ANSWER_TIMEOUT_S
    try:
        client = Client.connect(data_folder(Path(typed) if typed else None), ANSWER_TIMEOUT_S)
        try:
            return client.request(question, timeout_s=max(0.0, end_s - time.monotonic()), name="completion")
        finally:
            client.close()
    except (MeshtrainError, TimeoutError, OSError):
        return None
    except (RuntimeError, ValueError):  # a folder that cannot be: ~nobody, or with a character that no path has
        return None

"""The start state of a job on its way from the giver's learner to the others: one file for each unit that differs."""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtraind.runtime.open_below import read_below
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.fetch import fetch_blob
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import Waiting

TOLD_EVERY_S = 1.0
RELINK_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class GiverLink:
    """The way to the member that gives its start state, for as long as it is the giver.

    Attributes:
        links: to each other member, by rank; live.
        still: whether it is the giver; if not, there is another one, with another state.
    """

    rank: int
    links: Mapping[int, Connection]
    still: Callable[[], bool]


async def fetch_units(
    job: str,
    wanted: Sequence[int],
    offered: Mapping[int, BlobRef],
    giver: GiverLink,
    folder: Path,
    store: BlobStore,
    emit: Emit,
) -> bool:
    """Puts the wanted units into `folder`. False: there is another giver now.

    Raises:
        BlobError, RequestFailed, TimeoutError: as `fetch_blob`; or a unit was not offered.
    """
    told_s = 0.0
    for unit in wanted:
        if unit not in offered:
            raise RequestFailed(f"rank {giver.rank} did not offer unit {unit} of the start state")
    await asyncio.to_thread(store.hold, job, [offered[unit].sha256 for unit in wanted], passing=True)
    for count, unit in enumerate(wanted):
        if not await _fetch(job, offered[unit], giver, store):
            return False
        path = folder / f"{unit}.safetensors"
        path.unlink(missing_ok=True)
        path.symlink_to(store.blob_path(offered[unit].sha256))
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            emit(Waiting(reason=f"start state of rank {giver.rank}: {count + 1} of {len(wanted)} parameters"))
    return giver.still()


async def _fetch(job: str, unit: BlobRef, giver: GiverLink, store: BlobStore) -> bool:
    """Fetches one unit, over one link after the other if need be."""
    while giver.still():
        link = giver.links.get(giver.rank)
        with contextlib.suppress(ConnectionEnded):  # the next generation has another link to it, or another giver
            if link is not None:
                await fetch_blob(link, job, unit, store)
                return True
        await asyncio.sleep(RELINK_POLL_S)
    return False


def clear(folder: Path, units: Sequence[int]) -> None:
    """Deletes these units before the learner writes them: what came of another giver's are links into the store.
    Blocking."""
    for unit in units:
        (folder / f"{unit}.safetensors").unlink(missing_ok=True)


def ingest(job: str, folder: Path, units: Sequence[int], store: BlobStore) -> dict[int, BlobRef]:
    """Stores the units that the giver's learner has written. Blocking."""
    refs = {}
    for unit in units:
        path = folder / f"{unit}.safetensors"
        with read_below(folder.parents[1], path.parts[-3:]) as file:  # below the folder of all jobs
            sha256 = hashlib.file_digest(file, "sha256").digest()
            size_bytes = os.fstat(file.fileno()).st_size
        store.hold(job, [sha256], passing=True)
        store.ingest(path, sha256, size_bytes)
        path.unlink()
        refs[unit] = BlobRef(sha256=sha256, size_bytes=size_bytes)
    return refs

"""DATA/jobs/ID/job.msgpack: what a daemon needs to return to a job that was running when it stopped."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgpack
from pydantic import ValidationError

from meshtraind.runtime.open_below import open_below, read_below
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.job import Generation, JobSpec, Member

log = logging.getLogger(__name__)

NAME = "job.msgpack"
_PART = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class JobFile(Wire):
    """What a restarted daemon needs to go on with a job: DATA/jobs/ID/job.msgpack, as this daemon knew it last."""

    spec: JobSpec
    members: tuple[Member, ...]
    started_at_s: float | None = None  # Unix time
    # the newest one that it entered (J5); None: it has left it by a person's word, or has not come into one
    generation: Generation | None = None

    def save(self, folder: Path) -> None:
        """Writes it into the job's folder, whole or not at all. Raises OSError."""
        part = folder / f"{NAME}.part"
        with os.fdopen(open_below(folder.parent, (folder.name, part.name), _PART), "wb") as file:
            file.write(self.pack())
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / NAME)


def forget(folder: Path) -> None:
    """Deletes the file of a job that has ended. Raises OSError."""
    (folder / NAME).unlink(missing_ok=True)


def load_all(folders: Iterable[Path]) -> dict[str, JobFile]:
    """The jobs in these folders that have not ended, by id; what cannot be read is named in the log and left out."""
    found = {}
    for folder in folders:
        try:
            with read_below(folder.parent, (folder.name, NAME)) as file:
                packed = file.read(limits.JOB_FILE_BYTES_MAX + 1)
            if len(packed) > limits.JOB_FILE_BYTES_MAX:
                raise ValueError("it is too large")
            job = JobFile.load(msgpack.unpackb(packed, strict_map_key=True))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, ValidationError) as error:
            log.warning("this daemon cannot return to the job in %s: %s", folder, error)
            continue
        found[job.spec.job] = job
    return found

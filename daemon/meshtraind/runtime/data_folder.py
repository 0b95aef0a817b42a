"""DATA/format: which format the data folder has, so that one of a newer meshtraind is refused before a byte is written.

One number stands for all that lies in the folder: pins, history, files of jobs, checkpoints. Whoever changes what is
written there, so that an older meshtraind would misread it or this one cannot read what is there, counts `FORMAT` on
and adds the step to `storage/migration.py`.

Everything here blocks on the disk, for less than a millisecond.
"""

import os
import re
from pathlib import Path

from meshwire import limits
from meshwire.frames.header import WIRE_VERSION

FORMAT = 5
"""2: manifests of checkpoints as of wire version 6; 3: the generation in job.msgpack; 4: introductions;
5: the outer step (R9) in numbers."""
BEFORE_THE_FILE = 1  # of wire versions up to 5
NAME = "format"
_FORM = re.compile(r"(?P<number>[1-9][0-9]{0,5}) written by (?P<writer>[ -~]{1,100})\n")


class FormatError(Exception):
    """The data folder is not one that this version can use; the message names it and what to do."""


def read_format(data_dir: Path) -> int:
    """The folder's format. Writes nothing.

    Raises:
        FormatError: it is of a newer meshtraind, or does not say what it is.
    """
    path = data_dir / NAME
    try:
        with path.open("rb") as file:
            text = file.read(limits.RUN_FILE_BYTES_MAX).decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return BEFORE_THE_FILE  # or there is no folder yet, and nothing to be brought to today's
    except OSError as error:
        raise FormatError(f"cannot read {path} ({error.strerror}): make it readable to the daemon's user") from error
    form = _FORM.fullmatch(text)
    if form is None:
        raise FormatError(f"{path} is damaged: restore it from a backup, or choose another --data-dir")
    number = int(form["number"])
    if number > FORMAT:
        raise FormatError(
            f"{data_dir} is of a newer meshtrain: {form['writer']} has written it in format {number}, and this one "
            f"knows formats up to {FORMAT}. Nothing was changed. Install the newer one again, or choose another "
            "--data-dir, where this device is a new one to its peers"
        )
    return number


def write_format(data_dir: Path, meshtrain: str) -> None:
    """Marks the folder as of today's format. `meshtrain`: the version that says so. Raises OSError."""
    path = data_dir / NAME
    part = path.with_name(f"{NAME}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{FORMAT} written by meshtrain {meshtrain} (wire version {WIRE_VERSION})\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)

"""Where a daemon's keys, jobs and logs are."""

import os
from pathlib import Path

from meshwire.memory_layout.shared_slots import DATA_DIR_VARIABLE


def data_folder(given: Path | None = None) -> Path:
    """The data folder as an absolute path: `given`, else $MESHTRAIN_DATA_DIR, else the user's data folder."""
    if given is None and os.environ.get(DATA_DIR_VARIABLE):
        given = Path(os.environ[DATA_DIR_VARIABLE])
    if given is None:
        import platformdirs

        given = Path(platformdirs.user_data_dir("meshtrain"))
    return given.expanduser().absolute()

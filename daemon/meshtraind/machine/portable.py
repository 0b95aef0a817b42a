"""Whether this process uses what only POSIX systems have, or its twins that run everywhere.

Windows has the twins alone. On Linux and macOS the variable has them used too, so that tests and the demo run what
Windows would. All programs of one data folder are to agree.
"""

import os
import sys

from meshwire.memory_layout.shared_slots import PORTABLE_VARIABLE


def portable() -> bool:
    """Whether the twins are used."""
    return sys.platform == "win32" or os.environ.get(PORTABLE_VARIABLE, "") not in ("", "0")

"""Where the daemon's log goes: to stderr, for a terminal or a service manager, or into a file of bounded size."""

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from meshtraind.runtime.log_limit import LimitedHandler
from meshwire import limits


class _BoundedFile(RotatingFileHandler):
    """`path` and, of what was before, `path`.1; each has at most LOG_FILE_BYTES_MAX.

    Where stdout and stderr lead into the same file, as `meshtrain up` has it, they follow into the next one: what is
    written when a crash is past logging is found there too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=limits.LOG_FILE_BYTES_MAX, backupCount=1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding=self.encoding, errors="backslashreplace")

    def doRollover(self) -> None:  # noqa: N802
        if self.stream is None:  # the last attempt failed half way
            self.stream = self._open()
        here = os.fstat(self.stream.fileno())  # not the path: somebody may have deleted the file
        following = [number for number in (1, 2) if _leads_to(number, here)]
        super().doRollover()
        for number in following:
            os.dup2(self.stream.fileno(), number)


def _leads_to(number: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(number), file)
    except OSError:  # it is closed
        return False


def open_log(path: Path | None, level: str) -> LimitedHandler:
    """Makes all that is logged go to the file, or to stderr. Raises OSError when the file cannot be opened."""
    target: logging.Handler = logging.StreamHandler() if path is None else _BoundedFile(path)
    # journald has timestamps of its own
    stamped = path is not None or "JOURNAL_STREAM" not in os.environ
    target.setFormatter(logging.Formatter(("%(asctime)s " if stamped else "") + "%(levelname)s %(name)s: %(message)s"))
    handler = LimitedHandler(target)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler

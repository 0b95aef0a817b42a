"""What a script prints, which goes into its log as long as there is room: a full disk must not end the training.

`print` raises OSError where its file cannot grow, and a script that says its loss would end by that, one learner after
the other as disks fill up. Here such output is dropped, and the log says so as soon as it can.
"""

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class LogFile(io.FileIO):
    """One of the process's standard streams, whose descriptor stays open.

    Attributes:
        lost_bytes: that had no room since anything was written.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost_bytes = 0

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes all of it, or drops what has no room. Returns the number of bytes given, as if all were written."""
        view = memoryview(data).cast("B")
        try:
            if self.lost_bytes:
                self._write_all(memoryview(f"[{self.lost_bytes} bytes are missing here: the disk was full]\n".encode()))
                self.lost_bytes = 0
            self._write_all(view)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.lost_bytes += len(view)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        while view:
            view = view[super().write(view) or 0 :]


def survive_full_disks() -> None:
    """From now on what this process prints is dropped where it has no room."""
    sys.stdout, sys.stderr = _survivor(sys.stdout), _survivor(sys.stderr)


def _survivor(stream: TextIO) -> TextIO:
    return io.TextIOWrapper(LogFile(stream.fileno()), stream.encoding, stream.errors, write_through=True)

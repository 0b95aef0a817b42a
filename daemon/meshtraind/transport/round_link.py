"""A link to another member as far as rounds go: their messages and chunks. The rest of a connection is not theirs."""

from collections.abc import Callable
from typing import Protocol

from meshtraind.transport.low_extra_delay import PathSample
from meshwire.frames.header import Header
from meshwire.message_base import Wire


class RoundLink(Protocol):
    """The way to one other member of a job. `Connection` is one."""

    def notify(self, body: Wire, *, job: int, generation: int, complete: int) -> None:
        """Sends a message that expects nothing; the numbers are those of the frame's header."""

    @property
    def writable(self) -> bool:
        """Whether a chunk may be sent now."""

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` whenever chunks may be sent again. Returns what unsubscribes."""

    def send_chunk(self, header: Header, payload: memoryview | bytes | None) -> None:
        """Queues one chunk, whose memory must stay unchanged until it has left; the caller has checked `writable`."""

    def path(self) -> PathSample | None:
        """What the kernel says of the way to another machine; None where it does not."""

    def share(self, owner: object, bytes_s: float | None) -> None:
        """What is sent leaves at most so fast, for other links send too; None: this owner sets no limit more."""

    @property
    def chunk_bytes_received(self) -> int:
        """Of chunk frames, those under way included: while it grows, the other end sends."""

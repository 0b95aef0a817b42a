"""A notice as the bytes that it travels in, made once for all links on which it is sent."""

from meshwire import limits
from meshwire.frames.header import control_frames
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Role, encode

REMEMBERED_BYTES_MAX = 64 * limits.KIB  # of the newest one: what goes to all members in every round is far less

Numbers = tuple[int, int, int]
"""Job, generation and complete, as they stand in the header of each frame."""


class NoticeFrames:
    """Makes frames of notices, and remembers the newest one's.

    Whoever tells all members something sends one message on one link after the other: its bytes are the same on each
    of them (W1).
    """

    def __init__(self) -> None:
        self._newest: tuple[Wire, Numbers, bytes] | None = None

    def of(self, body: Wire, *, job: int, generation: int, complete: int) -> bytes:
        """Raises ValueError when the message is longer than MESSAGE_BYTES_MAX."""
        numbers, newest = (job, generation, complete), self._newest
        if newest is not None and newest[0] is body and newest[1] == numbers:
            return newest[2]
        payload = encode(Envelope(Role.NOTICE, 0, body))
        frames = control_frames(payload, job=job, generation=generation, complete=complete)
        self._newest = (body, numbers, frames) if len(frames) <= REMEMBERED_BYTES_MAX else None
        return frames

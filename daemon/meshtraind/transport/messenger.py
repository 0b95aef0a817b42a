"""A connection as far as messages go: what most of the daemon needs of one, and all that a simulated one has to be."""

from typing import Protocol

from meshwire.message_base import Wire


class Messenger(Protocol):
    """The way to one other process: notices, and requests with their replies. `Connection` is one."""

    @property
    def name(self) -> str:
        """Who is at the other end, as errors and logs call it."""

    @property
    def closing(self) -> bool:
        """It has ended or is about to: what is sent is dropped."""

    def notify(self, body: Wire, *, job: int = 0) -> None:
        """Sends a message that expects nothing. `job`: its number, for the frame."""

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        """Sends a request and returns its reply.

        Raises RequestFailed (the other side could not do it), ConnectionEnded, or TimeoutError, which names `name`.
        """

    def refuse(self, reason: str) -> None:
        """Tells the other side why, and ends the connection."""

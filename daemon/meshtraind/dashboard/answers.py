"""Whom the dashboard asks: what the command line is answered, it is answered."""

from typing import Protocol

from meshtraind.transport.connection import Emit
from meshwire.message_base import Wire


class Answers(Protocol):
    """What a person at this device may ask, whichever way they ask it."""

    async def answer(self, body: Wire, emit: Emit) -> Wire:
        """The reply. Raises RequestFailed."""

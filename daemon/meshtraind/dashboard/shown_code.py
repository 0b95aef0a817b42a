"""The pairing code that the page shows: asked for once, kept while somebody may type it."""

import asyncio
import time
from typing import Any

from meshtraind.dashboard.answers import Answers
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.transport.connection import RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.local import PairCode, Paired, PairHost


class ShownCode:
    """At most one.

    Attributes:
        state: for the page: the code and until when, or how it ended; None: none was asked for.
    """

    def __init__(self, answers: Answers) -> None:
        self.state: dict[str, Any] | None = None
        self._answers = answers
        self._tasks = TaskSet("pairing on the dashboard", told_elsewhere)
        self._showing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Shows a code, unless one is shown. Raises nothing: how it goes is the state."""
        if self._showing is None or self._showing.done():
            self.state = {"asked": True}
            self._showing = self._tasks.spawn(self._show(), "code")

    def end(self) -> None:
        """Takes the code back."""
        if self._showing is not None:
            self._showing.cancel()
        self._showing = self.state = None

    async def close(self) -> None:
        """Takes the code back and waits for that."""
        await self._tasks.close()

    async def _show(self) -> None:
        try:
            reply = await self._answers.answer(PairHost(), self._hear)
        except RequestFailed as error:
            self.state = {"error": str(error)}
            return
        assert isinstance(reply, Paired)
        self.state = {"paired": reply.name}

    def _hear(self, event: Wire) -> None:
        if isinstance(event, PairCode):
            self.state = {
                "code": event.code,
                "expires_at_s": time.time() + event.expires_s,
                "addresses": list(event.addresses),
                "port": event.port,
            }

"""What was asked on a connection and waits for its answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role


class RequestFailed(Exception):
    """A request could not be done; the text says why and what to do, for a person to read."""


class ConnectionEnded(Exception):
    """The connection ended before the answer came; the text says why it ended."""


@dataclass(slots=True)
class _Pending:
    answer: "asyncio.Future[Wire]"
    on_event: Callable[[Wire], None] | None


class Requests:
    """The requests of one connection that wait for their answers, by number."""

    def __init__(self) -> None:
        self._next = 1
        self._pending: dict[int, _Pending] = {}

    def begin(self, on_event: Callable[[Wire], None] | None) -> tuple[int, "asyncio.Future[Wire]"]:
        """Begins a request: a new number, and what will hold its reply, RequestFailed or ConnectionEnded. `end` it in
        any case."""
        number = self._next
        self._next += 1
        answer: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(answer, on_event)
        return number, answer

    def end(self, number: int) -> None:
        """Forgets a request that nobody waits for any more."""
        del self._pending[number]

    def answered(self, envelope: Envelope) -> str | None:
        """Gives an event, a reply or a failure to who waits for it; returns what is wrong with it."""
        if envelope.id >= self._next:
            return f"answer to request {envelope.id}, which was never made"
        # A request that timed out, or was cancelled, is gone; its late answer is of no use.
        pending = self._pending.get(envelope.id)
        if pending is not None and not pending.answer.done():
            body = envelope.body
            if envelope.role is Role.REPLY:
                pending.answer.set_result(body)
            elif envelope.role is Role.FAILURE:
                error = body.error if isinstance(body, Failure) else f"a failure of type {type(body).__name__}"
                pending.answer.set_exception(RequestFailed(error))
            elif pending.on_event is not None:
                pending.on_event(body)
        return None

    def lost(self, why: str) -> None:
        """Fails all requests: no answer will come."""
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(ConnectionEnded(why))

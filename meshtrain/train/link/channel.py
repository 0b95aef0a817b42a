"""The connection of a learner to its daemon: messages both ways, and the one loop in which a learner waits."""

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, JobStopped, MeshtrainError
from meshwire.message_base import Wire
from meshwire.messages.job import Member
from meshwire.messages.learner import RoundDone, Stop, Waiting

SILENCE_TIMEOUT_S = 30.0  # a daemon says about once a second for whom a learner waits
LINGER_S = 2.0  # for the daemon to read the last messages
START_TIMEOUT_S = 7200.0  # longer than the daemon's own patience with slow members, whose error says more

log = logging.getLogger("meshtrain")

N = TypeVar("N", bound=Wire)
OnRound = Callable[[RoundDone], None]


class Channel:
    """What a learner tells its daemon, asks it and hears from it, over one connection.

    The daemon sends rounds, which are queued; notices, which go to whoever has asked for their type; a sign of life
    about once a second while the learner waits; and the word that the job ends.

    Args:
        members: of the job, by rank: reasons name ranks, and people want names.

    Attributes:
        rounds: that have arrived and are not taken yet, in order.
        waited_s: time spent without a notice in `wait`, since the beginning.
        stopped: whether the daemon has said that the job ends.
    """

    def __init__(self, client: Client, members: Sequence[Member]) -> None:
        self._client = client
        self._names = [member.name for member in members]
        self._handlers: dict[type[Wire], Callable[[Any], None]] = {}
        self._held: list[Wire] = []  # to be sent with the next notice
        self.rounds: deque[RoundDone] = deque()
        self.waited_s = 0.0
        self.stopped = False

    def route(self, kind: type[N], handler: Callable[[N], None]) -> None:
        """Notices of this type go to `handler` as they are read."""
        self._handlers[kind] = handler

    def tell(self, body: Wire, *, more: bool = False) -> None:
        """Sends a notice. Raises ConnectionLost.

        Args:
            more: another one follows at once, and they go together, because each sending wakes the daemon up. It goes
                no later than this learner asks for something, looks or waits.
        """
        self._held.append(body)
        if not more:
            self._send_held()

    def _send_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._client.notify(*held)

    def ask(self, body: Wire, name: str) -> Wire:
        """Sends a request that may wait for other peers. Raises RequestError, ConnectionLost.

        Args:
            name: what is asked for, for errors.
        """

        def on_event(event: Wire) -> None:
            if isinstance(event, Waiting):
                log.debug("%s: %s", name, event.reason)

        self._send_held()
        return self._client.request(
            body, timeout_s=START_TIMEOUT_S, silence_s=SILENCE_TIMEOUT_S, name=name, on_event=on_event
        )

    def look(self) -> None:
        """Takes what has arrived, without waiting. Raises JobStopped."""
        self._send_held()
        while (notice := self._client.next_notice(0.0)) is not None:
            self._take(notice)

    def wait(self, until: Callable[[], bool], what: str, on_round: OnRound | None = None) -> None:
        """Takes notices until `until()` is true. Every wait of a learner is this one.

        Args:
            what: is waited for, for the error.
            on_round: is given the rounds as they arrive; None leaves them in the queue.

        Raises:
            JobStopped: the daemon ends the job.
            ConnectionLost: no sign of life from it for SILENCE_TIMEOUT_S.
        """
        reason = "it has not said for what"
        while True:
            while on_round is not None and self.rounds:
                on_round(self.rounds.popleft())
            self._send_held()
            if until():
                return
            began_s = time.monotonic()
            notice = self._client.next_notice(SILENCE_TIMEOUT_S)
            self.waited_s += time.monotonic() - began_s
            if notice is None:
                raise ConnectionLost(
                    f"no sign of life from the daemon for {SILENCE_TIMEOUT_S:.0f} s; {what} waits: {reason}"
                )
            if isinstance(notice, Waiting):
                reason = notice.reason
            self._take(notice)

    def wait_at_most(self, wait_s: float, until: Callable[[], bool]) -> None:
        """Takes notices until `until()` is true or the time is over, which is no error. Rounds stay in the queue.

        Raises JobStopped, ConnectionLost.
        """
        self._send_held()
        end_s = time.monotonic() + wait_s
        while not until():
            began_s = time.monotonic()
            notice = self._client.next_notice(max(0.0, end_s - began_s))
            self.waited_s += time.monotonic() - began_s
            if notice is None:
                return
            self._take(notice)

    def with_names(self, reason: str) -> str:
        """A reason with the names of the peers whose ranks it tells: `rank 2:` as `rank 2 (anna):`."""

        def named(match: re.Match[str]) -> str:
            rank = int(match[1])
            return f"rank {rank} ({self._names[rank]}):" if rank < len(self._names) else match[0]

        return re.sub(r"\brank (\d+):", named, reason)

    def close(self) -> None:
        """Ends the connection once the daemon has read what was sent."""
        self._client.close(linger_s=LINGER_S)

    def _take(self, notice: Wire) -> None:
        match notice:
            case RoundDone():
                self.rounds.append(notice)
            case Stop(reason=reason):
                self.stopped = True
                raise JobStopped(f"the job ends: {reason}")
            case Waiting():
                pass  # the sign of life is that it came
            case _ if type(notice) in self._handlers:
                self._handlers[type(notice)](notice)
            case _:
                raise MeshtrainError(f"the daemon sent {type(notice).__name__} to a learner: versions differ")

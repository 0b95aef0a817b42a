"""What a learner and its daemon say to each other during the rounds."""

import time
from collections import deque
from collections.abc import Callable

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, JobStopped, MeshtrainError
from meshwire.messages.local import RoundDone, Stop, Waiting
from meshwire.wiretypes import Wire

SILENCE_TIMEOUT_S = 30.0  # a daemon says about once a second for whom a learner waits
LINGER_S = 2.0  # for the daemon to read the last messages
START_TIMEOUT_S = 7200.0  # longer than the daemon's own patience with slow members, whose error says more


class Channel:
    """The connection with the rules of a job: signs of life, stops, rounds in order.

    Attributes:
        waited_s: time spent in `wait_round`, since the beginning.
        applied: the newest round that was handed out.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rounds: deque[RoundDone] = deque()
        self.waited_s = 0.0
        self.applied = 0

    def tell(self, body: Wire) -> None:
        """Sends a notice. Raises ConnectionLost."""
        self._client.notify(body)

    def ask(self, body: Wire, name: str, on_waiting: Callable[[str], None] | None = None) -> Wire:
        """Sends a request that may wait for other peers. Raises RequestError, ConnectionLost."""

        def on_event(event: Wire) -> None:
            if isinstance(event, Waiting) and on_waiting is not None:
                on_waiting(event.reason)

        return self._client.request(
            body, timeout_s=START_TIMEOUT_S, silence_s=SILENCE_TIMEOUT_S, name=name, on_event=on_event
        )

    def look(self) -> None:
        """Takes what has arrived, without waiting. Raises JobStopped."""
        while (notice := self._client.next_notice(0.0)) is not None:
            self._take(notice)

    def wait_round(self, step: int) -> RoundDone:
        """The round to which `step` was bound, once it is complete.

        Raises JobStopped; ConnectionLost without a sign of life for SILENCE_TIMEOUT_S; MeshtrainError when rounds
        went on without this learner.
        """
        began_s = time.monotonic()
        reason = "the round"
        while not self._rounds:
            notice = self._client.next_notice(SILENCE_TIMEOUT_S)
            if notice is None:
                raise ConnectionLost(
                    f"no sign of life from the daemon for {SILENCE_TIMEOUT_S:.0f} s; step {step} waits for {reason}"
                )
            if isinstance(notice, Waiting):
                reason = notice.reason
            self._take(notice)
        self.waited_s += time.monotonic() - began_s
        done = self._rounds.popleft()
        if done.step != step or done.round != self.applied + 1:
            raise MeshtrainError(
                f"round {done.round} was averaged without step {step} of this peer, which had been cut off for its "
                "silence, and its model is behind the others': submit the job again"
            )
        self.applied = done.round
        return done

    def close(self) -> None:
        """Ends the connection once the daemon has read what was sent."""
        self._client.close(linger_s=LINGER_S)

    def _take(self, notice: Wire) -> None:
        match notice:
            case RoundDone():
                self._rounds.append(notice)
            case Stop(reason=reason):
                raise JobStopped(f"the job ends: {reason}")
            case Waiting():
                pass  # the sign of life is that it came
            case _:
                raise MeshtrainError(f"the daemon sent {type(notice).__name__} to a learner: versions differ")

"""Who may use the dashboard: one-time tokens from the command line, and the sessions that browsers make of them.

A token is good once and for a minute. A session has two secrets: a cookie that scripts cannot read, and a key that,
other than cookies, is not sent to other ports of this machine. Both are asked for. Who shows a token for the second
time ends the session that was made of it: one of the two has stolen it.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from meshwire import limits

SECRET_BYTES = 32


@dataclass
class BrowserSession:
    """A browser that was let in.

    Attributes:
        alive: until it expires, makes room for newer ones, or is found to be stolen.
    """

    cookie: str
    key: str
    expires_s: float
    alive: bool = True


@dataclass
class _Token:
    expires_s: float
    session: BrowserSession | None = None  # that was made of it


class Sessions:
    """Tokens and sessions, of both the newest few. They are remembered by hash: how long a search takes tells nothing.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: OrderedDict[bytes, _Token] = OrderedDict()
        self._sessions: OrderedDict[bytes, BrowserSession] = OrderedDict()

    def issue(self) -> str:
        """A token for one browser."""
        token = secrets.token_urlsafe(SECRET_BYTES)
        self._tokens[_hash(token)] = _Token(self._clock() + limits.DASHBOARD_TOKEN_S)
        while len(self._tokens) > limits.DASHBOARD_TOKENS_MAX:
            self._tokens.popitem(last=False)
        return token

    def redeem(self, token: str) -> BrowserSession | None:
        """The session for a token; None if it is unknown, has expired, or was used, which ends that session, too."""
        known = self._tokens.get(_hash(token))
        if known is None or known.expires_s <= self._clock():
            return None
        if known.session is not None:
            self._end(known.session)
            return None
        session = BrowserSession(
            secrets.token_urlsafe(SECRET_BYTES),
            secrets.token_urlsafe(SECRET_BYTES),
            self._clock() + limits.DASHBOARD_SESSION_S,
        )
        known.session = session
        self._sessions[_hash(session.cookie)] = session
        while len(self._sessions) > limits.DASHBOARD_SESSIONS_MAX:
            self._end(next(iter(self._sessions.values())))
        return session

    def find(self, cookie: str, key: str) -> BrowserSession | None:
        """The session that has both secrets."""
        session = self._sessions.get(_hash(cookie))
        if session is None or not hmac.compare_digest(session.key.encode(), key.encode()):
            return None
        return session if self.holds(session) else None

    def holds(self, session: BrowserSession) -> bool:
        """Whether it is still let in."""
        if session.expires_s <= self._clock():
            self._end(session)
        return session.alive

    def _end(self, session: BrowserSession) -> None:
        session.alive = False
        self._sessions.pop(_hash(session.cookie), None)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

"""Tokens are good once and for a minute; sessions are few, and end."""

import os
from pathlib import Path

from meshtraind.dashboard.caller import is_another_user
from meshtraind.dashboard.sessions import Sessions
from meshwire import limits


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_token_is_good_once() -> None:
    sessions = Sessions()
    token = sessions.issue()
    session = sessions.redeem(token)
    assert session is not None
    assert sessions.find(session.cookie, session.key) is session
    assert sessions.redeem(token) is None


def test_whoever_comes_second_ends_what_the_first_one_has() -> None:
    """One of the two has stolen the token: neither is let in."""
    sessions = Sessions()
    token = sessions.issue()
    session = sessions.redeem(token)
    assert session is not None
    sessions.redeem(token)
    assert sessions.find(session.cookie, session.key) is None
    assert not session.alive


def test_a_token_expires() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    kept, late = sessions.issue(), sessions.issue()
    clock.now_s += limits.DASHBOARD_TOKEN_S - 0.1
    assert sessions.redeem(kept) is not None
    clock.now_s += 0.2
    assert sessions.redeem(late) is None


def test_an_unknown_token_is_none() -> None:
    sessions = Sessions()
    sessions.issue()
    assert sessions.redeem("") is None
    assert sessions.redeem("x" * 43) is None


def test_a_session_ends_after_its_time() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    session = sessions.redeem(sessions.issue())
    assert session is not None
    clock.now_s += limits.DASHBOARD_SESSION_S - 0.1
    assert sessions.holds(session)
    clock.now_s += 0.2
    assert sessions.find(session.cookie, session.key) is None
    assert not sessions.holds(session)


def test_tokens_and_sessions_are_few_and_the_oldest_go() -> None:
    sessions = Sessions()
    tokens = [sessions.issue() for _ in range(limits.DASHBOARD_TOKENS_MAX + 1)]
    assert sessions.redeem(tokens[0]) is None
    made = [sessions.redeem(sessions.issue()) for _ in range(limits.DASHBOARD_SESSIONS_MAX + 1)]
    alive = [session for session in made if session is not None and session.alive]
    assert alive == made[1:]
    assert len(set(tokens)) == len(tokens)


def test_another_users_program_is_told_by_the_systems_table(tmp_path: Path) -> None:
    """A token stands in the command line of the browser that is opened with it, where other users can read it."""
    client, server = ("127.0.0.1", 0x9C40), ("127.0.0.1", 0x1F90)
    table = tmp_path / "tcp"
    row = "   {n}: {local} {remote} 01 00000000:00000000 00:00000000 00000000 {user:>5}        0 1 1 0 20 4 30 10 -1\n"
    ours = row.format(n=0, local="0100007F:1F90", remote="0100007F:9C40", user=os.getuid())  # the server's own end

    def written(user: int) -> Path:
        table.write_text(
            "  sl ...\n" + ours + row.format(n=1, local="0100007F:9C40", remote="0100007F:1F90", user=user)
        )
        return table

    assert not is_another_user(client, server, written(os.getuid()))
    assert is_another_user(client, server, written(os.getuid() + 1))
    assert is_another_user(("127.0.0.1", 5), server, written(os.getuid()))
    assert not is_another_user(client, server, tmp_path / "none")  # systems that have no such table

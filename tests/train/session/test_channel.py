"""When a learner's notices go, and what of them goes together: each sending wakes the daemon up."""

from typing import Any, cast

import pytest

from meshtrain.train.link.channel import Channel
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.learner import LearnerApplied, LearnerBack, LearnerReady, Waiting

APPLIED = LearnerApplied(round=1)


class Sent:
    """A client that keeps what is sent, by sending; nothing ever comes but signs of life."""

    def __init__(self) -> None:
        self.sendings: list[tuple[Wire, ...]] = []

    def notify(self, *bodies: Wire) -> None:
        self.sendings.append(bodies)

    def request(self, *_bodies: Wire, **_options: object) -> Wire:
        self.sendings.append(("asked",))  # type: ignore[arg-type]
        return Done()

    def next_notice(self, timeout_s: float) -> Wire | None:
        return Waiting(reason="others") if timeout_s else None


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def channel(sent: Sent) -> Channel:
    return Channel(cast(Any, sent), ())


def test_what_another_follows_goes_with_it_and_in_order(channel: Channel, sent: Sent) -> None:
    channel.tell(APPLIED, more=True)
    assert sent.sendings == []
    channel.tell(LearnerBack())
    channel.tell(LearnerBack())
    assert sent.sendings == [(APPLIED, LearnerBack()), (LearnerBack(),)]


def test_nothing_is_held_while_the_learner_looks_asks_or_waits(channel: Channel, sent: Sent) -> None:
    """R1: the daemon gives the next round when it hears that this one was applied, so who waits for it must say so."""
    channel.tell(APPLIED, more=True)
    channel.look()
    assert sent.sendings == [(APPLIED,)]
    channel.tell(APPLIED, more=True)
    channel.ask(LearnerReady(), "ready")
    assert sent.sendings[1:] == [(APPLIED,), ("asked",)]
    channel.tell(APPLIED, more=True)
    heard: list[int] = []

    def until() -> bool:
        heard.append(len(sent.sendings))
        return len(heard) == 2

    channel.wait(until, "a test")
    assert heard == [4, 4], "before it is asked whether the wait is over, too"


def test_a_wait_with_an_end_is_over_when_its_time_is(
    channel: Channel, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R9: of a neighbour that does not come. Signs of life do not make it longer, and rounds stay where they are."""
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("meshtrain.train.link.channel.time.monotonic", lambda: next(clock))
    channel.tell(APPLIED, more=True)
    channel.wait_at_most(10.0, lambda: False)
    assert sent.sendings == [(APPLIED,)]
    assert 5 <= next(clock) <= 25
    channel.wait_at_most(10.0, lambda: True)
    channel.wait_at_most(0.0, lambda: False)

"""W7: a rate without TCP's beginning, and a window that a slow or silent other end keeps small."""

import pytest

from meshtraind.measuring.goodput import WINDOW_BYTES_MIN, WINDOW_S, Goodput, ProbeWindow
from meshwire import limits


class SlowLink:
    """Carries what is sent at a rate, behind a delay, and says when it has come: in virtual time."""

    def __init__(self, bytes_s: float, rtt_s: float) -> None:
        self.window = ProbeWindow(0.0, rtt_s)
        self.most_under_way_bytes = 0
        self._bytes_s, self._rtt_s = bytes_s, rtt_s

    def send(self, leg_s: float) -> float:
        """A leg; returns when all had come."""
        window, free_s, now_s = self.window, 0.0, 0.0
        words: list[tuple[float, int]] = []
        while True:
            while now_s < leg_s and (size := window.next_bytes()):
                window.sent(size, now_s)
                free_s = max(free_s, now_s + self._rtt_s / 2) + size / self._bytes_s
                words.append((free_s + self._rtt_s / 2, window.sent_bytes))
                under_way = window.sent_bytes - window.goodput.total_bytes
                self.most_under_way_bytes = max(self.most_under_way_bytes, under_way)
            if not words:
                return now_s
            now_s, total_bytes = words.pop(0)
            assert window.taken(total_bytes, now_s) is None


@pytest.mark.parametrize("mbit", [0.5, 2, 20, 100, 1000])
@pytest.mark.parametrize("rtt_s", [0.0005, 0.005, 0.02])
def test_the_rate_is_found_and_what_is_under_way_arrives_soon(mbit: float, rtt_s: float) -> None:
    link = SlowLink(mbit * 125_000, rtt_s)
    over_s = link.send(limits.MEASURE_LEG_S)
    assert link.window.goodput.bytes_s == pytest.approx(mbit * 125_000, rel=0.1)
    first_s = WINDOW_BYTES_MIN / (mbit * 125_000)
    assert over_s < limits.MEASURE_LEG_S + 2 * rtt_s + max(3 * WINDOW_S, first_s)


def test_who_takes_nothing_is_sent_one_small_window() -> None:
    window = ProbeWindow(0.0, 10.0)
    while size := window.next_bytes():
        window.sent(size, 0.0)
    assert window.sent_bytes == WINDOW_BYTES_MIN
    assert window.goodput.bytes_s is None
    assert not window.all_taken


def test_who_says_that_all_has_come_at_once_is_sent_no_more_than_a_leg_has() -> None:
    window, now_s = ProbeWindow(0.0, 0.0), 0.0
    while size := window.next_bytes():
        window.sent(size, now_s)
        now_s += 1e-9
        assert window.taken(window.sent_bytes, now_s) is None
    assert window.sent_bytes == limits.MEASURE_LEG_BYTES_MAX


@pytest.mark.parametrize("claimed", [4095, 4096, 8193, 2**40])
def test_a_word_on_more_than_was_sent_or_no_more_than_before_is_wrong(claimed: int) -> None:
    window = ProbeWindow(0.0, 0.0)
    window.sent(8192, 0.0)
    assert window.taken(4096, 0.1) is None
    wrong = window.taken(claimed, 0.2)
    assert wrong == f"it has taken {claimed} bytes of a measurement, of 8192 that were sent"
    assert window.goodput.total_bytes == 4096


def test_the_beginning_does_not_count() -> None:
    """TCP begins slowly: 0.2 s at a tenth of the rate that follows."""
    goodput = Goodput(0.0)
    for at in range(1, 41):
        now_s = at / 100
        goodput.came(int(1e5 * min(now_s, 0.2) + 1e6 * max(0.0, now_s - 0.2)), now_s)
    assert goodput.bytes_s == pytest.approx(1e6)


def test_too_little_is_no_rate() -> None:
    goodput = Goodput(1.0)
    assert goodput.bytes_s is None
    goodput.came(5000, 1.0)
    assert goodput.bytes_s is None, "all at once"


def test_where_both_send_the_window_is_what_the_leg_before_filled() -> None:
    """Words on what has come are late there, and say nothing of the link."""
    link = SlowLink(1e6, 0.002)
    link.send(limits.MEASURE_LEG_S)
    window = ProbeWindow(0.0, 0.002, link.window)
    sent = []
    while size := window.next_bytes():
        window.sent(size, 0.0)
        sent.append(size)
    assert window.sent_bytes == pytest.approx(1e6 * 0.102, rel=0.25)
    assert window.taken(sent[0], 10.0) is None
    assert window.next_bytes() == sent[0]
    nothing = ProbeWindow(0.0, 0.0, ProbeWindow(0.0, 0.0))
    assert nothing.next_bytes() * 4 == WINDOW_BYTES_MIN, "a leg that told nothing"

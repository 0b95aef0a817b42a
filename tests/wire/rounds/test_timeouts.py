"""Every timeout of membership follows from patience and RTT."""

import pytest

from meshwire.timeouts import ASK_S_MAX, Timeouts


@pytest.mark.parametrize("patience_s", [0.4, 5.0, 60.0])
@pytest.mark.parametrize("rtt_s", [0.0005, 0.02, 0.5])
def test_waits_are_ordered_so_that_nobody_interferes(patience_s: float, rtt_s: float) -> None:
    """G7: a turn and a grace hold a way there and back; whoever proposed tries again before others take over; a silent
    member's link is closed before its promise is overdue."""
    timeouts = Timeouts(patience_s, rtt_s)
    assert min(timeouts.turn_s, timeouts.relink_grace_s) >= 4 * rtt_s
    assert timeouts.silence_s <= timeouts.answer_s < timeouts.enter_s < timeouts.catch_up_s + 8 * rtt_s
    assert timeouts.provisional_s == 6 * patience_s
    assert timeouts.yield_s < timeouts.provisional_s


def test_a_closed_socket_costs_less_than_a_second() -> None:
    """Default patience on WiFi: grace, one turn, and a change of 3 RTT."""
    timeouts = Timeouts(rtt_s=0.02)
    assert timeouts.relink_grace_s + timeouts.turn_s + 3 * timeouts.rtt_s < 0.6


def test_asking_in_backs_off() -> None:
    """G7: at once, then after 1, 2, 4 .. 60 s."""
    waits_s = [Timeouts().ask_s(tries) for tries in range(9)]
    assert waits_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert Timeouts().ask_s(10**6) == ASK_S_MAX
    assert [Timeouts().ask_s(10**6, failures) for failures in (1, 2, 10**6)] == [120.0, 240.0, 3840.0]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="patience_s"):
        Timeouts(patience_s=wrong)
    with pytest.raises(ValueError, match="rtt_s"):
        Timeouts(rtt_s=wrong)


def test_a_job_sets_how_long_a_part_waits_that_is_not_entitled() -> None:
    """`submit --partition-wait`: 0 is at once, infinity for ever."""
    for wait_s in (0.0, 90.0, float("inf")):
        assert Timeouts(2.0, 0.01, wait_s).provisional_s == wait_s
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="partition_wait_s"):
            Timeouts(partition_wait_s=wrong)


def test_people_see_all_of_them() -> None:
    described = Timeouts(2.0, 0.01).describe()
    assert described["a part that is not entitled goes on"] == 12.0
    assert all(seconds > 0 for seconds in described.values())

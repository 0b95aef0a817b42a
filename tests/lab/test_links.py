"""A lab's parts that make nothing: schedules, airtime, the commands, delay lines, what a call heard."""

import pytest

from tests.lab.forwarder import FRAMES_MAX, DelayLine
from tests.lab.links import ACCESS_POINT, WITH_ACKS, Cell, Delay, RateSchedule, cable_setup, losses_down, losses_up
from tests.lab.measure import Reading
from tests.lab.videocall import Heard


def test_a_schedule_says_the_rate_of_every_moment_and_begins_again() -> None:
    schedule = RateSchedule.parse("2:100,0.5:20")
    assert schedule.stretches == ((2.0, 100.0), (0.5, 20.0))
    assert [schedule.at(elapsed_s) for elapsed_s in (0.0, 1.5, 2.0, 2.25, 2.5, 27.0)] == [
        *((100.0, 2.0), (100.0, 0.5), (20.0, 0.5), (20.0, 0.25)),
        *((100.0, 2.0), (20.0, 0.5)),
    ]
    assert schedule.mean_mbit == pytest.approx(84.0)


@pytest.mark.parametrize("text", ["", "5", "5:100,", "-1:100", "0:100", "5:0", "a:b", "5:100:3"])
def test_a_schedule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"SECONDS:MBIT|stretches"):
        RateSchedule.parse(text)


def test_a_byte_pays_for_each_time_it_crosses_the_air() -> None:
    cell = Cell(120.0 * WITH_ACKS, wired=frozenset({3}))
    assert [cell.crossings(*flow) for flow in ((0, 1), (0, 3), (3, 0), (0, ACCESS_POINT), (3, ACCESS_POINT))] == [
        *(2, 1, 1, 1, 0)
    ]
    for flows, expected_mbit in (
        ([(0, ACCESS_POINT)], 120.0),
        ([(0, 1)], 60.0),
        ([(3, 1)], 120.0),
        ([(0, 3), (1, 3)], 60.0),
        ([(0, 3), (ACCESS_POINT, 1)], 60.0),
        ([(0, 1), (1, 2), (2, 0)], 20.0),
        ([(0, 1), (1, 2), (2, 3), (3, 0)], 20.0),
    ):
        assert cell.goodput_mbit(flows) == pytest.approx(expected_mbit), flows


@pytest.mark.parametrize("flows", [[(3, ACCESS_POINT)], [(0, 1), (0, 2)]])
def test_what_the_air_alone_does_not_decide_is_not_guessed(flows: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="the air alone"):
        Cell(100, wired=frozenset({3})).goodput_mbit(flows)


def test_a_cell_has_one_bucket_and_a_class_for_each_that_waits() -> None:
    cell = Cell(100, wired=frozenset({1}))
    lines = cell.setup(3)
    limited = [line for line in lines if "parent 1: classid" in line]
    assert len(limited) == 1, "one budget for all"
    assert "rate 104.558mbit ceil 104.558mbit" in limited[0], "of frames, so that goodput is as stated"
    leaves = [line.split("classid ")[1].split()[0] for line in lines if "parent 1:1 classid" in line]
    assert leaves == ["1:100", "1:102", "1:200", "1:202", "1:300"]
    filters = [line for line in lines if line.startswith("filter")]
    assert [line.split("match ")[1] for line in filters] == [
        "u16 0x0001 0xffff at -4 flowid 1:100",
        "u16 0x0003 0xffff at -4 flowid 1:102",
    ]
    assert cell.admission(1, "port1") == [], "a wired station's side takes no airtime"
    assert [line.split()[4] for line in cell.admission(0, "port0")[1:]] == ["ingress", "egress"], "up and down"
    assert '"port0" meta priority set 1:200\n' in cell.classes_down(3)
    assert '"port1"' not in cell.classes_down(3)


def test_all_that_goes_down_can_wait_in_one_queue() -> None:
    cell = Cell(100, one_queue=True)
    leaves = [line.split("classid ")[1].split()[0] for line in cell.setup(2) if "parent 1:1 classid" in line]
    assert leaves == ["1:100", "1:101", "1:200", "1:300"]
    assert cell.classes_down(2).count("priority set 1:200\n") == 2


def test_the_rate_of_the_air_is_changed_in_one_place() -> None:
    change = Cell(100).rate_change("change", 20)
    assert change.startswith("class change dev air parent 1: classid 1:1 htb rate 20.912mbit")
    assert change.split("class change")[1].split(" htb")[0] in Cell(100).setup(4)[1]


def test_a_cable_ends_in_a_bucket_and_a_queue() -> None:
    root, bucket, queue = cable_setup("eth0", 10)
    assert root == "qdisc add dev eth0 root handle 1: htb default 1"
    assert "classid 1:1 htb rate 10.456mbit" in bucket
    assert "burst 3100" in bucket, "two frames at least"
    assert queue.endswith("bfifo limit 256000")


def test_losses_are_dice_in_one_direction() -> None:
    up = losses_up(3, 0.25)
    assert 'iifname "port3" numgen random mod 100000 < 250 drop' in up
    assert "numgen random mod 100000 < 5000 drop" in losses_down(5)
    assert 'device "eth0"' in losses_down(5)
    assert "drop" not in losses_up(3, 0) + losses_down(0), "0 ends it"
    for rules in (up, losses_down(5)):
        assert rules.index("delete table") < rules.index("{"), "in place of what was there"
    with pytest.raises(ValueError, match="101 is no percentage"):
        losses_up(0, 101)


def test_a_delay_cannot_vary_by_more_than_itself() -> None:
    with pytest.raises(ValueError, match="a delay of 2 ms cannot vary by 3 ms"):
        Delay(2, 3)


def test_frames_are_held_as_long_as_they_should_and_none_overtakes() -> None:
    line = DelayLine(0.004, 0.002, "seed")
    came_s = [index * 0.0005 for index in range(1000)]
    went_s: list[float] = []
    for index, now_s in enumerate(came_s):
        line.put(str(index).encode(), now_s)
    while (next_s := line.next_s()) is not None:
        assert line.due(next_s - 1e-9) is None, "not before its time"
        assert line.due(next_s) == str(len(went_s)).encode(), "in the order in which they came"
        went_s.append(next_s)
    held_s = [went - came for went, came in zip(went_s, came_s, strict=True)]
    assert 0.002 <= min(held_s) < 0.003
    assert 0.0055 < max(held_s) <= 0.006


def test_frames_under_way_have_a_maximum() -> None:
    line = DelayLine(1.0, 0.0, "seed")
    for _ in range(FRAMES_MAX + 10):
        line.put(b"frame", 0.0)
    passed = 0
    while line.due(1.0) is not None:
        passed += 1
    assert passed == FRAMES_MAX


def test_a_call_says_what_was_lost_and_how_long_the_rest_took() -> None:
    heard = Heard.of(200, [float(number) for number in range(1, 101)])
    assert (heard.lost_percent, heard.median_ms, heard.worst_ms) == (50.0, 50.5, 100.0)
    assert 94 < heard.p95_ms < 97
    assert Heard.of(200, []).lost_percent == 100.0


def test_a_figure_that_is_off_does_not_fit() -> None:
    assert Reading("rate", 93.0, "Mbit/s", 100.0, 8.0).fits
    assert not Reading("rate", 91.0, "Mbit/s", 100.0, 8.0).fits
    assert not Reading("rate", 109.0, "Mbit/s", 100.0, 8.0).fits
    assert Reading("ceiling", 3.0, "Mbit/s").fits, "nothing is wanted of it"

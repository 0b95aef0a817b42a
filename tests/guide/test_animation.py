"""The SVG of a session shows at every moment what the terminal showed then."""

import math
import re
from xml.etree import ElementTree

import pytest

from tests.guide import animation
from tests.guide.animation import PAUSE_MAX_S, PLAY_MAX_S, Window, short_times, shown_text, standing, svg

EVENTS = (
    (10.0, b"anna:~$ "),
    (10.5, b"meshtrain up\r\n"),
    (60.0, b"\x1b[1mup\x1b[0m, \x1b[36mon\x1b[0m a <port>\r\n"),
    (60.4, b"round 1"),
    (61.0, b"\rround 2"),
    (61.5, b"\r\x1b[2Kdone\r\n"),
)
WINDOW = Window("anna", 4, 40, EVENTS)


def texts_at(windows: tuple[Window, ...], seconds: float) -> list[str]:
    lines, _ = standing(windows)
    there = [each for each in lines if each.from_s <= seconds < each.to_s]
    return [
        " ".join(text for _, text, _ in each.line) for each in sorted(there, key=lambda each: (each.window, each.row))
    ]


def test_a_line_stands_from_when_it_came_to_when_it_changed() -> None:
    times = short_times([(at_s, None) for at_s, _ in EVENTS])
    assert times[2] - times[1] == pytest.approx(PAUSE_MAX_S), "nobody waits for 50 s"
    assert texts_at((WINDOW,), times[1]) == ["anna:~$ meshtrain up"]
    assert texts_at((WINDOW,), times[3]) == ["anna:~$ meshtrain up", "up , on a <port>", "round 1"]
    assert texts_at((WINDOW,), times[4]) == ["anna:~$ meshtrain up", "up , on a <port>", "round 2"]
    assert texts_at((WINDOW,), times[5] + 1) == ["anna:~$ meshtrain up", "up , on a <port>", "done"]


def test_what_changes_within_a_frame_is_shown_in_the_next() -> None:
    """No line stands for no time, and the last picture is complete."""
    quick = tuple((0.01 * at, b"\r%d" % at) for at in range(200))
    lines, _ = standing((Window("a", 2, 20, quick),))
    assert len(lines) < 20
    assert all(each.to_s > each.from_s for each in lines)
    assert [each.line[0][1] for each in lines if each.to_s == math.inf] == ["199"]


def test_a_long_session_is_played_faster() -> None:
    times = short_times([(0.5 * at, None) for at in range(1000)])
    assert times[-1] == pytest.approx(PLAY_MAX_S)
    assert times[500] == pytest.approx(PLAY_MAX_S * 500 / 999)
    assert short_times([(7.0, None)]) == [0.0]


def test_two_windows_share_one_clock() -> None:
    """What was typed later on the other laptop appears later."""
    other = Window("bert", 2, 20, ((60.2, b"hello"),))
    times = short_times(sorted((at_s, None) for at_s, _ in (*EVENTS, *other.events)))
    assert "hello" not in texts_at((WINDOW, other), times[2])
    assert texts_at((WINDOW, other), times[3])[-1] == "hello"


def test_the_file() -> None:
    """It is XML, has colours by class, keeps its last picture for who wants no motion, and escapes what was printed."""
    text = svg((WINDOW,), "a & b")
    root = ElementTree.fromstring(text)
    assert root[0].text == "a & b"
    assert '<text class="c"' in text
    assert '<text class="B"' in text
    kept = ["".join(group.itertext()) for group in root.iter() if "z" in (group.get("class") or "").split()]
    assert kept == ["anna:~$ meshtrain up", "up,ona <port>", "done"]
    assert len(re.findall("@keyframes", text)) == len(
        {(each.from_s, each.to_s) for each in standing((WINDOW,))[0] if (each.from_s, each.to_s) != (0, math.inf)}
    )


def test_a_file_that_is_too_large_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(animation, "SVG_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="at most 1000: record less"):
        svg((WINDOW,), "x")


def test_a_terminal_as_text() -> None:
    assert shown_text(EVENTS, 40) == "anna:~$ meshtrain up\nup, on a <port>\ndone"

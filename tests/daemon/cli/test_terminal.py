"""What scripts write on its way to the terminal: colours pass, nothing else is obeyed, wherever it is cut."""

import io
import re
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from meshtrain.cli.ui import terminal
from meshtrain.cli.ui.follow_view import View
from meshtrain.cli.ui.terminal import print_table, say
from meshtrain.following import follower
from meshtrain.following.log_pieces import LINE_CHARS_MAX, Lines, RawLines, raw_bytes
from meshtrain.following.shown_text import COLOUR_CHARS_MAX, script_text
from meshtrain.following.status_line import status_text
from meshtrain.following.watching import outcome_lines
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.job import Fetch, Fetched, Metrics, RankReport
from meshwire.messages.local import GetJobs, Watch, Watched
from tests.daemon.cli.test_cli import serving
from tests.daemon.fakedaemon import JOB, Emit, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

RED, PLAIN = "\x1b[31m", "\x1b[0m"
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
HOSTILE = (
    "\x1bc", "\x1b[2J", "\x1b[1;1H", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1b]52;c;cm0=\x07",
    "\x1bP$q\x1b\\", "\x1b[?1049h", "\x1b[>4;2m", "\x1b[?4m", "\x1b[6n", "\x9b31m", "\x9d0;x\x9c", "\x8d", "\x85",
    "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\u2029", "\x00", "\x07", "\x08", "\x0b", "\x0c", "\x7f",
    "\x1b", "\x1b[", "\x1b[31", "\x1b\x1b[31m", RED, PLAIN, "\x1b[m", "\x1b[38;5;0m", "\x1b[38:2::1:2:3m",
    "\t", "\r", "\n", "a", "ü", "🤗", "1\u202f000\xa0€", "\ud800",
)  # fmt: skip
texts = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), max_size=30).map("".join)


def obeyed(text: str) -> set[str]:
    """Characters beyond colours, tabs and line breaks that are not simply shown."""
    rest = COLOUR.sub("", text)
    return {
        char for char in rest if char not in "\n\t" and not char.isprintable() and unicodedata.category(char) != "Zs"
    }


@given(texts)
@settings(max_examples=500)
def test_nothing_but_colours_is_obeyed_and_doing_it_again_changes_nothing(text: str) -> None:
    shown = script_text(text)
    assert obeyed(shown) == set()
    assert script_text(shown) == shown
    assert shown.count("\n") == text.count("\n")
    for line in shown.split("\n"):  # no colour outlives its line
        colours = COLOUR.findall(line)
        assert not colours or colours[-1].strip("\x1b[m;0") == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{RED}red{PLAIN} plain", f"{RED}red{PLAIN} plain"),
        (f"{RED}red\nplain", f"{RED}red{PLAIN}\nplain"),
        ("\x1b[38;5;0mblack", "\x1b[38;5;0mblack\x1b[0m"),
        ("\x1bcgone\x1b[2J", "\\x1bcgone\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31mC1\u202eidib", "\\x9b31mC1\\u202eidib"),
        ("\x1b[>4;2mkeys", "\\x1b[>4;2mkeys"),
        ("1\u202f000\xa0€\t2", "1\u202f000\xa0€\t2"),
        (f"\x1b[{'1;' * COLOUR_CHARS_MAX}m", f"\\x1b[{'1;' * COLOUR_CHARS_MAX}m"),
    ],
)
def test_colours_stay_and_all_else_is_shown(text: str, shown: str) -> None:
    assert script_text(text) == shown


@given(texts, st.integers(1, 7))
@settings(max_examples=300)
def test_it_does_not_matter_where_pieces_of_a_log_begin(text: str, size: int) -> None:
    """Sequences, characters of several bytes and bytes that are none may be cut anywhere."""
    data = text.encode("utf-8", "surrogatepass")
    whole, pieces = Lines(), Lines()
    expected = whole.feed(data) + whole.flush()
    assert [
        one for at in range(0, len(data), size) for one in pieces.feed(data[at : at + size])
    ] + pieces.flush() == expected
    assert obeyed("\n".join(expected)) == set()
    assert "\r" not in "".join(expected)


@given(st.binary(max_size=300), st.integers(1, 50))
@settings(max_examples=300)
def test_raw_is_every_byte(data: bytes, size: int) -> None:
    lines = RawLines()
    pieces = [one for at in range(0, len(data), size) for one in lines.feed(data[at : at + size])] + lines.flush()
    assert b"".join(map(raw_bytes, pieces)) == data


@pytest.mark.parametrize("offset", [-40, -38, -37, -36, -20, -1, 0, 1])
def test_a_line_that_is_too_long_is_not_cut_in_a_colour(offset: int) -> None:
    colour = "\x1b[38;2;255;255;255;48;2;10;20;30;1;4m"
    assert len(colour) == 37
    text = "x" * (LINE_CHARS_MAX + offset) + colour + "y" * LINE_CHARS_MAX
    lines, bytewise = Lines(), Lines()
    parts = lines.feed(text.encode() + b"\n")
    assert "".join(parts).replace(PLAIN, "") == text
    assert all(len(part) <= LINE_CHARS_MAX + len(PLAIN) for part in parts)
    near = slice(LINE_CHARS_MAX - 60, LINE_CHARS_MAX + 60)
    begun = bytewise.feed(text[: near.start].encode())
    begun += [one for char in text[near] for one in bytewise.feed(char.encode())]
    assert begun + bytewise.feed(text[near.stop :].encode() + b"\n") == parts


UNITS = ("x", "\x1b", "\x1b[", "\x1b[1", "\x1b[31ma", "\x9b", "\r", "a\r", "\x1b[1;1;1;1;1;1;1;1;1;1", "\u202e")


@pytest.mark.parametrize("unit", [*map(str.encode, UNITS), b"\xff"])
def test_a_hostile_megabyte_takes_the_time_of_a_megabyte(unit: bytes) -> None:
    """Eight times as much takes about eight times as long, on a terminal too, and nothing piles up."""

    def spent_s(size: int) -> float:
        data = unit * (size // len(unit))
        lines, view = Lines(), View(["anna"], [0], io.StringIO())
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        view._console, view._live = console, console  # type: ignore[assignment]
        begun_s = time.process_time()
        for at in range(0, len(data), 1 << 16):
            view.lines(0, lines.feed(data[at : at + (1 << 16)]))
            assert len(lines._rest) <= LINE_CHARS_MAX + 1
        view.lines(0, lines.flush())
        return time.process_time() - begun_s

    assert spent_s(1 << 18) < max(1.0, 24 * spent_s(1 << 15))


def test_a_bar_is_told_as_it_stands_and_only_when_it_has_moved() -> None:
    """Nothing would be seen of it before its end, which may be hours away."""
    lines = Lines()
    assert lines.bar() == []
    assert lines.feed(b"start\n 10%") == ["start"]
    assert lines.bar() == []  # a line that is not complete is no bar yet
    assert lines.feed(b"\r 20%\r 30%") == []
    assert lines.bar() == [" 30%"]
    assert lines.bar() == []
    assert lines.feed(b"\r\x1b[31m 40%") == []
    assert lines.bar() == [f"{RED} 40%{PLAIN}"]
    assert lines.feed(b"\r     \r") == []
    assert lines.bar() == []  # cleared
    assert lines.feed(b"\r100%") == []
    assert lines.bar() == ["100%"]
    assert lines.feed(b"\n100%\nnext") == ["100%"]  # told once, and the line after it is another
    assert lines.bar() == []
    assert lines.flush() == ["next"]


def test_who_follows_sees_a_bar_move(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "BAR_EVERY_S", 0.0)
    pieces = {0: b"go\n 10%\r 20%", 12: b"\r 30%", 17: b"\r100%\nend\n"}

    def fetch(body: Fetch, _: Emit) -> Wire:
        data = pieces.get(body.offset_bytes, b"")
        return Fetched(data=data, total_bytes=28, end=data.endswith(b"\n"))

    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING))
    endpoint.answers[Watch] = Watched(summary=summary())
    endpoint.answers[Fetch] = fetch
    assert run("logs", "-f", "--rank", "0").stdout.splitlines() == ["go", " 20%", " 30%", "100%", "end"]


def test_in_a_pipe_colours_pass_and_the_rest_is_shown_unless_raw(endpoint: Endpoint) -> None:
    log = b"\x1b[31mred\r\n\x1bc\xff\x1b]0;t\x07\rseen\n\xc2\x9b2J \xe2\x80\xaex"
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Fetch] = serving({0: log, 1: b"b"})
    safe = f"{RED}red{PLAIN}\nseen\n\\x9b2J \\u202ex\n"
    assert run("logs", "--rank", "0").stdout == safe
    assert run("logs", "--rank", "0", "-n", "1").stdout == "\\x9b2J \\u202ex\n"
    assert run("logs", "--rank", "0", "--raw").stdout_bytes == log
    two = run("logs", "--raw").stdout_bytes
    assert two == b"[0 anna] " + log.replace(b"\n", b"\n[0 anna] ") + b"\n[1 bert] b\n"


def test_on_a_terminal_only_colours_arrive() -> None:
    """rich draws them itself; what it does not know it would pass on, or swallow."""
    out = io.StringIO()
    view = View(["anna", "bert"], [0, 1], io.StringIO())
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    view._console, view._live = console, console  # type: ignore[assignment]
    lines = Lines()
    view.lines(1, lines.feed(b"\x1b[32mok\x1bc\x1b]8;;http://x\x1b\\click\n[red]plain\n"))
    text = out.getvalue()
    assert obeyed(text) == set()
    assert "\x1b[35m[1 bert] \x1b[0m\x1b[32mok\\x1bc\\x1b]8;;http://x\\x1b\\click" in text
    assert "\x1b[35m[1 bert] \x1b[0m[red]plain" in text  # a device's name has its colour, what it wrote has not


def test_errors_and_names_of_values_are_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    report = RankReport(
        job=JOB,
        rank=0,
        state="failed",
        error="\x1b[31mE\x1b[2J\u202e",
        failure="f\x1bc",
        metrics=Metrics(round=1, values=(("l\x1b[2J", 1.0),)),
    )
    failed = summary(JobState.FAILED, error="Traceback\n\x1b]0;t\x07", ranks=(report,))
    for line in outcome_lines(failed):
        say(line)
        say(line, style="red")
    shown = capsys.readouterr().err
    assert obeyed(shown) == set()
    assert f"{RED}E\\x1b[2J\\u202e{PLAIN}" in shown
    assert "l\\x1b[2J 1" in status_text(summary(JobState.RUNNING, ranks=(report,)))


@pytest.mark.parametrize("wrapping", [None, "ADDRESS"])
def test_a_terminal_that_is_too_narrow_for_a_table_loses_no_column(
    monkeypatch: pytest.MonkeyPatch, wrapping: str | None
) -> None:
    """Lines run on, as those of docker and kubectl do: a table whose names are cut off says nothing."""
    screen = io.StringIO()
    made = Console(file=screen, width=30, force_terminal=True, color_system=None, soft_wrap=True)
    monkeypatch.setattr(terminal, "console", lambda: made)
    print_table(("NAME", "STATE", "ADDRESS"), [("a-long-name-of-a-laptop", "linked", "10.77.0.1:29610")], wrapping)
    head, row = screen.getvalue().splitlines()
    assert head.split() == ["NAME", "STATE", "ADDRESS"]
    assert row.split() == ["a-long-name-of-a-laptop", "linked", "10.77.0.1:29610"]

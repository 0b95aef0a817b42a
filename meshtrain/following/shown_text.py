"""Text for people: what scripts and other devices wrote is made safe to show, and durations are rounded to what one
reads."""

import re
import time
import unicodedata

from meshwire.text import printable

COLOUR_CHARS_MAX = 64  # of one sequence; foreground, background and five attributes take 45
_COLOUR = re.compile(rf"\x1b\[([0-9;:]{{0,{COLOUR_CHARS_MAX - 3}}})m")  # SGR (ECMA-48): all that a terminal may obey
NO_COLOUR = "\x1b[0m"


def printable_lines(text: str) -> str:
    """Makes a text safe to show as `printable` does, with line breaks and tabs kept: for errors of several lines."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def script_text(text: str) -> str:
    """What a script wrote, on whichever machine, safe to show: its log, its traceback.

    Line breaks, tabs and colours stay, and no colour outlives its line. All else that a terminal would obey, or that
    would hide or turn text around, is shown as an escape. In linear time; doing it again changes nothing.
    """
    return text if text.isprintable() else "\n".join(map(_script_line, text.split("\n")))


def without_colours(text: str) -> str:
    """A text that is safe to show, for where nothing obeys its colours."""
    return _COLOUR.sub("", text)


def _script_line(line: str) -> str:
    shown: list[str] = []
    at, coloured = 0, False
    for colour in _COLOUR.finditer(line):
        shown += _escaped(line[at : colour.start()]), colour[0]
        at, coloured = colour.end(), colour[1].strip("0;") != ""
    shown.append(_escaped(line[at:]))
    return "".join(shown) + (NO_COLOUR if coloured else "")


def _escaped(text: str) -> str:
    """Wide and narrow spaces stay, as some languages write numbers with them."""
    if text.isprintable():
        return text
    return "".join(char if char == "\t" or unicodedata.category(char) == "Zs" else printable(char) for char in text)


def cut_at(text: str, chars: int) -> int:
    """The place at which to cut a text that is longer than `chars`, so that no colour's sequence is cut: there, or a
    little before."""
    begin = text.rfind("\x1b", max(0, chars - COLOUR_CHARS_MAX + 1), chars)
    return begin if begin > 0 and _COLOUR.match(text, begin, chars) is None else chars


def human_step(seconds: float) -> str:
    """The time of a step for people: milliseconds where seconds are too coarse."""
    return human_seconds(seconds) if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def human_seconds(seconds: float) -> str:
    """A duration for people, e.g. "3 min", "2.4 s"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    for unit, length, up_to in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < up_to:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


NO_TIME = "-" * 19


def clock_text(at_s: float | None) -> str:
    """A time for people, by the clock on their wall: "2026-11-26 09:41:07"; as many dashes where it is not known."""
    return NO_TIME if at_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))

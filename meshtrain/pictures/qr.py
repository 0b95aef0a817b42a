"""A QR code on a terminal: what a phone reads off the screen of one laptop is to be typed on another.

Two rows of modules a line, as half blocks, dark on light whatever the terminal's colours are: readers want it so. segno
is imported when a code is drawn.
"""

import os
import shutil
import sys
from collections.abc import Sequence

BORDER = 2  # modules; the standard asks for 4 where the surroundings are printed, readers of screens are content with 2
_BLACK_ON_WHITE = "\x1b[30;107m"
_AS_BEFORE = "\x1b[0m"
_HALVES = {(False, False): " ", (True, False): "\u2580", (False, True): "\u2584", (True, True): "\u2588"}


def qr_lines(text: str) -> list[str]:
    """The code for this text, as lines for a terminal that shows UTF-8 and colours."""
    import segno

    code = segno.make(text, error="m", micro=False)  # phones do not read micro codes
    side = len(code.matrix) + 2 * BORDER
    rows = [[False] * side for _ in range(side + side % 2)]
    for y, row in enumerate(code.matrix):
        for x, module in enumerate(row):
            rows[y + BORDER][x + BORDER] = bool(module)
    lines = zip(rows[::2], rows[1::2], strict=True)
    return [f"{_BLACK_ON_WHITE}{_halves(upper, lower)}{_AS_BEFORE}" for upper, lower in lines]


def _halves(upper: Sequence[bool], lower: Sequence[bool]) -> str:
    return "".join(_HALVES[pair] for pair in zip(upper, lower, strict=True))


def shows_qr(lines: Sequence[str], lines_beside: int) -> bool:
    """Whether these would be seen as a code on stderr: a terminal that shows UTF-8, with room for them and the text."""
    encoding = (sys.stderr.encoding or "").lower().replace("-", "")
    if not sys.stderr.isatty() or encoding != "utf8" or os.environ.get("TERM") == "dumb":
        return False
    columns, rows = shutil.get_terminal_size(fallback=(0, 0))
    width = len(lines[0]) - len(_BLACK_ON_WHITE + _AS_BEFORE)
    return columns >= width and rows >= len(lines) + lines_beside

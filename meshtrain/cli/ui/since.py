"""`--since`: how long ago, or a time on the clock of whoever types it."""

import re
from datetime import datetime, timedelta

from meshtrain.cli.ui.errors import BadCommandLine

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?[smhd])+")
_CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_PART = re.compile(r"([\d.]+)([smhd])")


def since_time(typed: str, now_s: float) -> float:
    """Unix time. Raises BadCommandLine."""
    if _DURATION.fullmatch(typed):
        return now_s - sum(float(count) * _UNITS_S[unit] for count, unit in _PART.findall(typed))
    is_clock = _CLOCK.fullmatch(typed) is not None
    hour = typed.rjust(len(typed) + (typed[1:2] == ":"), "0")  # 9:05
    today = datetime.fromtimestamp(now_s)
    for day in (today, today - timedelta(days=1)):
        try:
            at_s = datetime.fromisoformat(f"{day.date()} {hour}" if is_clock else typed).timestamp()
        except (ValueError, OverflowError, OSError):
            break
        if at_s <= now_s or not is_clock:  # shortly after midnight 23:50 is that of yesterday
            return at_s  # without a zone that of this machine
    raise BadCommandLine(
        f"--since {typed!r} is neither a duration nor a time",
        '--since 10m, --since 1h30m, --since 14:05, or "2026-05-01 14:05"',
    )

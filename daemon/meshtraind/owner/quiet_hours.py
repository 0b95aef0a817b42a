"""Quiet hours as people write them: 22:00-07:00, of this machine's clock, over midnight or not."""

import re
from dataclasses import dataclass
from datetime import time
from typing import Self

QUIET_OFF = "off"
_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """From `begin` on, until before `end`."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None: "off". Raises ValueError with what is taken."""
        if text == QUIET_OFF:
            return None
        found = _HOURS.fullmatch(text.strip())
        try:
            if found is not None:
                from_h, from_min, to_h, to_min = map(int, found.groups())
                hours = cls(time(from_h, from_min), time(to_h, to_min))
                if hours.begin != hours.end:
                    return hours
        except ValueError:
            pass  # there is no such time: told below
        raise ValueError("two different times of a day are taken, as in 22:00-07:00, or off")

    def holds(self, now: time) -> bool:
        """Whether it is quiet at this time of day."""
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end

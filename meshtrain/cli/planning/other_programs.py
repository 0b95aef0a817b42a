"""What other programs take of this machine's processor while something is measured, whose figures are then wrong."""

import os
import time

NOTABLE_PART = 0.25


class OtherPrograms:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._begun = self._figures()

    def note(self) -> str | None:
        """A note for the person, when it was much. What was measured must have ended, and been waited for."""
        part = self.part()
        if part < NOTABLE_PART:
            return None
        return (
            f"other programs took {part:.0%} of this laptop's processor meanwhile: without them its steps are "
            "shorter, and the network matters more"
        )

    def part(self) -> float:
        """How much of all cores other programs took meanwhile, from 0 to 1."""
        wall_s, used_s, own_s = (now - before for now, before in zip(self._figures(), self._begun, strict=True))
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, (used_s - own_s) / (wall_s * cores))) if wall_s > 0 else 0.0

    def _figures(self) -> tuple[float, float, float]:
        """The clock; seconds that all cores were busy; those of this process and of its children that have ended."""
        import psutil

        times = psutil.cpu_times()
        guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted as the user's, too
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        own = os.times()
        return (
            time.monotonic(),
            sum(times) - guests_s - idle_s,
            own.user + own.system + own.children_user + own.children_system,
        )

"""When this device is to train for nobody: in its owner's quiet hours, or on its battery."""

from datetime import time

import psutil

from meshtraind.owner.quiet_hours import QuietHours
from meshtraind.owner.settings import OwnerSettings


def why_rest(settings: OwnerSettings, now: time, on_battery: bool) -> str | None:
    """Why learners are to rest at this time of day, for people; None: they need not."""
    hours = QuietHours.parse(settings.quiet_hours)
    if hours is not None and hours.holds(now):
        return f"quiet hours until {hours.end:%H:%M}"
    return "this laptop runs on its battery" if settings.pause_on_battery and on_battery else None


def on_battery() -> bool:
    """Whether this machine runs on a battery now; no where it has none, or does not say."""
    sensors = getattr(psutil, "sensors_battery", None)  # not on every system
    found = None if sensors is None else sensors()
    return found is not None and found.power_plugged is False

"""When this device is to train for nobody: in its owner's quiet hours, on its battery, with its lid closed, or hot."""

from datetime import time

from meshtraind.owner.machine_sensors import MachineSensors
from meshtraind.owner.quiet_hours import QuietHours
from meshtraind.owner.settings import OwnerSettings

COOLER_BY = 10.0  # degrees below the limit at which learners come back: at once they would be hot again


class RestWish:
    """Why learners are to rest now; remembers that it was for heat."""

    def __init__(self, sensors: MachineSensors) -> None:
        self._sensors = sensors
        self._hot = False

    def why(self, settings: OwnerSettings, now: time) -> str | None:
        """Why they are to rest at this time of day, for people; None: they need not."""
        hours = QuietHours.parse(settings.quiet_hours)
        hot = self._is_hot(settings.max_celsius)
        if hours is not None and hours.holds(now):
            return f"quiet hours until {hours.end:%H:%M}"
        if settings.pause_on_battery and self._sensors.on_battery():
            return "this laptop runs on its battery"
        if settings.pause_on_lid and self._sensors.lid_closed():
            return "this laptop's lid is closed"
        return f"this machine is hotter than {settings.max_celsius} degrees" if hot else None

    def _is_hot(self, limit: int) -> bool:
        found = self._sensors.celsius() if limit else None
        self._hot = found is not None and found > (limit - COOLER_BY if self._hot else limit)
        return self._hot


def not_told(settings: OwnerSettings, sensors: MachineSensors) -> str | None:
    """What a setting waits for that this machine does not tell, for people; None: nothing."""
    if settings.pause_on_lid and sensors.lid_closed() is None:
        return "pause_on_lid: this machine does not tell whether its lid is closed (Linux laptops do, by ACPI)"
    if settings.max_celsius and sensors.celsius() is None:
        return "max_celsius: this machine does not tell how hot its processor is (most with Linux do)"
    return None

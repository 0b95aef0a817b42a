"""What a machine tells of itself: battery, lid, heat and load of the processor. Read when asked, and not before."""

from pathlib import Path

import psutil

from meshwire import limits
from meshwire.messages.link import MachineState

LIDS = Path("/proc/acpi/button/lid")
# Chips of processors, as Linux names them; of others a disk or a radio may be meant.
PROCESSORS = frozenset(
    {"coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "soc-thermal", "acpitz"}
)


class MachineSensors:
    """Reads them.

    Args:
        lids: folder with one folder for each lid, as Linux's ACPI has it.
    """

    def __init__(self, lids: Path = LIDS) -> None:
        self._lids = lids
        self._times: tuple[float, float] | None = None  # of the processor, in use and all, when it was asked last

    def on_battery(self) -> bool:
        """Whether this machine runs on a battery now; no where it has none, or does not say."""
        return self.charge()[1] is False

    def charge(self) -> tuple[float | None, bool | None]:
        """How full its battery is, 0 to 1, and whether power comes from outside; None where it does not say."""
        sensors = getattr(psutil, "sensors_battery", None)  # not on every system
        try:
            found = None if sensors is None else sensors()
        except OSError:  # it was taken out between two looks into its folder
            found = None
        if found is None:
            return None, None
        percent = getattr(found, "percent", None)
        full = None if percent is None else min(1.0, max(0.0, percent / 100))
        return full, None if found.power_plugged is None else bool(found.power_plugged)

    def load(self) -> float | None:
        """The part of the processor that was in use since this was asked last, 0 to 1; None the first time."""
        now = psutil.cpu_times()
        twice = getattr(now, "guest", 0.0) + getattr(now, "guest_nice", 0.0)  # Linux counts them as `user`, too
        total_s = sum(now) - twice
        used_s = total_s - now.idle - getattr(now, "iowait", 0.0)
        before, self._times = self._times, (used_s, total_s)
        if before is None or total_s <= before[1]:
            return None
        return min(1.0, max(0.0, (used_s - before[0]) / (total_s - before[1])))

    def state(self) -> MachineState:
        """Load, heat and battery. Blocks on the sensors."""
        battery, plugged = self.charge()
        heat = self.celsius()
        if heat is not None and not -limits.CELSIUS_MAX <= heat <= limits.CELSIUS_MAX:
            heat = None
        return MachineState(busy=self.load(), celsius=heat, battery=battery, plugged=plugged)

    def lid_closed(self) -> bool | None:
        """Whether its lid is closed; None where it does not say."""
        try:
            states = [(lid / "state").read_text("ascii", "replace") for lid in self._lids.iterdir()]
        except OSError:
            return None
        return any(state.split()[-1:] == ["closed"] for state in states) if states else None

    def celsius(self) -> float | None:
        """How hot the hottest part of its processor is; None where it does not say."""
        sensors = getattr(psutil, "sensors_temperatures", None)  # not on every system
        chips = {} if sensors is None else sensors()
        found = [part.current for chip, parts in chips.items() if chip in PROCESSORS for part in parts if part.current]
        return max(found, default=None)

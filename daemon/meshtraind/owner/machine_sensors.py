"""What a machine tells of itself: battery, lid, heat of the processor. Read when it is asked, and not before."""

from pathlib import Path

import psutil

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

    def on_battery(self) -> bool:
        """Whether this machine runs on a battery now; no where it has none, or does not say."""
        sensors = getattr(psutil, "sensors_battery", None)  # not on every system
        found = None if sensors is None else sensors()
        return found is not None and found.power_plugged is False

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

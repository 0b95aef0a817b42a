"""The settings that count now: from the file at the start, by command, or because somebody has edited the file."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from meshtraind.owner.machine_sensors import MachineSensors
from meshtraind.owner.resting import not_told
from meshtraind.owner.settings import KEYS, OwnerSettings, SettingsError, check_key
from meshtraind.owner.settings_file import NAME, SettingsFile
from meshtraind.runtime.tasks import TaskSet
from meshwire import limits
from meshwire.messages.config import ConfigEntry, ConfigShown
from meshwire.text import printable

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0


class LiveSettings:
    """Keeps the settings, and calls whoever follows them.

    A file with an error changes nothing: what was read before counts on, and `problem` says what is wrong. So it does
    where a setting waits for what this machine does not tell; the others count then.

    Args:
        sensors: of this machine; a test has others.

    Attributes:
        sensors: of this machine.
        now: those that count.
        problem: what is wrong with the file; None: nothing.
    """

    def __init__(self, data_dir: Path, sensors: MachineSensors | None = None) -> None:
        self.sensors = sensors or MachineSensors()
        self.now = OwnerSettings()
        self.problem: str | None = None
        self._file = SettingsFile(data_dir / NAME)
        self._stamp = self._file.stamp()
        self._changed: list[Callable[[], None]] = []
        self._look: list[Callable[[], None]] = []
        self._tasks = TaskSet("settings")

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Calls `changed` whenever other settings count."""
        self._changed.append(changed)

    def at_every_look(self, look: Callable[[], None]) -> None:
        """Calls `look` every LOOK_INTERVAL_S, between `start` and `close`."""
        self._look.append(look)

    def load(self) -> None:
        """Reads the file, and makes it if it is not there, for people who look for what could be set."""
        try:
            self._file.make()
        except SettingsError as error:
            log.warning("%s", error)
        self._read()

    def start(self) -> None:
        """Looks at the file from now on."""
        self._tasks.spawn(self._keep_looking(), "look at the settings")

    async def close(self) -> None:
        """Looks no more."""
        await self._tasks.close()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Reads the file if it has changed."""
        if self._file.stamp() != self._stamp:
            self._read()
        for look in self._look:
            look()

    def _read(self) -> None:
        self._stamp = self._file.stamp()
        try:
            found = self._file.read()
        except SettingsError as error:
            if str(error) != self.problem:
                log.error("the settings stay as they were: %s", error)
            self.problem = str(error)
            return
        missing = not_told(found, self.sensors)
        if missing is not None and missing != self.problem:
            log.warning("%s; it has no effect here", missing)
        elif missing is None and self.problem is not None:
            log.info("%s can be read again", self._file.path)
        self.problem = missing
        self._take(found)

    def _take(self, settings: OwnerSettings) -> None:
        before, self.now = self.now, settings
        if before == settings:
            return
        for key in KEYS:
            if (value := getattr(settings, key)) != getattr(before, key):
                log.info("%s is %s now", key, value)
        for changed in self._changed:
            changed()

    def change(self, key: str, text: str | None) -> None:
        """Sets a key to what a person has typed; None: takes it back to its default. Raises SettingsError."""
        check_key(key)
        alone = OwnerSettings.read({} if text is None else {key: text}, typed=True)
        if (missing := not_told(alone, self.sensors)) is not None:
            raise SettingsError(missing)
        value = None if text is None else getattr(alone, key)
        settings = self._file.change(key, value)
        self._stamp = self._file.stamp()
        self.problem = None
        self._take(settings)

    def shown(self) -> ConfigShown:
        """What counts now, for people."""
        return ConfigShown(
            path=str(self._file.path),
            problem=None if self.problem is None else printable(self.problem)[: limits.ERROR_CHARS_MAX],
            entries=tuple(
                ConfigEntry(
                    key=key,
                    value=getattr(self.now, key),
                    default=OwnerSettings.default(key),
                    about=OwnerSettings.about(key),
                )
                for key in KEYS
            ),
        )

"""How much of this machine the daemon may take: every key of `meshtrain config`, its default, and what it does.

A key's description is what people read, in `meshtrain config`, in the file and in errors: it names the legal values.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from meshtraind.owner.quiet_hours import QUIET_OFF, QuietHours
from meshwire import limits
from meshwire.text import printable

Value = bool | int | float | str
MESSAGE_CHARS_MAX = 120  # of what pydantic says is wrong
SHOWN_CHARS_MAX = 60  # of a key or value that is not legal
NOT_HERE = {  # what people look for, and where it is
    "name": "meshtrain up --name NAME",
    "introductions": "meshtrain up --introductions accept|ask|never",
    "patience": "meshtrain up --patience SECONDS",
    "dashboard": "meshtrain up --dashboard PORT",
    "listen": "meshtrain up --listen HOST:PORT",
}


NOTIFY_DESKTOP, NOTIFY_OFF = "desktop", "off"


BANDWIDTH_MBIT_MIN = 1.0  # below it a chunk takes seconds, and others take this device for one that has stalled


CELSIUS_MIN = 50  # which a processor that only waits has on a warm day


class SettingsError(Exception):
    """A key or a value that is not legal, or a file that cannot be read or written; says what is."""


class OwnerSettings(BaseModel):
    """What a person has set, and defaults for the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    notify: str = Field(
        default=NOTIFY_DESKTOP,
        min_length=1,
        max_length=limits.CONFIG_VALUE_CHARS_MAX,
        description="Who is told when a job ends here, or waits for help: desktop (a notification, where there is a "
        "desktop), off, or a command for the shell, which finds MESHTRAIN_TEXT, MESHTRAIN_JOB, MESHTRAIN_JOB_NAME, "
        "MESHTRAIN_JOB_STATE and MESHTRAIN_JOB_ERROR in its environment.",
    )
    nice: int = Field(
        default=5,
        ge=0,
        le=19,
        description="How far training yields to your other programs: 0 (not at all) to 19. A learner that runs follows "
        "at once where it is to yield more, and from its next start where less.",
    )
    max_cpu_percent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="The part of this machine's cores that learners compute on: 1 to 100, at least one core. Counts "
        "from a learner's next start.",
    )

    bandwidth_mbit: float = Field(
        default=0.0,
        ge=0,
        le=100_000,
        description="The most that is sent to other machines, Mbit/s over all links together; 0: as much as they take. "
        "At least 1. Messages and heartbeats never wait.",
    )
    yield_to_calls: bool = Field(
        default=True,
        description="Whether links send slower where they make others' packets wait, so that a call in the same "
        "network stays what it was: true or false. On Linux; elsewhere it changes nothing.",
    )

    quiet_hours: str = Field(
        default=QUIET_OFF,
        max_length=16,
        description="When learners rest here, by this machine's clock: two times as in 22:00-07:00, or off. The others "
        "go on without this device, which comes back by itself.",
    )
    pause_on_battery: bool = Field(
        default=False, description="Whether learners rest while this laptop runs on its battery: true or false."
    )
    pause_on_lid: bool = Field(
        default=False,
        description="Whether learners rest while this laptop is awake with its lid closed: true or false.",
    )
    max_celsius: int = Field(
        default=0,
        ge=0,
        le=110,
        description="Learners rest when the processor is hotter, degrees Celsius, until it is 10 degrees below: 50 to "
        "110; 0: however hot it is.",
    )

    @field_validator("quiet_hours")
    @classmethod
    def _times(cls, value: str) -> str:
        QuietHours.parse(value)
        return value.strip()

    @field_validator("bandwidth_mbit")
    @classmethod
    def _not_next_to_nothing(cls, value: float) -> float:
        if 0 < value < BANDWIDTH_MBIT_MIN:
            raise ValueError(f"at least {BANDWIDTH_MBIT_MIN:g} is taken, or 0 for no cap")
        return value

    @field_validator("max_celsius")
    @classmethod
    def _not_always_hot(cls, value: int) -> int:
        if 0 < value < CELSIUS_MIN:
            raise ValueError(f"at least {CELSIUS_MIN} is taken, or 0 for no limit")
        return value

    @field_validator("notify")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("one line of printable text is taken")
        return value.strip()

    @classmethod
    def about(cls, key: str) -> str:
        """What a key does, and its legal values."""
        return cls.model_fields[key].description or ""

    @classmethod
    def default(cls, key: str) -> Value:
        """What counts where a person has set nothing."""
        default: Value = cls.model_fields[key].default
        return default

    @classmethod
    def read(cls, values: Mapping[str, object], *, typed: bool = False) -> Self:
        """Checks keys and values. Raises SettingsError, which names what is legal.

        Args:
            typed: the values are text, as a person types them; else they have the types that TOML gives them.
        """
        for key in values:
            check_key(key)
        try:
            return cls.model_validate(dict(values), strict=not typed)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            key = str(first["loc"][0])
            given = printable(str(values[key])[:SHOWN_CHARS_MAX])
            said = printable(first["msg"][:MESSAGE_CHARS_MAX]).removeprefix("Value error, ")
            raise SettingsError(f"{key} = {given}: {said}. {cls.about(key)}") from None


KEYS = tuple(OwnerSettings.model_fields)  # in the order in which they are shown


def check_key(key: str) -> None:
    """Raises SettingsError where no setting is called so."""
    if key in KEYS:
        return
    instead = f"; for that: {NOT_HERE[key]}" if key in NOT_HERE else ""
    raise SettingsError(
        f"no setting is called {printable(key[:SHOWN_CHARS_MAX])}; there are: {', '.join(KEYS)}{instead}"
    )

"""Settings of a daemon, for `meshtrain config`, on the local endpoint."""

from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from meshwire import limits
from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import Text

SettingValue = StrictBool | StrictInt | StrictFloat | StrictStr


@message("get.config")
class GetConfig(Wire):
    """Request. Reply: `ConfigShown`."""


@message("set.config")
class SetConfig(Wire):
    """Request: set a key to what a person has typed; None: back to its default. Reply: `ConfigShown`."""

    key: Annotated[str, Field(max_length=64)]
    value: Annotated[str, Field(max_length=limits.CONFIG_VALUE_CHARS_MAX)] | None


@message("notify.job")
class NotifyOfJob(Wire):
    """Request: run this command here when a job ends or needs help, in place of what `notify` says. Reply: `Done`."""

    job: JobId
    command: Annotated[str, Field(min_length=1, max_length=limits.CONFIG_VALUE_CHARS_MAX)]


class ConfigEntry(Wire):
    """A setting as it is shown: its value, its default and what it does."""

    key: Text
    value: SettingValue  # that counts now
    default: SettingValue
    about: Text  # what it does, and what it takes


@message("config")
class ConfigShown(Wire):
    """Reply: every key; the file that they are in; and what is wrong with that, where it could not be read."""

    path: Text
    problem: Text | None
    entries: tuple[ConfigEntry, ...]

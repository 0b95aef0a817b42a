"""Whether the devices of a job could load a function of this process: compiled code of functions goes between equal
minor versions of Python only."""

import platform
from collections.abc import Mapping, Sequence

from meshtrain.errors import UsageError
from meshtrain.notebook.call import python_minor
from meshwire.messages.job import Member
from meshwire.messages.link import Software
from meshwire.text import printable


def check_pythons(members: Sequence[Member], software: Mapping[str, Software], here: str | None = None) -> None:
    """Raises UsageError, which names the devices with another Python and both versions.

    Args:
        software: by device; who has gone meanwhile is not in it.
        here: version of this process's Python.
    """
    wanted = python_minor(here if here is not None else platform.python_version())
    other = [
        f"{printable(member.name)} has Python {printable(python_minor(software[member.device].python))}"
        for member in members
        if member.device in software and python_minor(software[member.device].python) != wanted
    ]
    if other:
        raise UsageError(
            f"{', '.join(other)}, and this process Python {wanted}: functions travel as compiled code, which goes "
            f"between equal minor versions only. Install meshtrain there in an environment of Python {wanted}, and "
            "meshtrain up; or leave it out: mt.session(on=[...])"
        )

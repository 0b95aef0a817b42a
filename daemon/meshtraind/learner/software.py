"""What this machine runs, read from package metadata: importing torch to ask its version would take seconds."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from meshwire.frames import header
from meshwire.messages.link import Software


def installed_software() -> Software:
    """Versions that members of a job compare."""
    return Software(
        meshtrain=version("meshtraind"),
        python=platform.python_version(),
        torch=_version_or_none("torch"),
        system=f"{platform.system()} {platform.machine()}",
    )


def installed_anew() -> bool:
    """Whether other files lie there than those that this process began with: what it has not imported yet, and the
    scripts that it starts, would be of another version than itself."""
    return _traits() != _AT_START


def _traits() -> tuple[int, ...]:
    """What tells apart the file that names the wire version, as it lies there now; empty where there is none."""
    try:
        about = os.stat(header.__file__)
    except OSError:
        return ()
    return about.st_ino, about.st_size, about.st_mtime_ns


_AT_START = _traits()


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

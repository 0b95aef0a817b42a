"""What this machine runs, read from package metadata: importing torch to ask its version would take seconds."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from meshwire.messages.link import Software


def installed_software() -> Software:
    """Versions that members of a job compare."""
    return Software(
        meshtrain=version("meshtraind"),
        python=platform.python_version(),
        torch=_version_or_none("torch"),
        system=f"{platform.system()} {platform.machine()}",
    )


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version_or_none(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

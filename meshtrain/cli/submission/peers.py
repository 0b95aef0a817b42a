"""`submit --peers N`, `N:MAX` and `N:`: on how many devices a job runs, and how many it may have in all."""

import re

from meshtrain.cli.ui.errors import BadCommandLine
from meshwire import limits

PATTERN = re.compile(r"([0-9]{1,4})(?:(:)([0-9]{1,4})?)?")


def peers_wanted(text: str | None) -> tuple[int | None, int | None]:
    """Reads `--peers`: at least how many devices, and up to how many take part; without the second number the first is
    exact.

    Raises BadCommandLine.
    """
    if text is None:
        return None, None
    typed = PATTERN.fullmatch(text)
    if typed is None:
        raise BadCommandLine(f"--peers {text!r} is neither N, N:MAX nor N:", "--peers 3, or --peers 2:8")
    count = int(typed[1])
    count_max = None if typed[2] is None else int(typed[3] or limits.MEMBERS_MAX)
    for number in (count, count_max):
        if number is not None and not 1 <= number <= limits.MEMBERS_MAX:
            raise BadCommandLine(f"--peers {text}: a job has 1 to {limits.MEMBERS_MAX} devices, not {number}")
    if count_max is not None and count_max < count:
        raise BadCommandLine(
            f"--peers {text}: at most {count_max} devices are fewer than at least {count}",
            f"--peers {count_max}:{count}",
        )
    return count, count_max

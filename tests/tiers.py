"""Cases that plain `pytest` runs, and those that only `pytest -m slow` does."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """For `parametrize`: the first `quick` cases as they are, all others marked slow."""
    return [case if at < quick else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]

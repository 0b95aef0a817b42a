"""Cases that plain `pytest` runs, and those that only `pytest -m slow` or `pytest -m long` does."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """For `parametrize`: the first `quick` cases as they are, all others marked slow."""
    return [case if at < quick else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def mostly_long(cases: Iterable[Any], kept: int) -> list[Any]:
    """For `parametrize`: the first `kept` cases as they are, all others marked long: more seeds of the same."""
    return [case if at < kept else pytest.param(case, marks=pytest.mark.long) for at, case in enumerate(cases)]

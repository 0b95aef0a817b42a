"""Cases that plain `pytest` runs, and those that only `pytest -m slow` or `pytest -m long` does."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """For `parametrize`: the first `quick` cases as they are, all others marked slow."""
    return [case if at < quick else _marked(case, pytest.mark.slow) for at, case in enumerate(cases)]


def mostly_long(cases: Iterable[Any], kept: int) -> list[Any]:
    """For `parametrize`: the first `kept` cases as they are, all others marked long: more seeds of the same.

    A tuple is a case of several parameters.
    """
    return [case if at < kept else _marked(case, pytest.mark.long) for at, case in enumerate(cases)]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)

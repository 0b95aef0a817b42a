"""Which place a script is told among those that train."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtrain.train.session import LearnerSession


@pytest.mark.parametrize(("rank", "place"), [(0, 0), (1, 1), (3, 2), (4, 3)])
def test_hubs_have_no_place_among_those_that_train(rank: int, place: int) -> None:
    """H1: whoever came after a hub is still below the number of all, so that `mt.rank()` parts a data set."""
    members = tuple(SimpleNamespace(hub=hub) for hub in (False, False, True, False, False))
    session = cast(Any, SimpleNamespace(_welcome=SimpleNamespace(rank=rank, members=members)))
    assert LearnerSession.rank.fget(session) == place  # type: ignore[attr-defined]
    assert LearnerSession.world_size.fget(session) == 4  # type: ignore[attr-defined]

"""Which place a script is told among those that train."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtrain.train.session import LearnerSession


def session_of(rank: int, learners: int = 1, learner: int = 0) -> LearnerSession:
    """A learner's session in a job of five members of which the third is a hub."""
    members = tuple(SimpleNamespace(hub=hub, name="") for hub in (False, False, True, False, False))
    spec = SimpleNamespace(learners=learners)
    welcome: Any = SimpleNamespace(rank=rank, members=members, spec=spec, learner=learner)
    return LearnerSession(cast(Any, None), welcome, cast(Any, None))


@pytest.mark.parametrize(("rank", "place"), [(0, 0), (1, 1), (3, 2), (4, 3)])
def test_hubs_have_no_place_among_those_that_train(rank: int, place: int) -> None:
    """H1: whoever came after a hub is still below the number of all, so that `mt.rank()` parts a data set."""
    session = session_of(rank)
    assert (session.rank, session.world_size) == (place, 4)


@pytest.mark.parametrize(("rank", "learner", "place"), [(0, 0, 0), (0, 2, 2), (1, 0, 3), (4, 2, 11)])
def test_learners_of_a_device_follow_each_other(rank: int, learner: int, place: int) -> None:
    """R6: no two have the same place."""
    session = session_of(rank, 3, learner)
    assert (session.rank, session.world_size) == (place, 12)

"""Fixtures of the tests of ranks that torchrun starts."""

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest

from tests.train import rankprocesses


@pytest.fixture(scope="module", autouse=True)
def the_process_that_ranks_are_forked_from() -> Iterator[None]:
    """It stays until the last test of the module: others count the children of this process."""
    rankprocesses.CONTEXT.set_forkserver_preload(["tests.train.rankprocesses", "torch._dynamo"])
    forkserver.ensure_running()
    yield
    helpers: Any = (forkserver._forkserver, resource_tracker._resource_tracker)
    for helper in helpers:  # as Python's own tests end them
        helper._stop()

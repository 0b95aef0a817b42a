"""Fixtures of the tests of ranks that torchrun starts."""

from multiprocessing import forkserver

import pytest

from tests.train import rankprocesses


@pytest.fixture(scope="session", autouse=True)
def the_process_that_ranks_are_forked_from() -> None:
    """It stays until the end, with the pipes that lead to it."""
    rankprocesses.CONTEXT.set_forkserver_preload(["tests.train.rankprocesses", "torch._dynamo"])
    forkserver.ensure_running()

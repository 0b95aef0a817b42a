"""Real daemons behind the chaos proxy: no way around it, and they come back."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.lab.chaosmesh import LINK_TIMEOUT_S, POLL_S, ChaosMesh
from tests.lab.chaosproxy import ChaosProxy, Cut

PATIENCE_S = 1.0
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def mesh() -> Iterator[ChaosMesh]:
    with ChaosMesh(3, patience_s=PATIENCE_S) as started:
        yield started


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LINK_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {LINK_TIMEOUT_S} s for {what}"
        time.sleep(POLL_S)


def test_a_cut_link_is_not_got_around(mesh: ChaosMesh) -> None:
    """cleo tells both where the other is; these addresses are cleo's own ways."""
    mesh.proxy(lambda proxy: proxy.cut("anna", "bert", Cut.RST))
    until(lambda: "bert" not in mesh.linked("anna") and "anna" not in mesh.linked("bert"), "the loss of the link")
    deadline_s = time.monotonic() + 2.0
    while time.monotonic() < deadline_s:  # several dials to every address that they have heard of
        assert mesh.linked("anna") == {"cleo"}
        assert mesh.linked("bert") == {"cleo"}
        time.sleep(POLL_S)
    mesh.proxy(lambda proxy: proxy.heal("anna", "bert"))
    mesh.wait_linked()


@pytest.mark.slow
def test_a_stalled_link_is_lost_after_the_patience(mesh: ChaosMesh) -> None:
    def stall(proxy: ChaosProxy) -> None:
        proxy.stall("anna", "bert")
        proxy.stall("bert", "anna")

    began_s = time.monotonic()
    mesh.proxy(stall)
    until(lambda: "bert" not in mesh.linked("anna"), "the silence to be noticed")
    between_heartbeats_s = PATIENCE_S / 4  # at most so long before the stall the silence has begun
    assert time.monotonic() - began_s >= PATIENCE_S - between_heartbeats_s
    mesh.proxy(lambda proxy: proxy.heal("anna", "bert"))
    mesh.wait_linked()


@pytest.mark.slow
def test_a_daemon_that_was_killed_or_frozen_comes_back_with_its_data(mesh: ChaosMesh) -> None:
    cleo = mesh.daemons["cleo"]
    cleo.kill()
    until(lambda: mesh.linked("anna") == {"bert"}, "the loss of cleo")
    cleo.start()
    mesh.wait_linked()
    cleo.freeze()
    until(lambda: mesh.linked("anna") == {"bert"}, "the loss of cleo")
    cleo.thaw()
    mesh.wait_linked()

"""`peers --measure` and `peers -v`: what links were measured to carry."""

import json
import time

import pytest

from meshwire.messages.envelope import Failure
from meshwire.messages.local import GetPeers, LinksMeasured, MeasureLinks, MeasureProgress, Peers, PeerSummary
from meshwire.planning.measured_link import MeasuredLink
from tests.daemon.fakedaemon import ANNA, BERT, SOFTWARE, Emit, Endpoint, run

pytestmark = pytest.mark.usefixtures("plain_environment")

LINK = MeasuredLink(
    send_bytes_s=5e6,
    receive_bytes_s=4.5e6,
    both_send_bytes_s=2.5e6,
    both_receive_bytes_s=2.25e6,
    rtt_s=0.0042,
    loaded_rtt_s=0.031,
    wired=None,
    peer_wired=None,
    at_s=time.time() - 10 * 86_400,  # days: a test may come minutes after this was made
)


def peer(device: str, name: str, measured: MeasuredLink | None) -> PeerSummary:
    return PeerSummary(
        device=device,
        name=name,
        state="linked",
        address="192.168.1.9:29610",
        rtt_s=0.003,
        software=SOFTWARE,
        cores=4,
        memory_bytes=8 * 2**30,
        measured=measured,
    )


@pytest.fixture
def known(endpoint: Endpoint) -> Endpoint:
    endpoint.answers[GetPeers] = Peers(peers=(peer(ANNA, "anna\x1b[2J", LINK), peer(BERT, "bert", None)))
    return endpoint


@pytest.mark.usefixtures("known")
def test_verbose_shows_what_is_known_and_how_old_it_is() -> None:
    lines = run("peers", "-v").stdout.splitlines()
    header, row = lines[-2:]
    assert header.split() == ["LINK", "TO", "SENDS", "RECEIVES", "AT", "ONCE", "RTT", "LOADED", "MEDIUM", "MEASURED"]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells == ["anna\\x1b[2J", "40", "36", "20 + 18", "4.2 ms", "31.0 ms", "shared", "10 days ago"]
    assert "LINK TO" not in run("peers").stdout


def test_who_has_measured_nothing_is_told_how_to(endpoint: Endpoint) -> None:
    endpoint.answers[GetPeers] = Peers(peers=(peer(BERT, "bert", None),))
    assert "No link was measured yet: meshtrain peers --measure" in run("peers", "-v").stderr


def test_measuring_shows_which_link_and_who_could_not_be(known: Endpoint) -> None:
    def measured(body: MeasureLinks, emit: Emit) -> LinksMeasured:
        assert body.devices == ()
        emit(MeasureProgress(name="bert", done=1, total=2))
        return LinksMeasured(failed=(("bert", "a job runs on bert"),))

    known.answers[MeasureLinks] = measured
    shown = run("peers", "--measure")
    assert shown.exit_code == 1
    assert "measuring the link to bert (2 of 2)" in shown.stderr
    assert "bert was not measured: a job runs on bert" in shown.stderr
    assert "20 + 18" in shown.stdout
    known.answers[MeasureLinks] = LinksMeasured(failed=())
    document = json.loads(run("peers", "--measure", "--json").stdout)
    assert document[0]["measured"]["send_bytes_s"] == 5e6
    assert document[1]["measured"] is None


def test_a_job_that_runs_here_is_the_reason(known: Endpoint) -> None:
    known.answers[MeasureLinks] = Failure(error="a job runs on anna: links are measured when it has ended")
    shown = run("peers", "--measure")
    assert shown.exit_code == 1
    assert "error: a job runs on anna" in shown.stderr

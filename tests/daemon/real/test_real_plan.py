"""Two real daemons: the link between them is measured, a script is planned for them, and no job is disturbed (W7)."""

import json
from pathlib import Path

import pytest

from meshtrain.cli.commands import planning
from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshtrain.client import RequestError
from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import JobSummary
from meshwire.messages.local import GetPeers, LinksMeasured, MeasureLinks, Peers
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from tests.daemon import realjobs as jobs
from tests.daemon.fakedaemon import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("plain_environment")]


def test_a_script_is_planned_on_a_measured_link_and_not_beside_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalMesh(("anna", "bert"), print) as mesh:
        anna, bert = mesh.daemons
        assert anna.request(MeasureLinks(), jobs.TIMEOUT_S, "measuring") == LinksMeasured(failed=())
        reply = anna.request(GetPeers(), jobs.TIMEOUT_S, "peers")
        assert isinstance(reply, Peers)
        (known,) = (peer for peer in reply.peers if peer.state == "linked")  # daemons of other tests are seen
        assert known.measured is not None
        assert known.measured.send_bytes_s > 1e6
        assert known.measured.peer_speed is not None
        assert 0.05 < known.measured.peer_speed < 20, "the same processor, which others use, too"
        assert known.measured.wired is None, "a loopback is no device"

        folder = tmp_path / "example"
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert run("init", "--example", "mlp", ".").exit_code == 0
        fixed = ProcessorPrices(
            {tried.codec: CodecPrice(1e-9, 1e-9) for tried in EVIDENCE}
        )  # they take long to measure
        monkeypatch.setattr(planning, "processor_prices", lambda *_: fixed)
        shown = run("plan", "--json", "--data-dir", str(anna.data_dir), "train.py")
        assert shown.exit_code == 0, shown.stderr
        document = json.loads(shown.stdout)
        assert [device["name"] for device in document["devices"]] == ["anna", "bert"]
        (option,) = document["options"]
        assert option["step_s"] > 0
        assert document["command"].startswith("meshtrain submit ")
        assert document["reason"].startswith(("Train alone", "anna, bert together train"))
        assert run(*document["command"].split()[1:-1], "--help").exit_code == 0, "submit knows all that is on it"

        stop = tmp_path / "stop"
        job = jobs.submit(anna, tmp_path, jobs.UNTIL_STOPPED, args=(str(stop),)).job

        def trains(summary: JobSummary) -> bool:
            return summary.state == "running" and summary.rounds > 2

        jobs.wait_for(anna, job, trains, "its third round")
        for daemon in (anna, bert):
            with pytest.raises(RequestError, match=f"a job runs on {daemon.name}: links are measured when it has"):
                daemon.request(MeasureLinks(), jobs.TIMEOUT_S, "measuring")
        assert "error: a job runs on this device" in run("plan", "--data-dir", str(anna.data_dir), "train.py").stderr
        stop.touch()
        assert jobs.ended(anna, job).state == "succeeded"

"""`meshtrain metrics`: what Prometheus reads (its own parser reads it here)."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import Metrics, RankReport
from meshwire.messages.local import GetJobs, GetPeers, GetStatus, LinkTraffic, Peers, PeerSummary
from tests.daemon.fakedaemon import BERT, JOB, SOFTWARE, STATUS, Endpoint, known_jobs, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

NAME = 'bert "the\nold"\\'


@pytest.fixture
def running(endpoint: Endpoint) -> Endpoint:
    linked = PeerSummary(
        device=BERT, name=NAME, state="linked", address="10.0.0.2:1", rtt_s=0.004, software=SOFTWARE, cores=2,
        memory_bytes=None,
    )  # fmt: skip
    away = linked.model_copy(update={"name": "carl", "state": "paired", "rtt_s": None})
    traffic = LinkTraffic(name=NAME, bytes_per_s=None, sent_bytes=9000, spared_bytes=0)
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"links": (traffic,), "peers_linked": 1})
    endpoint.answers[GetPeers] = Peers(peers=(linked, away))
    metrics = Metrics(
        step=7, samples=96, step_s=0.25, exposed_s=1.5, sent_bytes=4000, values=(("loss", 0.5), ("nan", float("nan")))
    )
    reports = (
        RankReport(job=JOB, rank=0, state="running", metrics=metrics),
        RankReport(job=JOB, rank=1, state="running", restarts=2),
    )
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.RUNNING, ranks=reports, rounds=6, present=(0, 1)))
    return endpoint


def read(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels, without those of the job's name."""
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name not in ("job", "name")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_device_and_its_jobs_do(running: Endpoint) -> None:
    shown = run("metrics")
    assert shown.exit_code == 0, shown.stderr
    found = read(shown.stdout)
    assert found["meshtrain_peers_linked",] == 1
    assert found["meshtrain_peer_rtt_seconds", NAME] == 0.004
    assert found["meshtrain_link_sent_bytes_total", NAME] == 9000
    assert found["meshtrain_job_rounds",] == 6
    assert found["meshtrain_job_devices",] == 2
    assert found["meshtrain_rank_step_seconds", "anna", "0"] == 0.25
    assert found["meshtrain_rank_samples_total", "anna", "0"] == 96
    assert found["meshtrain_rank_waited_seconds_total", "anna", "0"] == 1.5
    assert found["meshtrain_rank_restarts_total", "bert", "1"] == 2
    assert found["meshtrain_rank_value", "anna", "0", "loss"] == 0.5
    assert "carl" not in shown.stdout, "who is away has no round trip"
    assert "# TYPE meshtrain_rank_steps_total counter" in shown.stdout
    assert running.of_type(GetJobs)


def test_what_is_over_is_no_metric(running: Endpoint) -> None:
    running.answers[GetJobs] = known_jobs(summary(JobState.SUCCEEDED, rounds=6))
    assert ("meshtrain_job_rounds",) not in read(run("metrics").stdout)


def test_as_json(running: Endpoint) -> None:
    assert running
    found: dict[str, Any] = json.loads(run("metrics", "--json").stdout)
    assert found["status"]["peers_linked"] == 1
    assert [peer["name"] for peer in found["peers"]] == [NAME, "carl"]
    assert found["jobs"][0]["ranks"][0]["metrics"]["values"] == [["loss", 0.5], ["nan", None]]


def test_a_file_is_written_whole_or_not_at_all(running: Endpoint, tmp_path: Path) -> None:
    assert running
    file = tmp_path / "meshtrain.prom"
    shown = run("metrics", "-o", str(file))
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert read(file.read_text())["meshtrain_peers_linked",] == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name], "no part of it is left"
    shown = run("metrics", "-o", str(tmp_path / "nowhere" / "meshtrain.prom"))
    assert shown.exit_code == 1
    assert "cannot be written: No such file or directory" in shown.stderr

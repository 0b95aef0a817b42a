"""`plan`: who should train a script together, on the mesh that a daemon tells of."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from meshtrain.cli.commands import planning as command
from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshtrain.cli.planning.linked_mesh import FRESH_S
from meshtrain.cli.planning.mesh_verdict import devices_of
from meshtrain.cli.planning.other_programs import OtherPrograms
from meshtrain.cli.submission.measuring import NotMeasured
from meshwire.messages.envelope import Failure
from meshwire.messages.link import LinkedDevices
from meshwire.messages.local import (
    AskTogether,
    GetPeers,
    GetStatus,
    LinksMeasured,
    MeasureLinks,
    Peers,
    PeerSummary,
)
from meshwire.planning.measured_link import MeasuredLink
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE
from tests.daemon.cli.test_whatif import traced
from tests.daemon.fakedaemon import ANNA, BERT, SOFTWARE, STATUS, Emit, Endpoint, run

pytestmark = pytest.mark.usefixtures("plain_environment")

CARL = "ef" * 32
CORES = 1 + (os.cpu_count() or 1)  # of all others
NAMES = {ANNA: "anna", BERT: "bert", CARL: "carl"}


def measured(mbit: float, age_s: float = 60.0) -> MeasuredLink:
    rate = mbit * 125_000
    return MeasuredLink(
        send_bytes_s=rate,
        receive_bytes_s=rate,
        both_send_bytes_s=rate,
        both_receive_bytes_s=rate,
        rtt_s=0.001,
        loaded_rtt_s=0.02,
        wired=True,
        peer_wired=True,
        at_s=time.time() - age_s,
    )


def in_a_cell(mbit: float, peer_wired: bool) -> MeasuredLink:
    """From a laptop without a cable: both directions share the air, which a byte crosses twice, or once."""
    rate = mbit * 125_000 * (2 if peer_wired else 1)
    both = {"both_send_bytes_s": rate / 2, "both_receive_bytes_s": rate / 2, "wired": False, "peer_wired": peer_wired}
    return measured(mbit, 0.0).model_copy(update={"send_bytes_s": rate, "receive_bytes_s": rate, **both})


class FakeMesh:
    """A daemon that knows others, and what their links carry once it has measured them.

    Attributes:
        mbit: what is found, by device; 0: it cannot be measured.
        known: what is.
        together: whom a job would take.
        without_torch: linked devices.
        hubs: linked devices.
        speeds: how fast others compute; of who is not in it, unknown.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.mbit: dict[str, float] = {BERT: 1000.0}
        self.known: dict[str, MeasuredLink] = {}
        self.together: tuple[str, ...] | None = None
        self.without_torch: set[str] = set()
        self.hubs: set[str] = set()
        self.speeds: dict[str, float] = {}
        self.names = dict(NAMES)
        self.addresses: dict[str, str] = {}
        self.beside: set[str] = set()  # on this machine
        endpoint.answers |= {
            GetStatus: STATUS,
            GetPeers: lambda _body, _emit: Peers(peers=tuple(map(self._peer, self.mbit))),
            AskTogether: lambda _body, _emit: LinkedDevices(devices=self.together or (ANNA, *self.mbit)),
            MeasureLinks: self._measure,
        }

    def _peer(self, device: str) -> PeerSummary:
        torch = None if device in self.without_torch else "2.13.0"
        return PeerSummary(
            device=device,
            name=self.names[device],
            state="linked",
            address=self.addresses.get(device),
            rtt_s=0.001,
            software=SOFTWARE.model_copy(update={"torch": torch}),
            cores=CORES,
            memory_bytes=1,
            measured=self.known.get(device),
            hub=device in self.hubs,
            same_machine=device in self.beside,
        )

    def _measure(self, body: MeasureLinks, _emit: Emit) -> LinksMeasured:
        self.known |= {
            device: measured(self.mbit[device], 0.0).model_copy(update={"peer_speed": self.speeds.get(device)})
            for device in body.devices
            if self.mbit[device]
        }
        failed = [(self.names[device], "a job runs on it") for device in body.devices if not self.mbit[device]]
        return LinksMeasured(failed=tuple(failed))


@pytest.fixture
def mesh(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMesh:
    """Anna is linked with bert, at 1000 Mbit/s, and has a script whose steps are known: 2.9 million values, 0.157 s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it is not run')\n")
    steps_as(monkeypatch)
    fixed = {tried.codec: CodecPrice(0.5e-9, 0.5e-9) for tried in EVIDENCE}
    monkeypatch.setattr(command, "processor_prices", lambda *_: ProcessorPrices(fixed))
    monkeypatch.setattr(OtherPrograms, "part", lambda _: 0.0)
    return FakeMesh(endpoint)


def steps_as(monkeypatch: pytest.MonkeyPatch, *what: float) -> None:
    monkeypatch.setattr(command, "trace", lambda *_: traced(*what))  # type: ignore[arg-type]


def document(*args: str) -> Any:
    shown = run("plan", "--json", *args, "train.py")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def asked(endpoint: Endpoint) -> list[tuple[str, ...]]:
    return [body.devices for body in endpoint.of_type(MeasureLinks)]


@pytest.mark.usefixtures("mesh")
def test_the_table_has_one_alone_and_each_group_and_marks_the_choice() -> None:
    shown = run("plan", "train.py")
    assert shown.exit_code == 0, shown.stderr
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in shown.stdout.splitlines()]
    assert lines[0] == ["LAPTOPS", "SETTINGS", "STEP", "SAMPLES/S", "OF ONE", "SENT A STEP", "QUALITY", "WAITS FOR"]
    assert lines[1] == ["anna", "train alone", "157 ms", "51", "1.00x", "-", "exact", "computing"]
    assert lines[2][:2] == ["*", "anna, bert"]
    assert lines[3][:2] == ["anna, bert", "the defaults"]
    (told,) = (line for line in shown.stderr.splitlines() if "together train" in line)
    assert told.startswith(f"anna, bert together train {lines[2][5]} as fast as one laptop alone (")
    assert "a step mostly waits for" in told
    assert f"Run it: meshtrain submit --no-plan {lines[2][2]} train.py" in shown.stderr
    assert "2,900,000 values" in shown.stderr
    assert "All laptops are taken to compute as fast as this one" in shown.stderr
    assert f"bert has {CORES}" in shown.stderr
    assert "Predicted, not measured" in shown.stderr


def test_train_alone_is_said_by_how_much_and_with_what_helps(mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 5.0}
    shown = run("plan", "--quality", "exact", "train.py")
    assert shown.stdout.splitlines()[1].startswith("*  anna")
    (told,) = (line for line in shown.stderr.splitlines() if "Train alone" in line)
    assert "one laptop is " in told
    assert "times as fast as the best of all groups, with --codec" in told
    assert "With --quality fast they are at a loss 1." in told
    assert "Run it: meshtrain submit --peers 1 train.py" in shown.stderr
    assert document("--quality", "exact")["choice"] is None


def test_a_larger_batch_is_told_where_it_would_help_and_is_not_on_the_line_to_run(mesh: FakeMesh) -> None:
    """O6: it is another batch, so nobody has it who has not typed it."""
    mesh.mbit = {BERT: 100.0}
    shown = run("plan", "--quality", "exact", "train.py")
    (told,) = (line for line in shown.stderr.splitlines() if "With a batch" in line)
    assert "--sync bsp,accumulate=" in told
    assert told.endswith("try --scale-lr sqrt with it."), "for AdamW"
    (line,) = (line for line in shown.stderr.splitlines() if line.startswith("Run it:"))
    assert "accumulate" not in line
    found = document("--quality", "exact")["larger_batch"]
    assert found["sync"].startswith("bsp,accumulate=")
    mesh.mbit = {BERT: 1e5}
    shown = run("plan", "--measure", "--quality", "exact", "train.py")
    assert "With a batch" not in shown.stderr
    assert "A round is a batch 2 times the script's: --scale-lr sqrt raises" in shown.stderr
    assert document()["scale_lr"] == "sqrt"


def test_a_group_is_named_on_the_line_to_run(mesh: FakeMesh, endpoint: Endpoint) -> None:
    """With a slow third one, whose cable is the bottleneck, two are faster."""
    mesh.mbit = {BERT: 1000.0, CARL: 1.0}
    found = document()
    assert found["choice"]["members"] == [ANNA, BERT]
    assert found["command"].startswith("meshtrain submit --no-plan --on anna,bert ")
    assert found["command"].endswith(" train.py")
    assert len(found["options"]) == 3
    assert "; all 3 would do " in found["reason"]
    assert asked(endpoint) == [(BERT, CARL)]
    assert found["devices"][2] == {"device": CARL, "name": "carl"}
    assert found["choice"]["sent_bytes"] > 0
    assert found["alone_samples_s"] == pytest.approx(51, rel=0.01)


def test_links_are_measured_where_they_are_not_known_or_long_ago(mesh: FakeMesh, endpoint: Endpoint) -> None:
    mesh.mbit = {BERT: 1000.0, CARL: 100.0}
    mesh.known = {BERT: measured(1000.0), CARL: measured(100.0, FRESH_S + 60)}
    run("plan", "train.py")
    run("plan", "train.py")
    run("plan", "--measure", "train.py")
    assert asked(endpoint) == [(CARL,), (BERT, CARL)]


def test_who_cannot_be_measured_is_left_out_and_named(mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 1000.0, CARL: 0.0}
    shown = run("plan", "train.py")
    assert "carl is left out, its link was not measured: a job runs on it" in shown.stderr
    assert "Run it: meshtrain submit --no-plan --on anna,bert " in shown.stderr, "carl would be taken, too"
    mesh.mbit = {BERT: 0.0}
    mesh.known = {}
    shown = run("plan", "train.py")
    assert shown.exit_code == 1
    assert "error: no link could be measured" in shown.stderr
    assert "try: meshtrain peers --measure" in shown.stderr
    mesh.known = {BERT: measured(1000.0, 3000.0)}
    shown = run("plan", "train.py")
    assert shown.exit_code == 0
    assert "bert: its link counts as it was measured 50 min ago, for now it was not: a job runs on it" in shown.stderr


def test_who_could_not_be_in_a_job_is_left_out_and_named(mesh: FakeMesh, endpoint: Endpoint) -> None:
    mesh.mbit, mesh.together = {BERT: 1000.0, CARL: 1000.0}, (ANNA, BERT)
    shown = run("plan", "train.py")
    assert "carl is left out: it has no torch, or no link to one of the others" in shown.stderr
    assert asked(endpoint) == [(BERT,)]
    assert "--on" not in shown.stderr, "submit leaves it out by itself"


def test_a_hub_is_in_the_plan_where_it_does_not_slow_the_laptops_down(mesh: FakeMesh, endpoint: Endpoint) -> None:
    """H1: it is measured like a laptop, counts as none, and where its one link is the bottleneck it is left out."""
    mesh.mbit[CARL] = 1000.0
    mesh.hubs.add(CARL)
    found = document()
    assert asked(endpoint) == [(BERT, CARL)]
    assert [device["device"] for device in found["devices"]] == [ANNA, BERT]
    assert len(found["hubs"]) == 1
    assert [each["members"] for each in found["options"]] == [[ANNA, BERT]]
    assert found["choice"]["by_hubs"]
    assert "--topology" not in found["command"]
    shown = run("plan", "train.py")
    assert f"by the hub {found['hubs'][0]}" in shown.stdout
    mesh.known.clear()
    mesh.mbit[CARL] = 20.0
    slow = document()
    assert not slow["choice"]["by_hubs"]
    assert "--topology" in slow["command"], "or submit would take it in"


def test_what_fast_chooses_is_not_praised_for_its_samples_alone(mesh: FakeMesh) -> None:
    """Each is worth less (grid.md): 3.7 times the samples are not 3.7 times as soon at a loss."""
    mesh.mbit[BERT] = 20.0
    found = document("--quality", "fast")
    choice = found["choice"]
    assert 0.5 < choice["sample_worth"] < 1.0
    assert re.search(r" are at a loss \d\.\d+x as soon as one laptop alone \(", found["reason"])
    assert f" samples/s, each worth {choice['sample_worth']:.2f} of one in step, " in found["reason"]
    samples_s = choice["samples_s"] * choice["sample_worth"]
    assert choice["against_one"] == pytest.approx(samples_s / found["alone_samples_s"])
    mesh.mbit[BERT] = 1000.0
    safe = document("--measure")
    assert safe["choice"]["sample_worth"] == 1.0
    assert " train 1." in safe["reason"]


@pytest.mark.parametrize("known", [True, False])
def test_periods_are_for_optimizers_of_which_it_is_known_how_long_their_local_steps_are_to_be(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """O13: with others, and with those that only have the name of one of torch's, a person alone takes them."""
    mesh.mbit[BERT] = 20.0
    found = traced()
    size = found.measurement.size.model_copy(update={"optimizer_known": known})
    script = found.model_copy(update={"measurement": found.measurement.model_copy(update={"size": size})})
    monkeypatch.setattr(command, "trace", lambda *_: script)
    assert document("--quality", "fast")["fast"]["sync"].startswith("local:") == known


def test_rounds_go_by_the_laptop_on_a_cable_and_the_line_names_who_has_which_rank(mesh: FakeMesh) -> None:
    mesh.mbit = {BERT: 1000.0, CARL: 1000.0}
    mesh.known = {BERT: in_a_cell(200.0, peer_wired=False), CARL: in_a_cell(200.0, peer_wired=True)}
    found = document()
    assert found["choice"]["members"] == [ANNA, BERT, CARL]
    assert found["choice"]["topology"] == "star:2"
    assert " --on anna,bert,carl " in found["command"]
    assert " --topology star:2 " in found["command"]


def test_who_is_faster_is_named_where_alone_is_faster(mesh: FakeMesh) -> None:
    mesh.mbit, mesh.speeds = {BERT: 2.0}, {BERT: 2.5}
    shown = run("plan", "--quality", "exact", "train.py")
    assert shown.stdout.splitlines()[1].startswith("*  bert  ")
    assert "Train alone on bert, which is faster" in shown.stderr
    assert "Run it: meshtrain submit --on bert train.py" in shown.stderr


def test_daemons_on_one_machine_are_told_that_they_share_it(mesh: FakeMesh) -> None:
    mesh.mbit, mesh.beside = {BERT: 1000.0, CARL: 1000.0}, {BERT}
    assert "On this very machine: bert. Its processor is shared" in run("plan", "train.py").stderr


def test_what_is_the_scripts_own_is_on_the_line_as_it_was_typed(mesh: FakeMesh, tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    found = run("plan", "--json", "--data", "my data", "train.py", "--name", "a b", "--json")
    command_line = json.loads(found.stdout)["command"]
    assert command_line.endswith(" --data 'my data' train.py --name 'a b' --json")
    mesh.mbit, mesh.known = {BERT: 1.0}, {}
    assert "--peers 1 --data" in json.loads(run("plan", "--json", "--data", "my data", "train.py").stdout)["command"]


def test_names_that_mean_two_devices_or_break_a_list_are_not_typed() -> None:
    found = devices_of([(ANNA, "anna"), (BERT, "anna"), (CARL, "carl, the\x1b[2J")])
    assert [each.typed for each in found] == [ANNA[:8], BERT[:8], CARL[:8]]
    assert "\x1b" not in found[2].name
    assert devices_of([(ANNA, "anna's")])[0].typed == "anna's"


def test_without_others_there_is_a_next_step(mesh: FakeMesh, endpoint: Endpoint) -> None:
    mesh.mbit = {}
    shown = run("plan", "train.py")
    assert shown.exit_code == 1
    assert "error: no other device is linked" in shown.stderr
    assert "try: meshtrain pair" in shown.stderr
    assert "meshtrain whatif" in shown.stderr
    mesh.mbit, mesh.without_torch, mesh.together = {BERT: 1.0}, {BERT}, (ANNA,)
    shown = run("plan", "train.py")
    assert "bert: linked, but without torch" in shown.stderr
    assert not asked(endpoint)


def test_without_a_daemon_there_is_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    shown = run("plan", "train.py", "--data-dir", str(tmp_path / "none"))
    assert shown.exit_code == 1
    assert "try: meshtrain up" in shown.stderr


@pytest.mark.usefixtures("mesh")
def test_a_job_that_runs_here_is_waited_for(endpoint: Endpoint) -> None:
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    shown = run("plan", "train.py")
    assert shown.exit_code == 1
    assert "error: a job runs on this device" in shown.stderr
    assert "try: meshtrain jobs" in shown.stderr
    endpoint.answers[GetStatus] = STATUS
    endpoint.answers[MeasureLinks] = Failure(error="a job runs on anna: links are measured when it has ended")
    assert "error: a job runs on anna" in run("plan", "train.py").stderr


@pytest.mark.usefixtures("mesh")
def test_a_script_that_does_not_step_shows_why_and_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise NotMeasured("train.py ended before its steps were timed:\n  boom", failed=True)

    monkeypatch.setattr(command, "trace", fails)
    shown = run("plan", "train.py")
    assert shown.exit_code == 1
    assert "boom" in shown.stderr
    assert "try: python train.py" in shown.stderr

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "trace", interrupted)
    assert run("plan", "train.py").exit_code == 130

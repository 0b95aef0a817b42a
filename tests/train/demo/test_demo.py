"""`meshtrain demo` as a person starts it: what it promises, and what it leaves behind."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from meshtrain.cli.app import app
from meshtrain.demo.localmesh import lock_name, remove_left_behind
from meshtrain.demo.run import DemoResult, DemoSettings, mean_losses, peer_result
from meshtrain.machine import FolderLock
from meshwire.memory_layout.shared_slots import PORTABLE_VARIABLE
from meshwire.messages.job import Metrics

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_the_demo_keeps_its_promises() -> None:
    """One cell of the matrix: equal replicas, learning, the loss of one process on the same samples, a ring's bytes."""
    matrix = subprocess.run(
        [sys.executable, "-m", "tests.bench.demo_matrix", "--peers", "2", "--codec", "fp16", "--steps", "20", "--json"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert matrix.returncode == 0, matrix.stdout + matrix.stderr
    assert json.loads(matrix.stdout)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Daemons, learners and folders are gone, and the exit code is a shell's for an interruption."""
    command = [sys.executable, "-m", "meshtrain.cli", "demo", "--peers", "2", "--steps", "60"]
    # A shell may have told its background jobs to ignore ctrl-C; the demo must see it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        demo = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)})
    finally:
        signal.signal(signal.SIGINT, before)
    with demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("round "):
                break
        started = psutil.Process(demo.pid).children(recursive=True)
        assert len(started) >= 4, "two daemons and two learners"
        demo.send_signal(signal.SIGINT)
        demo.stderr.read()
        assert demo.wait(30) == 130
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    kept = f"meshtrain-{os.getuid()}"  # where sockets were
    assert not [path for path in tmp_path.glob("meshtrain-*") if path.name != kept or list(path.iterdir())]


def test_a_demo_that_is_killed_leaves_no_daemon_and_the_next_one_clears_its_folder(tmp_path: Path) -> None:
    """Nobody tells the daemons: they see that whoever holds the other end of their standard input is gone."""
    script = (
        "import time; from meshtrain.demo.localmesh import LocalMesh\n"
        "with LocalMesh(('anna',), print) as mesh: print(mesh.folder, flush=True); time.sleep(60)"
    )
    kept = {name: os.environ[name] for name in ("PATH", PORTABLE_VARIABLE) if name in os.environ}
    command, quiet = [sys.executable, "-c", script], {**kept, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as demo:
        assert demo.stdout is not None
        folder = next(Path(line.strip()) for line in demo.stdout if line.startswith(str(tmp_path)))
        daemons = psutil.Process(demo.pid).children()
        assert len(daemons) == 1
        remove_left_behind(tmp_path)
        assert (folder / "anna").is_dir(), "it is in use"
        demo.kill()
    with (folder / lock_name()).open() as held:  # by the demo and its daemon
        assert not psutil.wait_procs(daemons, timeout=10)[1]
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = tmp_path / "meshtrain-other"  # somebody's, without a lock
    other.mkdir()
    remove_left_behind(tmp_path)
    assert not folder.exists()
    assert other.exists()


@pytest.mark.parametrize("holder", ["0", "1"], ids=["posix", "twin"])
def test_a_mesh_in_use_stays_however_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """Who locks in another way would find its lock free: one demo with MESHTRAIN_PORTABLE, another one without."""
    (tmp_path / "meshtrain-used").mkdir()
    monkeypatch.setenv(PORTABLE_VARIABLE, holder)
    lock = FolderLock(tmp_path / "meshtrain-used" / lock_name(), make=True)
    for other in ("0", "1"):
        monkeypatch.setenv(PORTABLE_VARIABLE, other)
        remove_left_behind(tmp_path)
        assert (tmp_path / "meshtrain-used").is_dir()
    lock.release()
    monkeypatch.setenv(PORTABLE_VARIABLE, holder)
    remove_left_behind(tmp_path)
    assert not (tmp_path / "meshtrain-used").exists()


@pytest.mark.parametrize(
    ("sync", "steps", "rounds"),
    [("bsp", 100, 100), ("ssp:2", 7, 7), ("local:8", 100, 13), ("sparseloco:5", 40, 8), ("muloco:30", 1, 1)],
)
def test_steps_are_the_optimizers_whatever_the_period(sync: str, steps: int, rounds: int) -> None:
    """X6: of H steps each round is; the last one is whole."""
    assert DemoSettings(sync=sync, steps=steps).rounds == rounds


def test_the_curve_holds_ranks_that_took_more_steps_than_others() -> None:
    """With s > 0 a rank may be passed over, and takes fewer steps than there are rounds (R4)."""
    assert mean_losses([[4.0, 2.0], [2.0, 4.0]]) == [3.0, 3.0]
    assert mean_losses([[4.0], [2.0, 1.0, 0.5], [0.0, 3.0]]) == [2.0, 2.0, 0.5]
    assert mean_losses([[4.0], []]) == [4.0]


def test_the_age_of_a_peer_is_the_mean_over_its_contributions() -> None:
    """R0: `ages` counts contributions by age."""
    metrics = Metrics(step=8, step_s=0.2, nulls=3, ages=(4, 0, 4))
    made = peer_result("anna", metrics)
    assert (made.name, made.steps, made.step_s, made.nulls, made.age) == ("anna", 8, 0.2, 3, 1.0)
    assert peer_result("anna", Metrics()).age == 0.0


def result() -> DemoResult:
    return DemoResult(
        peers=2,
        rounds=9,
        loss_first=4.0,
        loss_last=3.0,
        unigram_entropy=3.1,
        samples=100,
        seconds=2.0,
        bytes_sent=10**6,
        bytes_dense_fp32=10**6,
        overlap=0.5,
        replicas_equal=True,
        payload_bytes_max=10**6,
        hashes_compared=3,
        parameters=1000,
        counted_by="kernel",
        by_peer=(
            peer_result("anna", Metrics(step=9, step_s=0.02, ages=(6, 2))),
            peer_result("bert", Metrics(step=6, step_s=1.5, nulls=3, ages=(6,))),
        ),
        losses=(4.0, 3.0),
    )


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_the_demo_ends_with_a_line_for_each_peer(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages only where there can be any: with s=0 every one is 0 (R7)."""
    monkeypatch.setattr("meshtrain.demo.run.run_demo", lambda *_: result())
    monkeypatch.setattr("signal.signal", lambda *_: None)
    shown = CliRunner().invoke(app, ["demo", "--sync", sync], catch_exceptions=False)
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    age = [["0.25"], ["0.00"]] if sync == "ssp:2" else [[], []]
    assert ["anna", "9", "20", "ms", "0", *age[0]] in rows
    assert ["bert", "6", "1.5", "s", "3", *age[1]] in rows
    assert ("MEAN AGE" in shown.stdout) == (sync == "ssp:2")


def test_the_demo_refuses_a_mode_that_does_not_exist() -> None:
    shown = CliRunner().invoke(app, ["demo", "--sync", "asp"])
    assert shown.exit_code == 2
    assert "use bsp; demo; ssp:S" in shown.stderr


@pytest.mark.parametrize("asked", [("--sync", "demo"), ("--codec", "dgc")])
def test_the_demo_refuses_what_its_optimizer_cannot_do(asked: tuple[str, str]) -> None:
    """Before daemons are started: `mt.prepare` would refuse AdamW in each of the learners."""
    shown = CliRunner().invoke(app, ["demo", *asked])
    assert shown.exit_code == 2
    assert "is for plain SGD, and the demo trains with AdamW" in shown.stderr.replace("\n", " ")


def test_the_json_of_the_demo_has_the_peers_and_no_curve() -> None:
    plain = json.loads(json.dumps(result().as_json()))
    assert plain["by_peer"][1] == {"name": "bert", "steps": 6, "step_s": 1.5, "nulls": 3, "age": 0.0}
    assert "losses" not in plain

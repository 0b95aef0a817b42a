"""The soak's watch sees what it is there for: each violation is shown to it once, and what is none beside it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.soakgrowth import BOUNDS, HOUR_S, Bound, Growth
from tests.bench.soakhost import FILLER
from tests.bench.soakwatch import DESCRIPTORS_SLACK, MEMORY_SLACK_BYTES, STALL_S, Watch, disk_bytes

LONG_S = 2 * STALL_S


class FakeDaemon:
    """Up, with a learner, for LONG_S."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data_dir = Path("/nowhere")
        self.log_path = Path(os.devnull)
        self.up = True
        self.killed = False
        self.code: int | None = None
        self.started_s = time.monotonic() - LONG_S
        self.learner_age_s = LONG_S
        self.process = SimpleNamespace(pid=os.getpid(), poll=lambda: self.code)

    def learners(self) -> list[Any]:
        return [SimpleNamespace(create_time=lambda: time.time() - self.learner_age_s)]


@dataclass
class Fakes:
    """Two daemons, and what they say of the job; nothing has happened for LONG_S."""

    anna: FakeDaemon = field(default_factory=lambda: FakeDaemon("anna"))
    bert: FakeDaemon = field(default_factory=lambda: FakeDaemon("bert"))
    said: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("anna", "bert"):
            self.said[name] = SimpleNamespace(
                rounds=0,
                replicas_equal=True,
                state="running",
                error=None,
                members=(SimpleNamespace(name="anna"), SimpleNamespace(name="bert")),
                learning=(0, 1),
            )
        self.began_s = time.monotonic() - LONG_S
        mesh: Any = SimpleNamespace(names=("anna", "bert"), daemons={"anna": self.anna, "bert": self.bert})
        mesh.linked = lambda name: {"anna", "bert"} - {name}
        job: Any = SimpleNamespace(summary=lambda daemon: self.said[daemon.name], records=list, batch=8, counts=True)
        self.watch = Watch(mesh, job, self.began_s)

    def violations(self) -> str:
        self.watch.look()
        self.watch.look()  # says nothing twice
        return "\n".join(self.watch.findings.violations)


def test_two_peers_that_could_and_do_not_commit_are_a_violation() -> None:
    fakes = Fakes()
    assert fakes.violations().count("no round for") == 1


@pytest.mark.parametrize(
    "excuse",
    [
        lambda fakes: setattr(fakes.said["bert"], "rounds", 1),
        lambda fakes: setattr(fakes.bert, "up", False),
        lambda fakes: setattr(fakes.bert, "learner_age_s", 1.0),
        lambda fakes: fakes.watch.thawed("bert"),
        lambda fakes: fakes.watch.link_broken("anna", "bert"),
        lambda fakes: (fakes.watch.link_broken("anna", "bert"), fakes.watch.link_healed("anna", "bert")),
    ],
    ids=["a round", "one is down", "a new learner", "just thawed", "a broken link", "a link just healed"],
)
def test_nobody_has_to_commit_who_cannot(excuse: Callable[[Fakes], None]) -> None:
    fakes = Fakes()
    excuse(fakes)
    assert fakes.violations() == ""


def test_rounds_that_go_back_and_on_again_are_progress() -> None:
    """The side of a partition that gave way had more of them."""
    fakes = Fakes()
    fakes.said["anna"].rounds = fakes.said["bert"].rounds = 500
    fakes.watch.look()
    for name in ("anna", "bert"):
        fakes.watch._progress_s[name] = fakes.began_s
        fakes.said[name].rounds = 300
    fakes.watch._rounds = {"anna": 299, "bert": 299}
    assert fakes.violations() == ""
    assert fakes.watch.findings.rounds == 500


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda fakes: setattr(fakes.said["bert"], "replicas_equal", False), "replicas differ"),
        (lambda fakes: setattr(fakes.said["bert"], "state", "failed"), "the job is failed on bert"),
        (lambda fakes: setattr(fakes.bert, "code", -11), "bert has ended by itself, exit code -11"),
        (lambda fakes: fakes.said.update(bert=None), "bert has not answered"),
    ],
    ids=["replicas", "job", "daemon", "silence"],
)
def test_what_is_broken_is_a_violation(change: Callable[[Fakes], None], expected: str) -> None:
    fakes = Fakes()
    fakes.said["anna"].rounds = 1
    change(fakes)
    assert fakes.violations().count(expected) == 1


def test_a_job_that_was_told_to_end_may_succeed_and_the_next_one_counts_on() -> None:
    fakes = Fakes()
    for said in fakes.said.values():
        said.rounds = 40
    fakes.watch.look()
    fakes.watch.job_ends()
    for said in fakes.said.values():
        said.state = "succeeded"
    assert fakes.violations() == ""
    fakes.watch.job_begins(fakes.watch._job)
    for said in fakes.said.values():
        said.rounds, said.state = 2, "running"
    fakes.watch.look()
    assert fakes.watch.findings.rounds == 42
    assert fakes.watch.findings.jobs == 1
    fakes.said["anna"].state = "succeeded"
    assert fakes.violations().count("the job is succeeded on anna") == 1


def test_what_grows_on_the_disk_and_in_the_log_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice what is allowed, over an hour; what fills a disk on purpose does not count."""
    fakes = Fakes()
    for daemon in (fakes.anna, fakes.bert):
        daemon.data_dir = tmp_path / daemon.name
        daemon.data_dir.mkdir()
        daemon.log_path = tmp_path / f"{daemon.name}.log"
        daemon.log_path.touch()
    (fakes.bert.data_dir / FILLER).write_bytes(bytes(1 << 20))
    assert disk_bytes(fakes.bert.data_dir) == 0
    disk, log = (Bound(step=1 << 20, per_hour=1 << 20, warm_up_s=0.0, least_s=60.0, unit="bytes") for _ in range(2))
    fakes.watch.growth = Growth({**BOUNDS, "disk": disk, "log": log})
    now_s, hoard = [0.0], fakes.anna.data_dir / "hoard"
    monkeypatch.setattr(time, "monotonic", lambda: fakes.began_s + now_s[0])
    for number in range(41):
        now_s[0] = number * HOUR_S / 40
        grown = 1 + 2 * (2 << 20) * number // 40
        with hoard.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, grown)
        os.truncate(fakes.anna.log_path, grown)
        fakes.watch.note_growth()
    named = [text.split("growth: ")[1].split(" grew")[0] for text in fakes.watch.findings.violations]
    assert sorted(named) == ["anna: disk", "anna: log"]
    assert fakes.watch.findings.growth["log"].startswith("anna: log grew by ")


def test_a_killed_daemon_may_have_ended() -> None:
    fakes = Fakes()
    fakes.bert.killed, fakes.bert.up, fakes.bert.code = True, False, -9
    fakes.said["bert"] = None
    assert fakes.violations() == ""


def test_descriptors_that_grow_from_calm_to_calm_are_a_leak() -> None:
    fakes = Fakes()
    fakes.watch.check_calm()
    assert not fakes.watch.findings.violations
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(DESCRIPTORS_SLACK + 1)]
    try:
        fakes.watch.check_calm()
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert any("leaks file descriptors" in text for text in fakes.watch.findings.violations)


def test_memory_that_grows_from_calm_to_calm_is_a_leak_where_the_learner_computes() -> None:
    fakes = Fakes()
    fakes.said["bert"].learning = (0,)  # bert's learner loads, and its daemon keeps rounds for it
    fakes.watch.check_calm()
    fakes.watch._memory[os.getpid()] = -MEMORY_SLACK_BYTES
    fakes.watch.check_calm()
    assert [text.split("leaks")[0].split()[-1] for text in fakes.watch.findings.violations] == ["anna"]

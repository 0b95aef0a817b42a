"""Real daemons and learners are killed, frozen and cut off: the others go on, and who was lost returns (G, V2, J, X).

Every job counts its samples in the model itself (`chaosjob`): what its base says at the end is what its history holds.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwire.messages.job import JobSummary, Metrics
from tests.bench.chaosjob import ChaosJob, Record, repeated
from tests.bench.recovery import heal, partition
from tests.bench.recoverylog import Entered, read_story
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosMesh
from tests.lab.chaosproxy import ChaosProxy, Cut

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAMES = ("anna", "bert", "cleo")  # anna submits
POLL_S = 0.1
BEFORE_ROUNDS = 20  # until something breaks: more than one epoch
MORE_ROUNDS = 10  # that show that a job goes on


class Broken:
    """A job on a mesh, and what is waited for while things break. No wait of it lasts for ever."""

    def __init__(self, mesh: ChaosMesh, folder: Path, **options: Any) -> None:
        self.mesh = mesh
        self.job = ChaosJob(mesh, folder, samples=192, trace=True, **{"hash_every": 2, **options})
        self._before: dict[str, int] = {}  # generations that a daemon had entered until all were at work

    def summary(self, name: str) -> JobSummary | None:
        """What one daemon says of the job."""
        return self.job.summary(self.mesh.daemons[name])

    def until(self, condition: Callable[[], object], what: str) -> None:
        """The job must not fail meanwhile."""
        deadline_s = time.monotonic() + jobs.TIMEOUT_S
        while not condition():
            for name in NAMES:
                seen = self.summary(name)
                assert seen is None or seen.state != "failed", f"the job failed on {name} before {what}: {seen.error}"
            assert time.monotonic() < deadline_s, f"waited {jobs.TIMEOUT_S} s for {what}"
            time.sleep(POLL_S)

    def rounds(self, name: str) -> int:
        """How far a daemon is."""
        seen = self.summary(name)
        return seen.rounds if seen is not None else 0

    def begin(self) -> None:
        """Waits until all are at work."""
        self.until(lambda: all(self.rounds(name) >= BEFORE_ROUNDS for name in NAMES), f"round {BEFORE_ROUNDS}")
        self._before = {name: len(self.entered(name)) for name in NAMES}

    def go_on(self, names: Sequence[str] = NAMES, rounds: int = MORE_ROUNDS) -> None:
        """Waits until these have had more rounds."""
        before = {name: self.rounds(name) for name in names}
        self.until(lambda: all(self.rounds(name) >= before[name] + rounds for name in names), f"rounds on {names}")

    def records(self, name: str) -> list[Record]:
        """What a rank has seen."""
        return [record for record in self.job.records() if record.rank == self.job.names.index(name)]

    def returns(self, name: str, since_s: float) -> None:
        """Waits until the learner of a peer that was lost trains again, and all go on.

        The process that was lost may still train for a moment, before its daemon hears that the others went on.
        """

        def again() -> bool:
            before = {record.pid for record in self.records(name) if record.t_s <= since_s}
            return any(record.pid not in before for record in self.records(name))

        self.until(again, f"the return of {name}")
        self.go_on()

    def leave_out(self, name: str, others: Sequence[str]) -> None:
        """Waits until the others go on without a peer."""
        known = len(self.entered(others[0]))
        left_out = lambda: any(name not in one.computing for one in self.entered(others[0])[known:])  # noqa: E731
        self.until(left_out, f"{name} to be left out")
        self.go_on(others)

    def lose_learner(self, name: str) -> None:
        """Kills a learner, and waits until its next process trains."""
        since_s = time.monotonic()
        assert self.mesh.daemons[name].kill_learner()
        self.returns(name, since_s)

    def lose_daemon(self, name: str, others: Sequence[str]) -> None:
        """Kills a daemon, starts it again once the others go on without it, and waits until its learner trains."""
        since_s = time.monotonic()
        self.mesh.daemons[name].kill()
        self.leave_out(name, others)
        self.mesh.daemons[name].start()
        self.mesh.daemons[name].wait()
        self.returns(name, since_s)

    def entered(self, name: str) -> tuple[Entered, ...]:
        """The generations that a daemon has entered since the first, or since all were at work."""
        log_path = self.mesh.daemons[name].log_path
        return read_story(name, log_path, self.job.folder(name), self.job.id).entered[self._before.get(name, 0) :]

    def finish(self, names: Sequence[str] = NAMES) -> dict[str, Metrics]:
        """Lets the job end, on these, as if nothing had happened: equal replicas, every sample once in each epoch.

        Of void rounds alone samples are missing (X5). Returns what the daemons have told of these ranks.
        """
        self.job.finish()
        self.until(lambda: all(self._ended(name) for name in names), f"the end on {names}")
        metrics = {}
        for name in names:
            seen = self.summary(name)
            assert seen is not None
            assert seen.state == "succeeded", seen.error
            assert seen.replicas_equal is True
            assert seen.hashes_compared
            metrics[name] = seen.ranks[self.job.names.index(name)].metrics
        assert repeated(self.job.records()) == []
        last = {name: self.records(name)[-1] for name in names}
        assert len({record.digest for record in last.values()}) == 1, "the replicas are bit-equal"
        void_rounds = max(of.void_rounds for of in metrics.values())
        for record in last.values():
            assert record.epoch == last[names[0]].epoch
            assert record.most <= record.epoch
            assert record.missing <= void_rounds * self.job.batch * len(NAMES)
            assert math.isfinite(record.loss)
        return metrics

    def _ended(self, name: str) -> bool:
        seen = self.summary(name)
        return seen is not None and seen.ended_at_s is not None


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[ChaosMesh]:
    """Three daemons behind the proxy, with the patience that a test asks for; every job ends with all its processes."""
    with ChaosMesh(len(NAMES), patience_s=getattr(request, "param", None)) as started:
        yield started
        for daemon in started.daemons.values():
            deadline_s = time.monotonic() + jobs.TIMEOUT_S
            while left := daemon.learners():
                assert time.monotonic() < deadline_s, f"{daemon.name} still runs {left}"
                time.sleep(POLL_S)


def patience(patience_s: float) -> pytest.MarkDecorator:
    """That of all daemons of a test's mesh."""
    return pytest.mark.parametrize("mesh", [patience_s], indirect=True, ids=[f"{patience_s:g} s"])


def tear(proxy: ChaosProxy) -> None:
    """A link breaks and can be had again at once."""
    proxy.cut("bert", "cleo", Cut.RST)
    proxy.heal("bert", "cleo")


@pytest.mark.parametrize(
    ("lost", "options"),
    [
        ("bert", {"sync": "ssp:2", "visibility": "fixed", "topology": "grid:2x2"}),
        ("anna", {"sync": "ssp:2", "straggler": "wait", "codec": "bf16", "barriers": True, "topology": "tree"}),
        *(
            pytest.param(lost, {"sync": sync, "codec": codec, "topology": topology}, marks=tier)
            for lost, sync, codec, topology, tier in (
                ("bert", "ssp:2", "fp32", "star:1", pytest.mark.long),
                ("anna", "ssp:2", "bf16", "star", pytest.mark.long),
                ("cleo", "bsp", "fp16", "hierarchical:1", pytest.mark.long),
                ("bert", "ssp:2", "fp32", "gather", pytest.mark.long),
                ("anna", "bsp", "bf16", "sharded:0,0,2", pytest.mark.long),
            )
        ),
    ],
    ids=[
        "a member, fixed, a grid",
        "the submitter, wait, bf16, barriers, the root of a tree",
        "the hub",
        "the hub, the submitter",
        "a member, groups",
        "a member, all to all",
        "the largest owner",
    ],
)
def test_the_others_finish_without_one_that_was_killed(
    mesh: ChaosMesh, tmp_path: Path, lost: str, options: dict[str, Any]
) -> None:
    """G2, G4, G6, C2: rounds that the killed daemon has left half done are done again without it, whoever sent to whom,
    and its samples come back."""
    job = Broken(mesh, tmp_path, **options)
    others = [name for name in NAMES if name != lost]
    job.begin()
    mesh.daemons[lost].kill()
    job.leave_out(lost, others)
    metrics = job.finish(others)
    assert max(of.void_rounds for of in metrics.values()) == 0
    for name in others:
        assert all(generation.computing == set(others) for generation in job.entered(name))
        assert job.entered(name)


@pytest.mark.long
@patience(30.0)  # for a link to come back within a part of it, however busy this machine is
def test_a_torn_link_and_a_killed_learner_cost_nobody_its_place(mesh: ChaosMesh, tmp_path: Path) -> None:
    """bsp. A link that breaks and comes back: the same members in a new generation, with all they held (G6, G7).

    A learner that is killed voids at most the round that it was bound to (V2), and another one loads the base (J1).
    """
    job = Broken(mesh, tmp_path)
    job.begin()
    mesh.proxy(tear)
    job.until(lambda: all(job.entered(name) for name in NAMES), "a new generation")
    for name in NAMES:
        assert all(generation.computing == set(NAMES) for generation in job.entered(name))
    job.go_on()
    killed_s = time.monotonic()
    assert mesh.daemons["cleo"].kill_learner()
    job.returns("cleo", killed_s)
    metrics = job.finish()
    assert max(of.void_rounds for of in metrics.values()) <= 1
    for name in NAMES:
        *_, last = job.entered(name)
        assert last.computing == set(NAMES)


def test_a_learner_and_a_daemon_return_under_a_bound(mesh: ChaosMesh, tmp_path: Path) -> None:
    """ssp:2. A daemon that is started again returns to its job by itself; the submitter is nothing special."""
    job = Broken(mesh, tmp_path, sync="ssp:2")
    job.begin()
    killed_s = time.monotonic()
    assert mesh.daemons["anna"].kill_learner()
    mesh.daemons["cleo"].kill()
    job.leave_out("cleo", ("bert", "anna"))
    mesh.daemons["cleo"].start()
    mesh.daemons["cleo"].wait()
    for name in ("anna", "cleo"):
        job.returns(name, killed_s)
    job.finish()


@pytest.mark.long
def test_who_returns_runs_through_barriers_and_the_others_go_on(mesh: ChaosMesh, tmp_path: Path) -> None:
    """bsp,accumulate=3: an epoch has three rounds, so most often it ends while who has returned has nothing of it, and
    runs through all that are over."""
    job = Broken(mesh, tmp_path, sync="bsp,accumulate=3", barriers=True)
    job.begin()
    job.lose_learner("cleo")
    job.lose_daemon("bert", ("anna", "cleo"))
    job.finish()


@pytest.mark.long
def test_who_was_lost_returns_to_an_average_of_models(mesh: ChaosMesh, tmp_path: Path) -> None:
    """sma:2 (O8, J1): own weights are lost with a learner, and with a daemon; the next process begins on the base."""
    job = Broken(mesh, tmp_path, sync="sma:2", counts=False)
    job.begin()
    job.lose_learner("bert")
    job.lose_daemon("cleo", ("anna", "bert"))
    job.job.finish()
    for name in NAMES:
        summary = jobs.ended(mesh.daemons[name], job.job.id)
        assert (summary.state, summary.replicas_equal) == ("succeeded", True), summary.error
        assert summary.hashes_compared
    last = [job.records(name)[-1] for name in NAMES]
    assert len({record.digest for record in last}) == 1, "the bases are bit-equal"
    assert all(math.isfinite(record.loss) for record in last)


@pytest.mark.long
@patience(2.0)
def test_who_was_silent_is_left_out_and_returns(mesh: ChaosMesh, tmp_path: Path) -> None:
    """A laptop whose lid was closed for longer than the patience, and one that nobody could hear: 2|1, healed."""
    job = Broken(mesh, tmp_path, sync="ssp:2")
    job.begin()
    frozen = mesh.daemons["bert"]
    frozen.freeze()
    job.leave_out("bert", ("anna", "cleo"))
    thawed_s = time.monotonic()
    frozen.thaw()
    job.returns("bert", thawed_s)

    here, there = ("anna", "bert"), ("cleo",)
    mesh.proxy(lambda proxy: partition(proxy, here, there))
    job.leave_out("cleo", here)
    healed_s = time.monotonic()
    mesh.proxy(lambda proxy: heal(proxy, here, there))
    job.returns("cleo", healed_s)
    job.finish()


def kill_all_learners(job: Broken) -> None:
    """At once; waits until all train again."""
    killed_s = time.monotonic()
    for name in NAMES:
        assert job.mesh.daemons[name].kill_learner()
    for name in NAMES:
        job.returns(name, killed_s)


@pytest.mark.long
def test_learners_are_killed_all_at_once_and_the_last_while_the_others_load(mesh: ChaosMesh, tmp_path: Path) -> None:
    """J3: each finds its base in memory; or if a round was on its way into that, loads it from one that does."""
    job = Broken(mesh, tmp_path, sync="ssp:2")
    job.begin()
    kill_all_learners(job)
    known = len(job.entered("anna"))
    killed_s = time.monotonic()
    for name in ("bert", "cleo"):
        assert mesh.daemons[name].kill_learner()
    job.until(lambda: any(one.computing == {"anna"} for one in job.entered("anna")[known:]), "anna to be left alone")
    assert mesh.daemons["anna"].kill_learner()
    for name in NAMES:
        job.returns(name, killed_s)
    job.finish()
    assert all((seen := job.summary(name)) and not seen.given_up for name in NAMES)


def test_all_go_back_to_a_checkpoint_when_nobody_has_the_base_in_memory(mesh: ChaosMesh, tmp_path: Path) -> None:
    """J3: as learners on GPUs, which keep nothing there. Samples of the rounds since count once, all of them."""
    forgets = "os.environ.pop('MESHTRAIN_KEPT_FD', None)"
    job = Broken(mesh, tmp_path, broken_start=forgets, checkpoint_every="25r")
    job.until(lambda: "checkpoint after round 25" in mesh.daemons["anna"].log_path.read_text(), "a checkpoint")
    job.go_on(rounds=3)
    kill_all_learners(job)
    job.finish()
    for name in NAMES:
        seen = job.summary(name)
        assert seen is not None
        (lost,) = seen.given_up
        assert lost.made_by == lost.kept == (0, 1, 2)
        assert lost.first == 26
        assert 0 < lost.samples <= (lost.last - lost.first + 1) * job.job.batch * len(NAMES)


def test_a_script_that_fails_again_and_again_on_one_peer(mesh: ChaosMesh, tmp_path: Path) -> None:
    """J3: started again after its step, and after its start, at which it fails the same way again; then it forwards
    what the others send, who succeed."""
    fails = tmp_path / "fails"
    wrong = 'raise RuntimeError("this script is wrong")'
    job = Broken(
        mesh,
        tmp_path,
        broken_start=f"if os.path.exists({str(fails)!r}): {wrong}",
        broken_step=f"if mt.rank() == 1 and epoch >= 1: open({str(fails)!r}, 'w').close(); {wrong}",
    )
    forwards = "it is not started again: this peer forwards what the others send"
    job.until(lambda: forwards in mesh.daemons["bert"].log_path.read_text(), "bert to give up")
    assert mesh.daemons["bert"].log_path.read_text().count("it is started again") == 2
    job.go_on()
    job.finish(("anna", "cleo"))
    job.until(lambda: (seen := job.summary("bert")) and seen.state == "succeeded", "the end on bert")


@pytest.mark.long
def test_who_is_lost_before_round_1_returns_to_it(mesh: ChaosMesh, tmp_path: Path) -> None:
    """G9: a learner, which is started again and waited for, and the submitter, which was to give the start: those that
    are left begin, and it loads what they have."""
    go = tmp_path / "go"
    job = Broken(mesh, tmp_path, broken_start=f"while not os.path.exists({str(go)!r}): time.sleep(0.01)")
    job.until(lambda: all(mesh.daemons[name].learners() for name in NAMES), "all scripts to be started")
    assert mesh.daemons["bert"].kill_learner()

    def together(others: set[str]) -> bool:
        return any(one.loading == others and not one.computing for one in job.entered("cleo"))

    job.until(lambda: together({"anna", "bert", "cleo"}), "all to hear that bert's learner was lost")
    mesh.daemons["anna"].kill()
    job.until(lambda: together({"bert", "cleo"}), "anna to be left out")
    mesh.daemons["anna"].start()
    mesh.daemons["anna"].wait()
    went_s = time.monotonic()
    go.touch()
    job.returns("anna", went_s)
    job.finish()


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"broken_start": 'raise RuntimeError("this script is wrong")'}, marks=pytest.mark.long),
        {"broken_step": 'if epoch >= 1: raise RuntimeError("this script is wrong")'},
    ],
    ids=["before round 1", "later"],
)
def test_a_script_that_fails_on_all_peers_ends_the_job(mesh: ChaosMesh, tmp_path: Path, broken: dict[str, str]) -> None:
    """J3: with its first traceback, when no learner is started again: each has failed twice at the same round."""
    job = Broken(mesh, tmp_path, **broken)
    for name in NAMES:
        deadline_s = time.monotonic() + jobs.TIMEOUT_S
        while (seen := job.summary(name)) is None or seen.ended_at_s is None:
            assert time.monotonic() < deadline_s, f"{name} goes on"
            time.sleep(POLL_S)
        assert seen.state == "failed"
        assert "RuntimeError: this script is wrong" in (seen.error or "")

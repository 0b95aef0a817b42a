"""All scripts are killed before the first round is complete: the job begins once more (G9, J3).

Real registries, sessions, memberships, agreements, rounds and executors of two laptops in one process. Processes and
links are doubles: a script is a coroutine that says what a learner says, and a link is a queue.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from meshtraind.job_start.beginning import JobBeginning
from meshtraind.jobs.routing import JobRouter
from meshtraind.learner import supervisor as learnerlife
from meshtraind.learner.script_error import ScriptError
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.session.session import JobSession
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_record import Job
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, new_job_id
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.generation import Enter
from meshwire.messages.job import BlobRef, Generation, JobSpec, Member, ResumePoint
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBucket,
    LearnerModel,
    LearnerReady,
    LearnerSaved,
    LearnerSealed,
    LearnerState,
    LearnerStepped,
    RoundDone,
    SampleSpace,
    Save,
    Start,
)
from meshwire.messages.link import Software
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.rounds.chain import START
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.linkusers import DialsNobody
from tests.daemon.waiting import until
from tests.unpacedlink import UnpacedLink

pytestmark = pytest.mark.timeout(120)

JOB = new_job_id(bytes(8))
MEMBERS = tuple(Member(device=f"{of:064x}", incarnation=1, name=name) for of, name in enumerate(("anna", "bert")))
MODEL = ModelManifest(
    tensors=(TensorSpec(name="weight", shape=(120, 10), dtype="float32", kind="parameter"),), optimizer="SGD"
)
SAMPLES = SampleSpace(total=40, batch=2, whole_batches=False, drop_last=False)
KILLED, FAILED = -9, 1
ROUNDS = 3


SOFTWARE = Software(meshtrain="0", python="3", torch=None, system="any")


class Script:
    """A learner's process. It goes on as far as it is let, and then waits to be killed.

    Attributes:
        said: what it has got through: "model", "state", "ready", "round N".
    """

    newest: ClassVar[dict[str, "Script"]] = {}  # by the laptop
    started: ClassVar[list[str]] = []
    may_go: ClassVar[Callable[["Script", str], bool]] = lambda _script, _to: True
    fails: ClassVar[dict[str, ScriptError]] = {}

    def __init__(self, folder: Path, *_args: object) -> None:
        self.laptop = folder.parents[2].name
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.said: list[str] = []
        self.told: list[Wire] = []

    async def start(self, _environment: object, _niceness: int, _said: str) -> None:
        Script.newest[self.laptop] = self
        Script.started.append(self.laptop)
        if self.laptop in Script.fails:
            self.code.set_result(FAILED)

    @property
    def running(self) -> bool:
        return not self.code.done()

    async def wait(self) -> int:
        return await self.code

    def error(self) -> ScriptError | None:
        return Script.fails.get(self.laptop)

    async def stop(self, *, now: bool) -> None:
        self.kill()

    def kill(self) -> None:
        if not self.code.done():
            self.code.set_result(KILLED)

    async def run(self, session: JobSession) -> None:
        """What it says, alone, from its call on, until it is ended."""
        connection = SimpleNamespace(notify=partial(self._hear, session), writable=True, close=lambda _reason: None)
        session.attach(cast(Any, connection))
        plan = plan_buckets(MODEL, session.job.spec.bucket_bytes, parse_codec("fp32"))
        layout = MemoryLayout.for_bound(plan.total_values, 0)
        memory = session.maker.memory
        os.ftruncate(memory.descriptor, layout.total_bytes)
        model = LearnerModel(manifest=MODEL, memory_bytes=layout.total_bytes, samples=SAMPLES)
        for what, body in (("model", model), ("state", LearnerState(units=(bytes(32),))), ("ready", LearnerReady())):
            await self._allowed(what)
            await session.learner.request(body, lambda _event: None)
            self.said.append(what)
        for step in range(1, ROUNDS + 1):
            await self._allowed(f"round {step}")
            await until(lambda: any(isinstance(b, Start) or (isinstance(b, RoundDone) and b.start) for b in self.told))
            self.told.clear()
            np.frombuffer(memory.raw(step), np.float32)[:] = step
            for bucket in plan.buckets:
                session.learner.notice(LearnerBucket(step=step, bucket=bucket.index, weight=1.0))
            session.learner.notice(LearnerSealed(step=step, used=b"\x01", integers=()))
            await until(lambda: any(isinstance(body, RoundDone) for body in self.told))
            session.learner.notice(LearnerApplied(round=step))
            session.learner.notice(LearnerStepped(step=step, samples=1, step_s=0.1, exposed_s=0.0))
            self.said.append(f"round {step}")

    def _hear(self, session: JobSession, body: Wire) -> None:
        """J1: whoever asks for its state has the same."""
        if isinstance(body, Save):
            asyncio.get_running_loop().call_soon(
                session.learner.notice, LearnerSaved(number=body.number, round=0, units=1, left_out=(0,))
            )
        else:
            self.told.append(body)

    async def _allowed(self, to: str) -> None:
        await until(lambda: Script.may_go(self, to))


class Line(UnpacedLink):
    """One direction of a link: what its sender says reaches the receiver's router at the loop's next turn."""

    chunk_payload_bytes_sent = chunk_bytes_received = 0
    writable, closing = True, False

    def __init__(self, sender: "Laptop", receiver: "Laptop") -> None:
        self.sender, self.receiver, self.name = sender, receiver, receiver.member.name
        self._queue: deque[tuple[Header, Any]] = deque()

    def notify(self, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        self._put(Header(Kind.CONTROL, 1, job=job, generation=generation, complete=complete), body)

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        self._put(header, None if payload is None else bytes(payload))

    def _put(self, header: Header, content: Any) -> None:
        self._queue.append((header, content))
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        header, content = self._queue.popleft()
        router, device = self.receiver.router, self.sender.member.device
        if header.kind is not Kind.CHUNK:
            assert router.notice(device, header, content) is None
            return
        place = router.chunk_announced(device, header)
        assert not isinstance(place, str), place
        if place is not None:
            place[:] = content or b""
            router.chunk_received(device, header)

    async def request(self, body: Any, **_settings: object) -> Wire:
        """What a member that catches up asks."""
        return await self.receiver.router.answer_member(self.sender.member.device, body)

    def on_writable(self, _callback: object) -> Callable[[], None]:
        return lambda: None

    def refuse(self, text: str) -> None:
        raise AssertionError(text)

    def socket_bytes_sent(self) -> tuple[int, str]:
        return 0, "link"


class Laptop:
    """A device: a real router with one job, whose scripts run as far as they are let."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.member = MEMBERS[rank]
        folder = folder / self.member.name
        history = cast(Any, SimpleNamespace(put=lambda _record: None))
        self.links: dict[str, Any] = {}
        node = SimpleNamespace(
            device=self.member.device, incarnation=1, name=self.member.name, member=self.member, links=self.links,
            history=history, patience_s=2.0, blobs=BlobStore(folder / "blobs"), data_dir=folder,
            settings=LiveSettings(folder),
            job_folder=lambda job: folder / "jobs" / job,
            entrance=SimpleNamespace(address="", learners=LearnerTokens()),
            software=SOFTWARE,
        )  # fmt: skip
        spec = JobSpec(
            job=JOB, name="x", submitter=MEMBERS[0].device, created_at_s=time.time(), script="x", args=(), env=(),
            files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp", shares="equal"),
            codec="fp32", on_nan="stop", seed=0, bucket_bytes=1024, hash_every=0, trace=False,
        )  # fmt: skip
        jobs = folder / "jobs" / JOB
        jobs.mkdir(parents=True)
        self.router = JobRouter(cast(Any, node), DialsNobody())
        self.job = Job(spec, MEMBERS, rank, jobs, history)
        self.router.registry.add(self.job)
        self.job.advance(JobEvent.FILES_COMPLETE)

    @property
    def session(self) -> JobSession:
        session = self.router.registry.session(JOB)
        assert session is not None
        return session

    @property
    def script(self) -> Script:
        """The newest process."""
        return Script.newest[self.member.name]

    @property
    def rounds(self) -> int:
        return self.session.rounds.complete if self.session.rounds is not None else 0


def _end(run: "asyncio.Task[None]", _code: object) -> None:
    """The process has ended: its script says no more."""
    run.cancel()


class Household:
    """Two laptops, and their scripts."""

    def __init__(self, folder: Path) -> None:
        self.laptops = [Laptop(folder, rank) for rank in range(2)]
        one, other = self.laptops
        for own, peer in ((one, other), (other, one)):
            own.links[peer.member.device] = SimpleNamespace(
                connection=Line(own, peer),
                hello=SimpleNamespace(incarnation=1, name=peer.member.name, software=SOFTWARE),
                same_machine=True,
                computes_here=True,
                device=peer.member.device,
                rtt_s=0.001,
            )
        self._runs: dict[Script, asyncio.Task[None]] = {}
        self.tasks = TaskSet("household", told_elsewhere)

    def begin(self) -> None:
        generation = Generation.first(JOB, MEMBERS[0].device, MEMBERS)
        for rank, own in enumerate(self.laptops):
            peer = self.laptops[1 - rank].member.device
            own.router.registry.start(own.job, generation, {1 - rank: own.links[peer].connection})

    async def drive(self) -> None:
        """Every process that is started says what it has to say."""
        while True:
            for own in self.laptops:
                process = Script.newest.get(own.member.name)
                if process is not None and process not in self._runs and not process.code.done():
                    run = self._runs[process] = self.tasks.spawn(process.run(own.session), "script")
                    process.code.add_done_callback(partial(_end, run))  # nobody hears more of it
            await asyncio.sleep(0.002)

    def have_said(self, anna: str, bert: str) -> bool:
        """Both scripts run, and each has got through exactly this."""
        said = [" ".join(own.script.said) for own in self.laptops] if len(Script.newest) == 2 else []
        return said == [anna, bert]

    def kill_all(self) -> None:
        """Scripts, and nothing else."""
        for own in self.laptops:
            own.script.kill()

    async def close(self) -> None:
        await self.tasks.close()
        for own in self.laptops:
            if (session := own.router.registry.session(JOB)) is not None:
                await session.close()
            await own.router.registry._tasks.close()


@asynccontextmanager
async def household(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[Household]:
    monkeypatch.setattr(learnerlife, "LearnerProcess", Script)
    monkeypatch.setattr(learnerlife, "learner_environment", lambda *_args, **_options: {})
    monkeypatch.setattr(Script, "newest", {})
    monkeypatch.setattr(Script, "started", [])
    monkeypatch.setattr(Script, "fails", {})
    made = Household(folder)
    made.begin()
    made.tasks.spawn(made.drive(), "scripts")
    try:
        yield made
    finally:
        await made.close()


def allowed(monkeypatch: pytest.MonkeyPatch, upto: str) -> None:
    """Scripts say no more than what comes before `upto`, which anna's has still to say and bert's has not to reach."""
    order = ["model", "state", "ready", *(f"round {number}" for number in range(1, ROUNDS + 1)), "end"]
    monkeypatch.setattr(Script, "may_go", staticmethod(lambda _script, to: order.index(to) < order.index(upto)))


async def goes_on(monkeypatch: pytest.MonkeyPatch, home: Household) -> None:
    """Both scripts prepare once more, and train together."""
    allowed(monkeypatch, "end")
    await until(lambda: all(f"round {ROUNDS}" in own.script.said for own in home.laptops), "all rounds")
    assert [own.rounds for own in home.laptops] == [ROUNDS, ROUNDS]
    generations = [own.job.generation for own in home.laptops]
    assert generations[0] is not None
    assert generations[0] == generations[1]
    assert generations[0].learning == generations[0].ranks == (0, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("upto", ["model", "state", "ready", "round 1"])
async def test_a_job_begins_once_more_whose_scripts_are_all_killed_before_round_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, upto: str
) -> None:
    """G9, J3: when they have just been started, and when round 1 is under way and no memory holds the base."""
    allowed(monkeypatch, upto)
    async with household(monkeypatch, tmp_path) as home:
        all_said = "model state ready"
        said = {"model": ("", ""), "state": ("model", "model"), "ready": ("model state", "model")}
        await until(lambda: home.have_said(*said.get(upto, (all_said, all_said))))
        home.kill_all()
        await goes_on(monkeypatch, home)


@pytest.mark.asyncio
async def test_and_once_more_after_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """J3: killed on and on, as where there is too little memory, at the pace of all restarts."""
    waited: list[int] = []

    def at_once(kills: int) -> float:
        waited.append(kills)
        return 0.0

    monkeypatch.setattr(learnerlife, "pause_s", at_once)
    allowed(monkeypatch, "ready")
    async with household(monkeypatch, tmp_path) as home:
        for time_ in range(3):
            await until(lambda: len(Script.started) == 2 * time_ + 2)  # noqa: B023
            await until(lambda: home.have_said("model state", "model"))
            home.kill_all()
        await goes_on(monkeypatch, home)
        assert sorted(waited) == [1, 1, 2, 2, 3, 3]


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [0, 1])
async def test_one_that_is_killed_alone_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: int
) -> None:
    """G9, J3: it is started again at once, be it the giver's; the other one prepares no second time."""
    allowed(monkeypatch, "ready")
    async with household(monkeypatch, tmp_path) as home:
        await until(lambda: home.have_said("model state", "model"))
        home.laptops[lost].script.kill()
        await until(lambda: len(Script.started) == 3)
        await goes_on(monkeypatch, home)
        assert Script.started.count(home.laptops[1 - lost].member.name) == 1


@pytest.mark.asyncio
async def test_scripts_that_fail_by_themselves_end_the_job_with_their_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """J3: each has failed twice by the same error."""
    allowed(monkeypatch, "end")
    monkeypatch.setattr(learnerlife, "SAME_ERROR_WAIT_S", 0.0)
    error = ScriptError("ValueError", "ValueError: it is wrong", "train.py, line 6", "x = y", hopeless=False)
    async with household(monkeypatch, tmp_path) as home:
        Script.fails.update(anna=error, bert=error)
        await until(lambda: all(own.job.ended for own in home.laptops), "the end of the job")
        for own in home.laptops:
            assert "ValueError: it is wrong" in (own.job.error or "")
        assert max(Script.started.count(name) for name in ("anna", "bert")) == 2


def test_nobody_goes_back_to_a_beginning_that_is_gone(tmp_path: Path) -> None:
    """J3: rounds would be given up, or the files of a checkpoint are no more."""
    point = ResumePoint(job=JOB, round=7, files=BlobRef(sha256=b"f" * 32, size_bytes=1))

    def beginning(resume: ResumePoint | None, *, begins: bool = True) -> JobBeginning:
        job = SimpleNamespace(spec=SimpleNamespace(resume=resume), begins=begins, folder=tmp_path)
        return JobBeginning(cast(Any, job))

    new, later, resumed = beginning(None), beginning(None, begins=False), beginning(point)
    assert new.way_back(0) == later.way_back(0) == (0, START)
    assert new.way_back(1) is None
    assert not new.is_passed(1)
    assert beginning(point, begins=False).way_back(7) is None, "it was taken in, and has not fetched the files"
    assert resumed.way_back(7) == (7, b"f" * 16)
    assert resumed.is_cut_of(cast(Enter, SimpleNamespace(cut=7, chain=b"f" * 16)))
    assert not resumed.is_cut_of(cast(Enter, SimpleNamespace(cut=7, chain=START)))
    assert (resumed.is_passed(8), resumed.is_passed(9)) == (True, False)
    assert resumed.way_back(7) is None

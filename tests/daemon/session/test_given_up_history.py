"""A history that is given up after a partition: its base stays as a checkpoint, and nobody waits for that (G4).

From the learner, which is brought to its boundary, to the file on the disk and the name that people are told.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshtraind import cli
from meshtraind.jobs.routing import JobRouter
from meshtraind.learner import supervisor as learnerlife
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.recovery import checkpointer as checkpointing
from meshtraind.recovery import given_up_history as parting
from meshtraind.recovery.given_up_history import TOO_LATE
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import membership_host as passage
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.session import JobSession
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointStore
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire import limits
from meshwire.checkpoints.manifest import CheckpointName, unit_file
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, job_number, new_job_id
from meshwire.membership import lineage
from meshwire.membership.effects import EnterGeneration, Fence, HistoryLeft, Send
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.generation import AskIn, Where, Wish
from meshwire.messages.job import BlobRef, Generation, GivenUp, JobSpec, Member
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
    Save,
    Start,
    StepLost,
)
from meshwire.messages.link import Software
from meshwire.model.plan import plan_buckets
from meshwire.rounds.learner_state import Phase
from meshwire.sync_modes.mode import sync_settings
from tests.computing import computing
from tests.daemon.api.test_app import config
from tests.daemon.job_start.test_checkpointing import Desk as Checkpoints
from tests.daemon.linkusers import DialsNobody
from tests.daemon.session.test_generation_edges import catch_up, generations, where
from tests.daemon.session.test_learner_notices import PLAN, Desk, kinds, stepped, turns
from tests.daemon.session.test_session_edges import MODEL, Script
from tests.daemon.waiting import until

LOST = GivenUp(first=101, last=1100, samples=32000, made_by=(0,), kept=(1,))
NAME = CheckpointName(1100, "ab12cd34")


# The learner comes to a boundary, and applies what is complete


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["waits for its round", "computes", "in the middle of its buckets"])
async def test_a_step_that_waits_for_a_round_that_will_never_be_is_ended(when: str) -> None:
    """With s=0 a learner is at no boundary until then: it could not write its base."""
    async with Desk(2, "bsp") as desk:
        if when == "waits for its round":
            desk.compute(1)
        elif when == "in the middle of its buckets":
            desk.compute(1, buckets=1)
        desk.told.clear()
        desk.rounds.crossing.fence()
        desk.rounds.learner.part("its history is not kept")
        told = list(desk.told)
        if when != "waits for its round":
            assert told == [], "it computes on"
            buckets = range(1 if when == "in the middle of its buckets" else 0, len(PLAN.buckets))
            told = desk.say(*(LearnerBucket(step=1, bucket=bucket, weight=1.0) for bucket in buckets))
            told += desk.say(LearnerSealed(step=1, used=b"\x01", integers=()))
        assert told == [StepLost(step=1, reason="its history is not kept", retry=True)]
        assert desk.say(stepped(1)) == [], "there it stays"
        assert desk.rounds._machine.phase is Phase.ABSENT
        assert not desk.failed


@pytest.mark.asyncio
@pytest.mark.parametrize(("sync", "visibility"), [("bsp", None), ("ssp:2", None), ("ssp:2", "fixed")])
async def test_what_is_complete_is_applied_before_the_base_is_written(sync: str, visibility: str | None) -> None:
    """It is what people are told that was given up."""
    async with Desk(1, sync, visibility) as desk:
        for step in (1, 2):
            told = desk.compute(step)
            if step == 2:
                desk.rounds.crossing.fence()
                desk.rounds.learner.part("its history is not kept")
            if kinds(told) != [RoundDone] and visibility is None:
                pytest.fail(f"{told}")
            told = desk.say(*([LearnerApplied(round=step)] if kinds(told) == [RoundDone] else []), stepped(step))
        while kinds(told) == [RoundDone]:
            desk.say(LearnerApplied(round=told[0].round))  # type: ignore[attr-defined]
            await turns()  # what lies encoded is decoded in slices
            told = list(desk.told)
        assert told == [], "no step follows"
        assert desk.rounds._machine.applied == desk.rounds.complete == 2
        assert not desk.failed


@pytest.mark.asyncio
async def test_who_waits_for_its_start_stays_there() -> None:
    async with Desk(2, "ssp:2") as desk:
        for step in (1, 2, 3):
            desk.compute(step)
            told = desk.say(stepped(step))
        assert told == []
        desk.rounds.crossing.fence()
        desk.rounds.learner.part("its history is not kept")
        assert desk.told == []
        assert desk.rounds._machine.phase is Phase.ABSENT


@pytest.mark.asyncio
async def test_a_loss_is_told_however_soon_the_learner_is_needed_no_more() -> None:
    """G4: what makes this device leave and what takes it in may come together, before anything was begun."""
    told: list[GivenUp] = []
    over: list[object] = []
    job = SimpleNamespace(
        spec=SimpleNamespace(job="ab" * 6, restarts_max=None, engine="mesh"),
        wait=lambda _reason: None,
        take_given_up=told.extend,
    )

    async def write() -> Any:
        pytest.fail("it is too late")

    tasks = TaskSet("test")
    host = SimpleNamespace(write_given_up=write, parted=over.append)
    parting.Parting(cast(Any, job), LOST, cast(Any, host), tasks).cut_short()
    await turns()
    assert told == [LOST.model_copy(update={"unsaved": TOO_LATE})]
    assert len(over) == 1
    await tasks.close()


# The checkpoint


@pytest.mark.asyncio
async def test_the_base_of_a_history_that_is_given_up_is_kept(tmp_path: Path) -> None:
    """X1: with the ledger after its last round; no member has to know that round (G5), and none is waited for."""
    desk = Checkpoints(tmp_path / "job")
    desk.complete(25, committed=False)
    await desk.asked()
    writes = desk.tasks.spawn(desk.checkpointing.write_given_up(cast(Any, desk.rounds)), "write")
    save = await desk.asked(2)  # the first is that of the schedule, which nobody will ever name
    assert save.after_round == 25
    desk.answer(save, 25)
    made = await (await asyncio.wait_for(writes, 10)).finish()
    assert (made.name, made.manifest.samples) == (CheckpointName(25, "19191919"), 25 * 32)
    assert desk.store.given_up() == (made,)
    assert not desk.found(), "it is none to go on from by itself"
    assert desk.checkpointing.newest is None, "nor is it given to others"
    assert sorted(path.name for path in desk.store.path.iterdir()) == ["25-19191919"]
    await desk.tasks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("hangs", "has not reached a boundary"),
        ("dies", "its learner has ended"),
        ("cannot write", "the disk is full"),
        ("is behind", "written the base after round 24"),
        ("is not there", "holds no state now"),
        ("has finished", "its learner has ended"),
        ("off", "--checkpoint-every off"),
    ],
)
async def test_why_it_is_not_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, why: str) -> None:
    monkeypatch.setattr(checkpointing, "END_TIMEOUT_S", 0.05 if how == "hangs" else 10.0)
    desk = Checkpoints(tmp_path / "job", checkpoint_every="off" if how == "off" else "1000r")
    desk.complete(25)
    desk.ready = how != "is not there"
    desk.rounds.finished = how == "has finished"
    if how in ("dies", "cannot write", "is behind"):
        desk.tasks.spawn(answer(desk, how), "learner")
    with pytest.raises(RequestFailed, match=why):
        await asyncio.wait_for(desk.checkpointing.write_given_up(cast(Any, desk.rounds)), 10)
    assert not list(desk.store.path.iterdir() if desk.store.path.exists() else ())
    await desk.tasks.close()


async def answer(desk: Checkpoints, how: str) -> None:
    save = await desk.asked()
    if how == "dies":
        desk.saving.learner_lost()
    else:
        desk.answer(save, 24 if how == "is behind" else 25, "the disk is full" if how == "cannot write" else None)


# Nobody waits, and everybody is told

SOFTWARE = Software(meshtrain="0", python="3", torch=None, system="any")


class Home:
    """The session of a device whose history is not kept, up to what its learner does."""

    founding = False

    def __init__(self, finish: Exception | None = None) -> None:
        self.log: list[str] = []
        self.may_write, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_finish.set()
        self.error: Exception | None = None
        self.rounds: Any = SimpleNamespace(complete=100, history_samples=6400)
        self.crossing: SimpleNamespace | None = SimpleNamespace(
            enter=lambda *_: None,
            fence=lambda: self.log.append("fenced"),
            standing=lambda: self.log.append("stands"),
        )
        self.finish_error = finish

    def entered(self, _generation: Generation) -> None:
        pass

    async def write_given_up(self) -> Any:
        self.log.append("writes")
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        self.log.append("written")
        return self

    async def finish(self) -> Any:
        await self.may_finish.wait()
        if self.finish_error is not None:
            raise self.finish_error
        return SimpleNamespace(name=NAME)

    def left_out(self, reason: str) -> None:
        self.log.append(f"left out: {reason}")
        self.rounds = self.crossing = None


class Parted:
    """A device that trained alone from round 101 to 1100, and hears that another history is kept."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.sent: list[Wire] = []
        link = SimpleNamespace(connection=SimpleNamespace(notify=lambda body, **_job: self.sent.append(body)))
        self.shell, self.machine, self.tasks = generations(home, {"b": link})
        self.told: list[GivenUp] = []
        self.waits: list[str] = []
        job = cast(Any, self.shell._job)
        job.take_given_up, job.wait = self.told.extend, self.waits.append
        job.take = lambda generation, _awaited=(): job.__dict__.update(generation=generation)
        job.take_changes = lambda _codecs: None
        first = job.generation
        alone = first.model_copy(update={"number": 2, "parent": first.digest(), "ranks": (0,), "learning": (0,)})
        other = alone.model_copy(update={"ranks": (1,), "learning": (1,)})
        enter = catch_up(reload=False).enter.model_copy(update={"generation": alone.hash64(), "cut": 100})
        self.shell._perform([EnterGeneration(alone, enter)])
        home.rounds.complete, home.rounds.history_samples = 1100, 38400
        self.ask = AskIn(job=job.spec.job, member=job.members[0], linked=())
        self.shell._perform([HistoryLeft("parted", where(other, first)), Send("b", self.ask)])

    async def close(self) -> None:
        self.shell.close()
        await self.tasks.close()


@pytest.mark.asyncio
async def test_a_device_asks_in_when_its_learner_has_written_what_is_given_up() -> None:
    """G4: the learner lives so long, its rounds stand still, and the job is told once, with the name."""
    home = Home()
    device = Parted(home)
    await turns()
    assert home.log == ["fenced", "writes"]
    assert (device.sent, device.told) == ([], [])
    assert device.waits == [parting.HOLDING_UP]
    home.may_finish.clear()  # a slow disk
    home.may_write.set()
    await turns()
    assert home.log[2:] == ["written", "left out: parted"]
    assert device.sent == [device.ask]
    assert device.told == []
    home.may_finish.set()
    await turns()
    assert device.told == [LOST.model_copy(update={"saved": (1100, "ab12cd34")})]
    home.rounds = SimpleNamespace(complete=1100, history_samples=38400)
    device.shell._perform([HistoryLeft("parted again", where(cast(Any, device.shell._job).generation))])
    device.shell._perform([HistoryLeft("its own failure")])
    await turns()
    assert len(device.told) == 1, "it is told once"
    await device.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["learner", "disk", "deadline", "taken in", "another process", "ends", "long"])
async def test_what_cannot_be_saved_holds_nobody_up(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parting, "LEARNER_S_MAX", 0.01 if how == "deadline" else 60.0)
    home = Home(OSError(28, "No space left on device") if how == "disk" else None)
    home.error = {"learner": RequestFailed("its learner has ended"), "long": RequestFailed("x" * 5000)}.get(how)
    device = Parted(home)
    await turns()
    if how == "taken in":
        with pytest.raises(AttributeError, match="holding"):  # which this test's machine has not
            device.shell._perform([Fence(where(cast(Any, device.shell._job).generation).generation)])
        assert home.log[2:] == ["left out: parted"], "before it has answered"
    elif how == "another process":
        assert device.shell.end_parting()
        assert not device.shell.end_parting()
    elif how == "ends":
        await device.close()
    elif how == "deadline":
        await until(lambda: "left out: parted" in home.log)
        await device.tasks.close()
    else:
        home.may_write.set()
    await turns()
    assert ("left out: parted" in home.log) is (how != "ends")
    assert device.sent == ([] if how == "ends" else [device.ask])
    why = {
        "learner": "its learner has ended",
        "disk": "[Errno 28] No space left on device",
        "long": "x" * limits.GIVEN_UP_REASON_CHARS_MAX,
    }
    assert device.told == [LOST.model_copy(update={"unsaved": why.get(how, TOO_LATE)})]
    await device.close()


# All of it but the learner's process and the others' machines


def may_start(told: list[Wire]) -> bool:
    """R1: whether the learner was told to start, by itself or with its round (s=0)."""
    return any(isinstance(body, Start) or (isinstance(body, RoundDone) and body.start) for body in told)


async def train_alone(session: JobSession, told: list[Wire], rounds: int) -> Any:
    """What a learner says from its call on, while it takes so many steps. Returns how it is spoken to."""
    await until(lambda: Script.running is not None)
    connection = SimpleNamespace(notify=told.append, writable=True, close=lambda _reason: None)
    session.attach(cast(Any, connection))
    plan = plan_buckets(MODEL, session.job.spec.bucket_bytes, parse_codec("fp32"))
    layout = MemoryLayout.for_bound(plan.total_values, 0)
    os.ftruncate(session.maker.memory.descriptor, layout.total_bytes)
    model = LearnerModel(manifest=MODEL, memory_bytes=layout.total_bytes)
    for body in (model, LearnerState(units=(bytes(32),)), LearnerReady()):
        await session.learner.request(body, lambda _event: None)
    for step in range(1, rounds + 1):
        await until(lambda: may_start(told))
        told.clear()
        np.frombuffer(session.maker.memory.raw(step), np.float32)[:] = step
        for bucket in plan.buckets:
            session.learner.notice(LearnerBucket(step=step, bucket=bucket.index, weight=1.0))
        session.learner.notice(LearnerSealed(step=step, used=b"\x01", integers=()))
        await until(lambda: any(isinstance(body, RoundDone) for body in told))
        session.learner.notice(LearnerApplied(round=step))
        session.learner.notice(LearnerStepped(step=step, samples=1, step_s=0.1, exposed_s=0.0))
    return plan


class Laptop:
    """Anna's: a real board with one job of hers and bert's, who is a link that is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(learnerlife, "LearnerProcess", Script)
        monkeypatch.setattr(Script, "running", None)  # of another test
        monkeypatch.setattr(learnerlife, "learner_environment", lambda *_args, **_options: {})
        anna, self.bert = (
            Member(device=f"{of:064x}", incarnation=1, name=name) for of, name in enumerate(("anna", "bert"))
        )
        history = cast(Any, SimpleNamespace(put=lambda _record: None))
        self.id_ = id_ = new_job_id(bytes(8))
        self.links: dict[str, Any] = {}
        self.said: list[Wire] = []
        node = SimpleNamespace(
            device=anna.device, incarnation=1, name=anna.name, member=anna, links=self.links, history=history,
            patience_s=5.0, blobs=BlobStore(folder / "blobs"), data_dir=folder, settings=LiveSettings(folder),
            job_folder=lambda job: folder / "jobs" / job,
            entrance=SimpleNamespace(address="", learners=LearnerTokens()),
            software=SOFTWARE,
        )  # fmt: skip
        spec = JobSpec(
            job=id_, name="x", submitter=anna.device, created_at_s=time.time(), script="x", args=(), env=(),
            files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32",
            on_nan="stop", seed=0, bucket_bytes=1 << 20, hash_every=0, trace=False,
        )  # fmt: skip
        self.folder = folder / "jobs" / id_
        self.folder.mkdir(parents=True)
        self.jobs = JobRouter(cast(Any, node), DialsNobody())
        self.job = Job(spec, (anna, self.bert), 0, self.folder, history)
        self.jobs.registry.add(self.job)
        self.job.advance(JobEvent.FILES_COMPLETE)
        self.both = computing(id_, anna.device, (anna, self.bert))

    def begins(self, generation: Generation) -> JobSession:
        self.jobs.registry.start(self.job, generation, {})
        session = self.jobs.registry.session(self.id_)
        assert session is not None
        return session

    def meets_bert(self) -> None:
        link = SimpleNamespace(
            connection=SimpleNamespace(notify=lambda body, **_job: self.said.append(body), request=None),
            hello=SimpleNamespace(incarnation=1, name="bert", software=SOFTWARE),
            device=self.bert.device,
        )
        self.links[self.bert.device] = link
        self.jobs.link_made(cast(Any, link))


@pytest.mark.asyncio
async def test_a_device_that_trained_on_alone_keeps_its_base_and_returns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """G4, with a real board, session, machine, rounds and disk: two laptops part, and the other's history is kept."""
    here = Laptop(monkeypatch, tmp_path)
    board, job, both, id_, folder = here.jobs, here.job, here.both, here.id_, here.folder
    fields = {"number": 2, "parent": both.digest(), "root": 1}
    alone = both.model_copy(update={**fields, "ranks": (0,), "learning": ()})
    session = here.begins(alone)  # as it is once it has waited for bert
    told: list[Wire] = []
    plan = await train_alone(session, told, 3)
    await until(lambda: may_start(told))
    generations_ = session.passage.generations
    assert isinstance(generations_, MembershipDriver)
    generations_._path = lineage.Path()
    generations_._path.entered(both, 0, 0)
    generations_._path.entered(alone, 1, 1)
    said, bert = here.said, here.bert
    here.meets_bert()
    later = {"number": 9, "root": 9, "proposer": bert.device, "counted": (1,), "ranks": (1,), "learning": (1,)}
    kept = both.model_copy(update={**fields, **later})
    header = Header(kind=Kind.CONTROL, payload_bytes=0, job=job_number(id_))
    told.clear()
    hears = Where(job=id_, generation=kept, ancestors=(both.hash64(),), samples=64)
    assert board.notice(bert.device, header, hears) is None
    process = Script.running
    assert process is not None
    # The learner computes its fourth step, which nobody will ever average.
    for bucket in plan.buckets:
        session.learner.notice(LearnerBucket(step=4, bucket=bucket.index, weight=1.0))
    session.learner.notice(LearnerSealed(step=4, used=b"\x01", integers=()))
    await until(lambda: any(isinstance(body, Save) for body in told))
    (save,) = (body for body in told if isinstance(body, Save))
    (lost,) = (body for body in told if isinstance(body, StepLost))
    assert (lost.step, lost.retry, save.after_round) == (4, True, 3)
    assert not process.code.done(), "it lives until it has written"
    assert not any(isinstance(body, AskIn) for body in said), "and this device is taken in after that"
    assert not job.given_up
    session.learner.notice(LearnerStepped(step=4, samples=0, step_s=0.1, exposed_s=0.0))
    Path(save.folder, unit_file(0)).write_bytes(b"the base after round 3")
    session.learner.notice(LearnerSaved(number=save.number, round=3, units=1))
    await until(lambda: any(isinstance(body, AskIn) for body in said) and process.code.done())
    await until(lambda: job.given_up)
    store = CheckpointStore(folder, id_, keep=1)
    (made,) = store.given_up()
    assert isinstance(made, Checkpoint)
    assert store.verify(made) is None
    assert not store.listed()
    assert made.unit_path(0).read_bytes() == b"the base after round 3"
    saved = (3, made.name.given_up)
    assert job.summary().given_up == (GivenUp(first=2, last=3, samples=2, made_by=(0,), kept=(1,), saved=saved),)
    assert session.rounds is None
    assert not job.ended, "it returns"
    Script.running = None
    session.end("cancelled", "enough", now=True, tell=False)
    await session.closed.wait()
    await board.close()
    assert store.given_up() == (made,)


@pytest.mark.asyncio
async def test_a_daemon_that_is_stopped_says_goodbye_to_its_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """G1: `meshtrain down`, and SIGTERM, which ends a daemon in the same way. Who has said so is gone, not silent: of
    two laptops the other one goes on at once."""
    monkeypatch.setattr(passage, "LEAVE_TIMEOUT_S", 0.05)
    here = Laptop(monkeypatch, tmp_path)
    session = here.begins(here.both)
    await until(lambda: Script.running is not None)
    here.meets_bert()
    await here.jobs.close()
    goodbyes = [body for body in here.said if isinstance(body, Wish)]
    assert goodbyes == [Wish(job=here.id_, kind="leave")]
    assert not goodbyes[0].returns
    assert session.closed.is_set()
    Script.running = None


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_daemon_as_down_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stopped: list[JobRouter] = []
    close = JobRouter.close

    async def closed(board: JobRouter) -> None:
        stopped.append(board)
        await close(board)

    monkeypatch.setattr(JobRouter, "close", closed)
    settings = config(tmp_path, "anna")
    log = cast(Any, SimpleNamespace(keep_telling=lambda: asyncio.sleep(0)))
    tasks = TaskSet("test")
    runs = tasks.spawn(cli._run(settings, log, end_with_stdin=False), "daemon")
    await until(lambda: (settings.data_dir / "run" / "daemon.json").exists())
    os.kill(os.getpid(), number)
    await asyncio.wait_for(runs, 10)
    assert len(stopped) == 1

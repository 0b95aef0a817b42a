"""What happens to a job at its edges: links that are replaced, ends that cross its start, memory after its end."""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from meshtrain.client import Client
from meshtrain.client import RequestError as Refused
from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from meshtraind.jobs.registry import JobRegistry
from meshtraind.jobs.routing import JobRouter
from meshtraind.learner import supervisor as learnerlife
from meshtraind.learner.script_error import ScriptError
from meshtraind.learner.supervisor import LearnerSupervisor
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.peers.links import Links
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import session as session_module
from meshtraind.session.barriers import Barriers
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.metrics import MetricsKeeper
from meshtraind.session.session import JobSession
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_record import Job, ReplicaHashes
from meshtraind.transport.connection import Connection, RequestFailed
from meshtraind.trust.learner_tokens import LearnerTokens
from meshwire import limits
from meshwire.addresses import Address
from meshwire.codecs.registry import parse_codec
from meshwire.discovery.addressbook import AddressBook
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number, new_job_id
from meshwire.membership.effects import WaitingFor
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.job import (
    BarrierReached,
    BaseHash,
    BlobRef,
    Commit,
    Found,
    Generation,
    JobSpec,
    Member,
    Metrics,
    RankReport,
)
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBucket,
    LearnerIdle,
    LearnerModel,
    LearnerReady,
    LearnerSealed,
    LearnerState,
    LearnerStepped,
    RoundDone,
    Start,
)
from meshwire.messages.link import Hello, Software
from meshwire.messages.local import Cancel, GetJobs
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.model.schedule import Stretch, Travel
from meshwire.sync_modes.mode import sync_settings
from tests.computing import computing
from tests.daemon import realjobs as jobs
from tests.daemon.linkusers import DialsNobody, QuietUser
from tests.daemon.roundhost import executor_of
from tests.daemon.waiting import until

NO_GROUP = SimpleNamespace(used=False, loss=None, is_disturbed=False, survives_losses=False)
JOB = new_job_id(bytes(8))
pytestmark = pytest.mark.timeout(180)


class Listener(QuietUser):
    """Notes which connections a daemon is told to be lost."""

    def __init__(self) -> None:
        self.lost_connections: list[Connection] = []

    def lost(self, conn: Connection, reason: str) -> None:
        self.lost_connections.append(conn)


def links(name: str, incarnation: int) -> Links:
    """A device without TLS, which goes by its name."""
    software = Software(meshtrain="0", python="3", torch=None, system="any")
    hello = Hello(
        incarnation=incarnation,
        name=name,
        listen_port=0,
        software=software,
        cores=1,
        memory_bytes=1,
    )
    return Links(name, None, AddressBook(name), hello=hello, host="127.0.0.1", port=0)


@pytest.mark.asyncio
async def test_who_used_a_link_learns_that_it_was_lost_although_another_has_replaced_it() -> None:
    """G1: a restarted daemon is a new member. A job on the old link must end, or it would wait for ever."""
    anna, bert, bert_again = links("anna", 1), links("bert", 2), links("bert", 3)
    try:
        for device in (anna, bert, bert_again):
            await device.start(Listener())
        at = Address(host="127.0.0.1", port=anna.port)
        bert._book.configure(at, time.monotonic())
        bert.dial_now()
        await until(lambda: "bert" in anna.linked)
        old = anna.linked["bert"].connection
        bert_again._book.configure(at, time.monotonic())
        bert_again.dial_now()
        await until(lambda: "bert" in anna.linked and anna.linked["bert"].hello.incarnation == 3)
        assert isinstance(anna.user, Listener)
        await until(lambda: old in anna.user.lost_connections)  # type: ignore[attr-defined]
        assert anna.linked["bert"].connection not in anna.user.lost_connections
    finally:
        for device in (bert, bert_again, anna):
            await device.close()


def job_of(names: str, rank: int, gone: set[int] | None = None) -> Job:
    """What barriers look at."""
    members = tuple(Member(device=f"{of:064x}", incarnation=1, name=name) for of, name in enumerate(names))
    generation = computing(JOB, members[0].device, members)
    spec = SimpleNamespace(job=JOB, peers_max=None, partition_wait=None, trace=False, restarts_max=None, engine="mesh")
    hashes = ReplicaHashes(range(len(members)))
    job = SimpleNamespace(
        spec=spec,
        rank=rank,
        members=members,
        generation=generation,
        counted=generation.learning,
        gone=gone or set(),
        hashes=hashes,
    )
    return cast(Job, job)


@pytest.mark.asyncio
async def test_nobody_waits_for_a_member_whose_script_has_ended() -> None:
    """Whoever else has ended, having done its part."""
    barriers = Barriers(job_of("abc", 2, gone={0, 1}), lambda _rank, _message: None)
    barriers.reached(BarrierReached(job=JOB, rank=0, number=1))
    with pytest.raises(RequestFailed, match=r"rank 1 \(b\) ended its script; waiting to reach barrier 1 is in vain"):
        await asyncio.wait_for(barriers.barrier(1, 0, lambda _event: None), 10)


def test_a_member_cannot_be_in_barriers_without_end() -> None:
    """Nobody else has passed them, so they are kept."""
    barriers = Barriers(job_of("ab", 0), lambda _rank, _message: None)
    wrong = [barriers.reached(BarrierReached(job=JOB, rank=1, number=n)) for n in range(limits.BARRIERS_OPEN_MAX + 1)]
    assert not any(wrong[:-1])
    assert wrong[-1] == f"rank 1 is in more than {limits.BARRIERS_OPEN_MAX} barriers"


def test_replicas_are_compared_among_those_that_compute() -> None:
    """O9, G4: whoever leaves may have told of a round that the others make without it. Of equal parts the lowest rank's
    is right."""
    board = ReplicaHashes((0, 1, 2))

    def told(rank: int, round_: int, what: int) -> set[int]:
        return board.add(BaseHash(job=JOB, rank=rank, round=round_, sha256=bytes([what]) * 32))

    assert not told(0, 7, 1)
    board.expect((1,))
    assert not told(1, 7, 2)
    assert board.equal is True
    board.expect((1, 2))
    assert not told(2, 8, 3)
    assert told(1, 8, 4) == {2}
    assert board.unequal_round == 8


def test_a_replica_that_is_found_to_differ_when_another_member_is_lost_is_repaired_at_once() -> None:
    """O9: nobody will tell of that round again, and until the next hash it would go on with the wrong base."""
    board = ReplicaHashes((0, 1, 2))
    for rank, what in ((0, 1), (1, 2)):
        assert not board.add(BaseHash(job=JOB, rank=rank, round=7, sha256=bytes([what]) * 32))
    assert board.expect((0, 1)) == {7: {1}}
    assert board.expect((0, 1)) == {}


def hash_of(rank: int, round_: int, what: int) -> BaseHash:
    return BaseHash(job=JOB, rank=rank, round=round_, sha256=bytes([what]) * 32)


def test_a_learner_that_catches_up_is_compared_with_what_the_others_have_told() -> None:
    """O9, J3: one that takes a wrong base over, or applies a round wrongly, is named at the next hash, not when it
    computes again; whether it tells before the others or after them."""
    board = ReplicaHashes((0, 1))
    for rank in (0, 1):
        assert not board.add(hash_of(rank, 7, 1))
    assert not board.add(hash_of(2, 7, 1))
    assert board.equal is True
    assert board.compared == 1
    assert not board.add(hash_of(2, 8, 5)), "it is the first"
    assert not board.add(hash_of(0, 8, 1))
    assert board.add(hash_of(1, 8, 1)) == {2}
    assert board.add(hash_of(2, 7, 6)) == {2}, "once more, from another state"
    assert board.unequal_round == 8


def test_who_is_in_another_generation_is_not_compared_with_this_ones_rounds() -> None:
    """O9, G4: what it has made of that round is perhaps another history's, which it leaves."""
    board = ReplicaHashes((0, 1))
    for rank in (0, 1):
        assert not board.add(hash_of(rank, 7, 1), of_now=False)
    assert board.compared == 1
    assert not board.add(hash_of(2, 7, 6), of_now=False)
    assert not board.add(hash_of(2, 8, 6), of_now=False)
    for rank in (0, 1):
        assert not board.add(hash_of(rank, 8, 1))
    assert board.equal is True


def test_rounds_that_are_made_anew_are_compared_anew() -> None:
    """O9, J3: after a way back, and in a history that was loaded, equal numbers are other rounds."""
    board = ReplicaHashes((0, 1))
    for round_ in (7, 8):
        for rank in (0, 1):
            assert not board.add(hash_of(rank, round_, 1))
    board.forget(above=7)
    assert not board.add(hash_of(0, 8, 2))
    assert not board.add(hash_of(1, 8, 2))
    assert board.add(hash_of(0, 7, 2)) == {0}
    board.forget()
    assert not board.add(hash_of(0, 7, 2))


def test_where_nobody_computes_no_hash_is_right() -> None:
    board = ReplicaHashes((0, 1))
    assert not board.add(hash_of(0, 7, 1))
    assert board.expect(()) == {}
    assert not board.add(hash_of(1, 8, 1))
    assert board.equal is None


def test_hashes_of_the_newest_rounds_are_kept() -> None:
    """Nothing grows without bound."""
    board = ReplicaHashes((0,))
    last = limits.HASHES_OPEN_MAX + 7
    for round_ in range(1, last + 1):
        assert not board.add(hash_of(0, round_, 1))
    assert not board.add(hash_of(1, 7, 2))
    assert board.add(hash_of(1, 8, 2)) == {1}
    assert board.compared == last


def test_whoever_takes_a_generation_tells_of_the_replicas_that_differ(tmp_path: Path) -> None:
    """O9: the session repairs its own."""
    members = tuple(Member(device=f"{of:064x}", incarnation=1, name=name) for of, name in enumerate("abc"))
    first = computing(JOB, members[0].device, members)
    history = SimpleNamespace(put=lambda _record: None)
    spec = SimpleNamespace(
        job=JOB, name="x", script="x", args=(), codec="fp16", topology=None, seed=0,
        submitter=members[0].device, created_at_s=0.0,
        sync=sync_settings("bsp"),
    )  # fmt: skip
    job = Job(cast(Any, spec), members, 0, tmp_path, cast(Any, history))
    told: list[tuple[int, set[int]]] = []
    job.on_odd = lambda round_, odd: told.append((round_, odd))
    job.remember = lambda: None  # type: ignore[method-assign]  # a spec that is none cannot be written
    job.take(first)
    for rank, what in ((0, 1), (1, 2)):
        job.take_hash(BaseHash(job=JOB, rank=rank, round=7, sha256=bytes([what]) * 32))
    assert not told
    second = first.model_copy(update={"number": 2, "ranks": (0, 1), "learning": (0, 1)})
    job.take(second)
    assert told == [(7, {1})]
    job.take_hash(BaseHash(job=JOB, rank=2, round=7, sha256=bytes(32)), first.hash64())
    assert told == [(7, {1})]
    job.take_hash(BaseHash(job=JOB, rank=2, round=7, sha256=bytes(32)), second.hash64())
    assert told == [(7, {1}), (7, {2})]


@pytest.mark.asyncio
async def test_whoever_waits_for_news_of_a_job_hears_that_it_is_to_end() -> None:
    """Also when there is news in the same moment: else a daemon that stops waits for it in vain."""
    job = object.__new__(Job)
    job._changed = asyncio.Event()
    waiting = TaskSet("a test").spawn(job.news(5.0), "news")
    await asyncio.sleep(0)
    job.touch()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.asyncio
async def test_what_a_job_held_is_given_back_when_it_is_over(tmp_path: Path) -> None:
    """Its parts hold each other in circles, with buffers as large as the model."""

    class Parts:
        def __init__(self) -> None:
            self.others = self

    closed = asyncio.Event()
    parts = Parts()
    held = weakref.ref(parts)
    job = SimpleNamespace(
        spec=SimpleNamespace(job=JOB, restarts_max=None, engine="mesh"),
        folder=tmp_path / JOB,
        ended=True,
        state=JobState.SUCCEEDED,
    )
    session: Any = SimpleNamespace(job=job, closed=closed, guests=(), parts=parts)
    node: Any = SimpleNamespace(blobs=SimpleNamespace(release=lambda _job: None, trim=lambda: None))
    registry = JobRegistry(node, DialsNobody(), cast(Any, None))
    registry._sessions[JOB] = session
    forgetting = registry._forget(session)
    del session, parts
    gc.disable()  # as if there were many other objects
    try:
        closed.set()
        await forgetting
        del forgetting
        assert held() is not None
        await asyncio.sleep(0)
        assert held() is None
    finally:
        gc.enable()


class Promised:
    """The board of a device that has promised to begin a job, and has not been told to."""

    def __init__(self, folder: Path) -> None:
        members = tuple(Member(device=f"{of:064x}", incarnation=1, name=name) for of, name in enumerate("abc"))
        self.generation = Generation.first(JOB, members[0].device, members)
        node = SimpleNamespace(
            device=members[2].device,
            name="c",
            links={member.device: SimpleNamespace(hello=member, connection=None) for member in members[:2]},
            job_folder=lambda _id: folder,
            data_dir=folder,
            settings=LiveSettings(folder),
        )
        self.node = node
        self.jobs = JobRouter(cast(Any, node), DialsNobody())
        spec = SimpleNamespace(
            job=JOB, name="x", script="x", args=(), codec="fp16", topology=None, seed=0, submitter=members[0].device,
            created_at_s=0.0, sync=sync_settings("bsp"), resume=None, engine="mesh",
        )  # fmt: skip
        history = cast(Any, SimpleNamespace(put=lambda _record: None))
        self.job = Job(cast(Any, spec), members, 2, folder, history)
        self.jobs.registry.add(self.job)
        self.job.advance(JobEvent.FILES_COMPLETE)
        self.heard: list[Wire] = []
        self.begun: list[dict[int, Any]] = []
        self.jobs.registry.start = self.begin  # type: ignore[method-assign]
        assert self.jobs.admission.prepared(self.generation).refusal is None

    def begin(self, job: Job, generation: Generation, links: dict[int, Any]) -> None:
        assert (job, generation) == (self.job, self.generation)
        self.begun.append(links)
        heard = lambda _rank, _header, body: self.heard.append(body)  # noqa: E731
        self.jobs.registry._sessions[JOB] = cast(Any, SimpleNamespace(job=job, members=SimpleNamespace(notice=heard)))

    def says(self, rank: int, body: Wire) -> None:
        header = Header(kind=Kind.CONTROL, payload_bytes=0, job=job_number(JOB))
        device = self.generation.members[rank].device if rank < 3 else "f" * 64
        assert self.jobs.notice(device, header, body) is None


@pytest.mark.asyncio
async def test_who_hears_of_a_job_that_it_has_promised_begins_it(tmp_path: Path) -> None:
    """G2: nobody is told to begin before all have promised. Nothing that arrives sooner has to be kept, and a submitter
    that is lost while it tells leaves nobody behind."""
    device = Promised(tmp_path)
    model = BarrierReached(job=JOB, rank=1, number=1)
    device.says(3, model)
    assert not device.begun, "it is no member"
    device.says(1, RankReport(job=JOB, rank=1, state="failed"))
    assert not device.begun, "it has not begun there either"
    device.node.links.pop(device.generation.members[0].device)
    device.jobs.peer_lost(device.generation.members[0].device, "it was killed")
    assert not device.job.ended
    device.says(1, model)
    assert [set(links) for links in device.begun] == [{1}], "the lost one is left out later, like any other (G9)"
    assert device.heard == [model]
    device.says(0, Commit(job=JOB, generation=device.generation.hash64()))
    assert len(device.begun) == 1
    await device.jobs._tasks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("others_go_on", [True, False, None])
async def test_a_bug_in_a_task_here_ends_the_job_here(others_go_on: bool | None) -> None:
    """The traceback is the job's error on this device. The others hear of it only if they cannot go on without it.

    None: leaving fails, too.
    """
    ended: list[tuple[str, str, bool]] = []
    session = JobSession.__new__(JobSession)
    session.job = cast(Job, SimpleNamespace(ending=False, left=False, rank=1))
    session._node = cast(Any, SimpleNamespace(name="bert"))
    session._dropping_out = False
    session._tasks = TaskSet("job x", session._task_failed)

    async def leave() -> bool:
        if others_go_on is None:
            raise ZeroDivisionError("there")
        return others_go_on

    session.leave = leave  # type: ignore[method-assign, assignment]
    end = lambda outcome, reason, *, tell, **_now: ended.append((outcome, reason, tell))  # noqa: E731
    session.end = end  # type: ignore[method-assign, assignment]

    async def breaks() -> None:
        raise ZeroDivisionError("here")

    await asyncio.wait({session._tasks.spawn(breaks(), "checkpoint after round 7")})
    await asyncio.sleep(0)  # it is reported in the loop's next turn
    assert not ended, "it trains on without this one"
    session._tasks.spawn(breaks(), "catch up")
    session._tasks.spawn(breaks(), "report")
    await until(lambda: ended)
    await asyncio.sleep(0.01)
    ((outcome, why, tell),) = ended
    assert outcome == "failed"
    assert why.startswith("rank 1 (bert): job x/catch up failed: Traceback")
    assert why.endswith("ZeroDivisionError: here\n")
    assert tell is not bool(others_go_on)
    assert session.job.left is bool(others_go_on)


@pytest.mark.asyncio
async def test_a_script_that_is_started_again_and_fails_otherwise_is_told_with_its_newest_error() -> None:
    """J3: a process is killed, and the next one finds an error of the script's own. What is said of the second is the
    second's: on the screen, and where nobody computes any more as the job's end."""
    session = JobSession.__new__(JobSession)
    session.job = cast(
        Job,
        SimpleNamespace(
            state=JobState.RUNNING,
            ending=False,
            rank=1,
            spec=SimpleNamespace(job=JOB, restarts_max=None, engine="mesh"),
        ),
    )
    session.job.reports = {}
    session._node = cast(Any, SimpleNamespace(name="bert"))
    session._learners = LearnerSupervisor(session._node, session.job, 1)
    session._metrics = MetricsKeeper({})
    session.worlds = cast(
        Any,
        SimpleNamespace(world=None, is_between=False, group=NO_GROUP),
    )
    session._why_ended = None
    session._failed_elsewhere = {}
    session.learner = cast(Any, SimpleNamespace(rounds=None, requests=None))
    died: list[bool] = []

    def learner_died(*, failed: bool) -> bool:
        died.append(failed)
        return True

    session.passage = cast(Any, SimpleNamespace(founding=False, rounds=None, learner_died=learner_died))
    session.tell_report = lambda: None  # type: ignore[method-assign]
    told = []
    for code, error in (
        (-9, None),
        (1, ScriptError("ValueError", "ValueError: no lr", "train.py, line 7", "x = 1", hopeless=False)),
        (-15, None),
    ):
        session._learners.error = error
        assert session._goes_on_after(code), "it is started again"
        told.append(session.why_none_learns())
        assert session.learner_failed == (code > 0)
    assert died == [False, True, False]
    killed = "rank 1 (bert): the script was killed by signal 9 (SIGKILL); Linux does that when memory runs out"
    assert told[0] == killed
    assert told[1] == "rank 1 (bert): train.py, line 7: ValueError: no lr\n    x = 1"
    assert told[2] == "rank 1 (bert): the script was killed by signal 15 (SIGTERM)"


@pytest.mark.asyncio
@pytest.mark.parametrize("cannot_start", [False, True])
@pytest.mark.parametrize("spared_by", ["nobody", "one computes", "one is away", "one has not told", "a generation"])
async def test_the_job_ends_where_all_scripts_are_given_up_and_all_are_out(cannot_start: bool, spared_by: str) -> None:
    """G10: scripts that fail at the same moment before round 1. While somebody may go on nobody ends it."""
    session = JobSession.__new__(JobSession)
    members = tuple(
        Member(device=f"{rank:064x}", incarnation=1, name=name) for rank, name in enumerate(("anna", "bert", "cleo"))
    )
    session.job = cast(
        Job,
        SimpleNamespace(
            state=JobState.RUNNING, ending=False, rank=1, members=members,
            spec=SimpleNamespace(job=JOB, restarts_max=None, engine="mesh"),
            reports={rank: SimpleNamespace(part="forwards", exit_code=None) for rank in (0, 2)},
        ),
    )  # fmt: skip
    session._node = cast(
        Any, SimpleNamespace(name="bert", patience_s=0.01, links={members[0].device: None, members[2].device: None})
    )
    session._learners = LearnerSupervisor(session._node, session.job, 1)
    session._metrics = MetricsKeeper({})
    session._tasks = TaskSet("job x", session._task_failed)
    session.worlds = cast(
        Any,
        SimpleNamespace(world=None, is_between=False, group=NO_GROUP),
    )
    session._why_ended = None
    session.learner = cast(Any, SimpleNamespace(rounds=None, requests=None))
    session.tell_report = lambda: None  # type: ignore[method-assign]
    session.passage = cast(
        Any,
        SimpleNamespace(
            founding=False, rounds=None, is_out=True, may_leave=True, learner_died=lambda *, failed: failed
        ),
    )
    ended: list[tuple[str, str]] = []

    def end(outcome: str, why: str, *, now: bool) -> None:
        ended.append((outcome, why))
        session.job.ending = now  # type: ignore[misc]

    session.end = end  # type: ignore[method-assign, assignment]
    reports = cast(Any, session.job.reports)
    if spared_by == "one computes":
        reports[2].part = "computes"
    elif spared_by == "one is away":
        session._node.links = {members[0].device: cast(Any, None)}  # type: ignore[misc]
    elif spared_by == "one has not told":
        del reports[2]
    elif spared_by == "a generation":
        session.passage.is_out = False  # type: ignore[misc]
    error = ScriptError("ImportError", "ImportError: no x", "train.py, line 1", "import x", hopeless=True)
    if cannot_start:
        session._cannot_start("rank 1 (bert): no memory for x")
    else:
        session._learners.error = error
        assert not session._goes_on_after(1)
    assert session.learner_given_up
    why = "no memory for x" if cannot_start else "ImportError: no x"
    try:
        if spared_by == "nobody":
            await until(lambda: ended)
            await until(lambda: not session._tasks._tasks)
        else:
            await asyncio.sleep(0.05)  # some patiences
            assert not ended
            session._learners.given_up = False
            await until(lambda: not session._tasks._tasks)
    finally:
        await session._tasks.close()
    assert [(outcome, why in reason) for outcome, reason in ended] == [("failed", True)] * (spared_by == "nobody")


class Script:
    """A learner's process that a test ends, in the place of a real one."""

    running: ClassVar["Script | None"] = None

    def __init__(self, *_args: object) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self, _environment: object, _niceness: int, _said: str) -> None:
        Script.running = self

    async def wait(self) -> int:
        return await self.code

    def error(self) -> None:
        """It tells of none."""

    async def stop(self, *, now: bool) -> None:
        if not self.code.done():
            self.code.set_result(-9)


async def prepare(session: JobSession) -> list[Wire]:
    """What a learner says, alone, from its call to its first step. Returns what it is told from then on."""
    await until(lambda: Script.running is not None)
    told: list[Wire] = []
    connection = SimpleNamespace(notify=told.append, writable=True, close=lambda _reason: None)
    session.attach(cast(Any, connection))
    codec = parse_codec(session.job.spec.codec)
    plan = plan_buckets(MODEL, session.job.spec.bucket_bytes, codec)
    layout = MemoryLayout.for_bound(plan.total_values, session.job.spec.sync.staleness)
    os.ftruncate(session.maker.memory.descriptor, layout.total_bytes)
    model = LearnerModel(manifest=MODEL, memory_bytes=layout.total_bytes)
    for body in (model, LearnerState(units=(bytes(32),)), LearnerReady()):
        await session.learner.request(body, lambda _event: None)
    return told


def may_start(told: list[Wire]) -> bool:
    """R1: whether the learner was told to start, by itself or with its round (s=0)."""
    return any(isinstance(body, Start) or (isinstance(body, RoundDone) and body.start) for body in told)


async def train(session: JobSession, rounds: int) -> None:
    """What a learner says, alone, from its call to its end, while it takes a few steps."""
    told = await prepare(session)
    plan = plan_buckets(MODEL, session.job.spec.bucket_bytes, parse_codec(session.job.spec.codec))
    say = session.learner.notice
    for step in range(1, rounds + 1):
        await until(lambda: may_start(told))
        told.clear()
        np.frombuffer(session.maker.memory.raw(step), np.float32)[:] = step
        for bucket in plan.buckets:
            say(LearnerBucket(step=step, bucket=bucket.index, weight=1.0))
        say(LearnerSealed(step=step, used=b"\x01", integers=()))
        await until(lambda: any(isinstance(body, RoundDone) for body in told))
        say(LearnerApplied(round=step))
        say(LearnerStepped(step=step, samples=1, step_s=0.1, exposed_s=0.0))
    say(LearnerIdle(reason="its script has ended", finished=True))
    script, Script.running = Script.running, None
    assert script is not None
    script.code.set_result(0)


MODEL = ModelManifest(
    tensors=(TensorSpec(name="weight", shape=(120, 100), dtype="float32", kind="parameter"),), optimizer="SGD"
)
COMPRESSED = (
    "int8",
    "int8",
    "topk:0.01",
    "powersgd:1,warmup=0",
    "onebit",
    "dct",
    "twobit",
    "lgc:0.05",
    "int4",
    "sidco",
)


def board_of_one(monkeypatch: pytest.MonkeyPatch, folder: Path) -> JobRouter:
    """Of a device whose learners are `Script`s."""
    Script.running = None
    monkeypatch.setattr(learnerlife, "LearnerProcess", Script)
    monkeypatch.setattr(learnerlife, "learner_environment", lambda *_args, **_options: {})
    who = Member(device="0" * 64, incarnation=1, name="anna")
    history = cast(Any, SimpleNamespace(put=lambda _record: None))
    node = SimpleNamespace(
        device=who.device, name=who.name, member=who, links={}, blobs=BlobStore(folder / "blobs"), history=history,
        job_folder=lambda id_: folder / "jobs" / id_, patience_s=5.0, data_dir=folder, settings=LiveSettings(folder),
        entrance=SimpleNamespace(address="", learners=LearnerTokens()),
        software=Software(meshtrain="0", python="3", torch=None, system="any"),
    )  # fmt: skip
    return JobRouter(cast(Any, node), DialsNobody())


def job_alone(board: JobRouter, folder: Path, codec: str, number: int) -> JobSession:
    """A job of one device that has begun."""
    who, id_ = board._node.member, new_job_id(number.to_bytes(8, "big"))
    spec = JobSpec(
        job=id_, name="x", submitter=who.device, created_at_s=0.0, script="x", args=(), env=(),
        files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec=codec,
        on_nan="stop", seed=0, bucket_bytes=1 << 20, hash_every=0, trace=False,
    )  # fmt: skip
    job_folder = folder / "jobs" / id_
    job_folder.mkdir(parents=True)
    job = Job(spec, (who,), 0, job_folder, board._node.history)
    board.registry.add(job)
    job.advance(JobEvent.FILES_COMPLETE)
    board.registry.start(job, Generation.first(id_, who.device, (who,)), {})
    session = board.registry.session(id_)
    assert session is not None
    return session


@pytest.mark.asyncio
async def test_ten_compressed_jobs_leave_nothing_in_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hundred ended jobs are remembered: each kept its session, its rounds, and residuals as large as its model."""
    board = board_of_one(monkeypatch, tmp_path)
    left: list[weakref.ref[object]] = []
    for number, codec in enumerate(COMPRESSED):
        session = job_alone(board, tmp_path, codec, number)
        await train(session, 3)
        rounds = session.rounds
        assert rounds is not None
        vectors = executor_of(rounds)._feedback
        assert vectors is not None
        large = [weakref.ref(each.values) for each in (vectors.worker, vectors.owner)]
        left += [weakref.ref(each) for each in (session, session.passage, rounds, executor_of(rounds))]
        await session.closed.wait()
        assert all(ref() is None for ref in large), "close frees its vectors at once, whoever refers to it"
        del session, rounds, vectors
        await until(lambda: not board.registry._sessions)
    await board._tasks.close()
    await asyncio.sleep(0.01)  # the loop itself lets go of the last task
    gc.collect()
    assert [type(ref()).__name__ for ref in left if ref() is not None] == []
    assert [job.state for job in board.registry.jobs.values()] == ["succeeded"] * len(COMPRESSED), "they are remembered"


@pytest.mark.asyncio
async def test_a_script_that_hangs_in_its_first_step_is_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """V2, J3: all others would wait for it. While it is in a barrier it is the one that waits. Another is started."""
    monkeypatch.setattr(session_module, "REPORT_INTERVAL_S", 0.01)
    board = board_of_one(monkeypatch, tmp_path)
    session = job_alone(board, tmp_path, "fp32", 1)
    told = await prepare(session)
    hangs = Script.running
    await until(lambda: may_start(told))
    assert session.rounds is not None
    moves, began_s = session.rounds.learner, asyncio.get_running_loop().time()
    moves._loop = cast(Any, SimpleNamespace(time=lambda: began_s + 1000.0))
    assert moves.hangs() is None
    moves._parts.job_rounds._schedule.enter_barrier(1)
    moves._loop = cast(Any, SimpleNamespace(time=lambda: began_s + 9000.0))
    assert moves.hangs() is None, "others may be slow"
    moves._parts.job_rounds._schedule.barrier_broken("never mind")
    moves._loop = cast(Any, SimpleNamespace(time=lambda: began_s + 10790.0))
    assert moves.hangs() is None
    await asyncio.sleep(0.05)
    assert not session.job.ending
    moves._loop = cast(Any, SimpleNamespace(time=lambda: began_s + 10801.0))
    await until(lambda: Script.running is not hangs)
    told = await prepare(session)
    await until(lambda: may_start(told))
    failure = session.job.reports[0].failure
    assert failure is not None
    assert "rank 0 (anna): the script hangs: nothing was heard of its step 1 for 1800 s" in failure
    await session.close()
    await board._tasks.close()


@pytest.mark.asyncio
async def test_a_model_that_grows_is_refused_where_it_cannot_be_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """T1: by the daemon as by the learner; and a model that another member tells of, when this one comes in."""
    board = board_of_one(monkeypatch, tmp_path)
    session = job_alone(board, tmp_path, "powersgd:1,warmup=0", 1)
    await until(lambda: Script.running is not None)
    connection = SimpleNamespace(notify=lambda _body: None, writable=True, close=lambda _reason: None)
    session.attach(cast(Any, connection))
    growing = MODEL.model_copy(update={"travel": Travel(stretches=(Stretch(first=1, counts=(100,)),))})
    wrong = "not all of this model's values travel in every round, which does not go with --codec powersgd:1"
    with pytest.raises(RequestFailed, match=wrong):
        await session.learner.request(LearnerModel(manifest=growing, memory_bytes=0), lambda _event: None)
    beginning = SimpleNamespace(model=SimpleNamespace(manifest=growing))
    with pytest.raises(RequestFailed, match=wrong):
        session.maker.loading(session.passage, cast(Any, None), cast(Any, beginning))
    session.end("failed", "enough", now=True)
    await session.closed.wait()
    await board._tasks.close()


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert"), print) as started:
        yield started


def test_a_daemon_lets_go_of_the_memory_of_ended_jobs(mesh: LocalMesh, tmp_path: Path) -> None:
    """It lives for months: what it shares with a learner is gone when the job is."""
    summary = jobs.run(mesh.daemons[0], tmp_path, jobs.TRAIN)
    assert summary.state == "succeeded", summary.error
    for daemon in mesh.daemons:
        jobs.ended(daemon, summary.job)
        maps = Path(f"/proc/{daemon.process.pid}/maps")
        deadline_s = time.monotonic() + 10
        while "meshtrain-learner" in maps.read_text():
            assert time.monotonic() < deadline_s, f"{daemon.name} still maps the memory"
            time.sleep(0.05)


def test_a_job_can_be_cancelled_on_any_member_before_it_has_begun(mesh: LocalMesh, tmp_path: Path) -> None:
    """The submission ends at once, says why, and no member keeps files of it."""
    anna, bert = mesh.daemons
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "large").write_bytes(os.urandom(200 << 20))
    submission = jobs.submission(tmp_path, jobs.TRAIN)
    before = set(_jobs_of(bert))
    errors: list[str] = []

    def submit() -> None:
        client = Client.connect(anna.data_dir)
        try:
            client.request(submission, timeout_s=jobs.TIMEOUT_S, name="submission")
        except Refused as error:
            errors.append(str(error))
        finally:
            client.close()

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        deadline_s = time.monotonic() + jobs.TIMEOUT_S
        while not (new := set(_jobs_of(bert)) - before):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        (job,) = new
        bert.request(Cancel(job=job, now=False), jobs.TIMEOUT_S, "cancelling")
    finally:
        thread.join(jobs.TIMEOUT_S)
    assert len(errors) == 1
    assert "cancelled on bert" in errors[0]
    for daemon, state in ((anna, "failed"), (bert, "cancelled")):
        assert jobs.ended(daemon, job).state == state
        while (daemon.data_dir / "jobs" / job).exists():
            assert time.monotonic() < deadline_s, f"{daemon.name} keeps files of the job"
            time.sleep(0.05)


def _jobs_of(daemon: LocalDaemon) -> list[str]:
    found = daemon.request(GetJobs(), jobs.TIMEOUT_S, "jobs")
    assert isinstance(found, Found)
    return [summary.job for summary in found.jobs]


@pytest.mark.parametrize(
    ("members", "rounds", "independent", "should"),
    [("ab", (0, 0), False, True), ("ab", (0, 1), False, False), ("a", (0,), False, False), ("ab", (0, 0), True, False)],
)
def test_a_job_of_several_devices_has_exchanged_something(
    members: str, rounds: tuple[int, ...], independent: bool, should: bool
) -> None:
    """J4: one of them that has seen a round is enough; one device alone has nobody to exchange with."""
    reports = {
        rank: RankReport(job=JOB, rank=rank, state="finishing", exit_code=0, metrics=Metrics(round=round_))
        for rank, round_ in enumerate(rounds)
    }
    spec = SimpleNamespace(independent=independent, engine="mesh")
    job = SimpleNamespace(members=members, spec=spec, reports=reports)
    assert Job.should_have_exchanged.fget(job) is should  # type: ignore[attr-defined]


@pytest.mark.parametrize("to_prepare", [False, True])
def test_what_is_waited_for_is_noted_with_whether_it_is_mt_prepare(to_prepare: bool) -> None:
    """P5: which scripts with process groups never call."""
    noted: list[tuple[str, bool]] = []
    spec = SimpleNamespace(job=JOB, restarts_max=None)
    driver = MembershipDriver.__new__(MembershipDriver)
    driver._witness = None
    driver._job = cast(
        Job, SimpleNamespace(spec=spec, wait=lambda reason, *, to_prepare: noted.append((reason, to_prepare)))
    )
    driver._perform_one(WaitingFor("anna", to_prepare))
    assert noted == [("anna", to_prepare)]

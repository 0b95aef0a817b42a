"""Daemons in one process that had a job when they ended, over links that deliver: for what they do with it next."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from meshtraind.jobs.checkpoint_search import ship
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.routing import JobRouter
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import list_checkpoints
from meshtraind.storage.fetch import serve
from meshtraind.storage.job_history import JobHistory
from meshtraind.storage.job_record import Job
from meshtraind.storage.resume_file import NAME, JobFile
from meshtraind.transport.connection import ConnectionEnded
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, JobRecord, JobState
from meshwire.message_base import Wire
from meshwire.messages.generation import Where
from meshwire.messages.job import (
    AskCheckpoint,
    CheckpointFiles,
    Checkpoints,
    Fetch,
    Generation,
    JobSpec,
    ListCheckpoints,
    Member,
    Offer,
    Prepare,
    ResumePoint,
)
from tests.computing import computing
from tests.daemon.job_start.test_checkpointing import JOB, MEMBERS
from tests.daemon.linkusers import DialsNobody

FIRST = computing(JOB, MEMBERS[0].device, MEMBERS)
PATIENCE_S = 0.3


class Daemon:
    """One that comes up, with a folder of before; its links are made by the test."""

    def __init__(self, folder: Path, rank: int, spec: JobSpec) -> None:
        self.member = MEMBERS[rank].model_copy(update={"incarnation": 50 + rank})
        self.device, self.name = self.member.device, self.member.name
        self.data = folder / self.name
        self.folder = self.data / "jobs" / JOB
        self.folder.mkdir(parents=True, exist_ok=True)
        self.links: dict[str, Any] = {}
        self.began: list[tuple[Job, Generation]] = []
        self.spec = spec
        self.torch: str | None = "2.0"

    def was_in(self, generation: Generation | None = FIRST, state: JobState = JobState.RUNNING) -> None:
        """The job, when its daemon was killed."""
        JobFile(spec=self.spec, members=MEMBERS, started_at_s=5.0, generation=generation).save(self.folder)
        history = JobHistory(self.data / "jobs.db", 6.0)
        devices = tuple(member.device for member in MEMBERS)
        history.put(
            JobRecord(id=JOB, name="test", spec={"rounds": 77}, state=state, members=devices,
                      submitter=MEMBERS[0].device, created_s=1.0, started_s=5.0)
        )  # fmt: skip
        history.close()

    def start(self) -> None:
        self.history = JobHistory(self.data / "jobs.db", 7.0)
        self.blobs = BlobStore(self.data / "blobs")
        node: Any = SimpleNamespace(
            device=self.device, name=self.name, member=self.member, incarnation=self.member.incarnation,
            links=self.links, history=self.history, software=SimpleNamespace(torch=self.torch), blobs=self.blobs,
            job_folder=lambda job: self.data / "jobs" / job, data_dir=self.data,
            settings=LiveSettings(self.data), patience_s=PATIENCE_S,
        )  # fmt: skip
        self.jobs = JobRouter(node, DialsNobody())
        self.questions = JobQueries(node, self.jobs.registry, self.jobs.admission)
        cast(Any, self.jobs.registry).start = self._began
        cast(Any, self.jobs.registry).come_back = self._came_back
        self.jobs.admission.revivals.start(self.jobs._tasks, self.jobs.submissions)

    def _began(self, job: Job, generation: Generation, _links: object) -> None:
        job.advance(JobEvent.START)
        self.began.append((job, generation))

    async def _came_back(self, job: Job, _device: str, _where: Where) -> None:
        await asyncio.sleep(0)
        job.advance(JobEvent.START)

    def link(self, other: "Daemon") -> None:
        for one, two in ((self, other), (other, self)):
            hello = SimpleNamespace(incarnation=two.member.incarnation, name=two.name, hub=two.member.hub)
            wired = Wired(one, two)
            one.links[two.device] = SimpleNamespace(device=two.device, hello=hello, connection=wired, member=two.member)
        for one, two in ((self, other), (other, self)):
            one.jobs.link_made(one.links[two.device])

    @property
    def waits(self) -> bool:
        return self.jobs.admission.revivals.waits(JOB)

    @property
    def state(self) -> JobState:
        return self.history.find(JOB).state

    async def close(self) -> None:
        await self.jobs.close()
        self.history.close()


class Wired:
    """A link that delivers."""

    def __init__(self, src: Daemon, dst: Daemon) -> None:
        self.src, self.dst, self.name = src, dst, dst.name

    def notify(self, body: Wire, *, job: int = 0) -> None:
        header = Header(kind=Kind.CONTROL, payload_bytes=0, job=job)
        asyncio.get_running_loop().call_soon(self.dst.jobs.notice, self.src.device, header, body)

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        await asyncio.sleep(0)
        dst, device = self.dst, self.src.device
        if dst.device not in self.src.links:
            raise ConnectionEnded(f"{self.name} is gone")
        match body:
            case Offer():
                return dst.jobs.admission.offered(body, device)
            case Prepare():
                return dst.jobs.admission.prepared(body.generation, body.port)
            case ListCheckpoints():
                return Checkpoints(checkpoints=list_checkpoints(dst.folder, JOB, 1, lambda: None))
            case AskCheckpoint():
                with dst.blobs.holding() as owner:
                    wanted = CheckpointName(body.round, body.given_up or "")
                    return CheckpointFiles(files=ship(dst.folder, JOB, wanted, dst.blobs, owner))
        assert isinstance(body, Fetch)
        return await serve(body, dst.blobs, dst.folder, ended=lambda: True)


def is_over(daemon: Daemon) -> bool:
    """Neither waits it to begin again, nor will it after another start."""
    return not daemon.waits and not (daemon.folder / NAME).exists()


def started(daemon: Daemon) -> Daemon:
    daemon.start()
    return daemon


def come_up(daemons: Iterable[Daemon]) -> None:
    up: list[Daemon] = []
    for daemon in daemons:
        daemon.start()
        for other in up:
            daemon.link(other)
        up.append(daemon)


def with_members(daemons: Iterable[Daemon]) -> tuple[Member, ...]:
    now = {daemon.device: daemon.member for daemon in daemons}
    return tuple(now.get(member.device, member) for member in MEMBERS)


def resume_of(daemon: Daemon) -> ResumePoint:
    blobs = BlobStore(daemon.data / "blobs")
    with blobs.holding() as owner:
        files = ship(daemon.folder, JOB, CheckpointName(40), blobs, owner)
    return ResumePoint(job=JOB, round=40, files=files)

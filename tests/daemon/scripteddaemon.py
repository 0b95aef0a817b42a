"""A daemon's answers as a test wishes them, and the dashboard served with them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from meshtraind.dashboard.dashboard import Dashboard
from meshtraind.transport.connection import Emit, RequestFailed
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.course import CoursePoint, GetCourse, JobCourse
from meshwire.messages.envelope import Done
from meshwire.messages.job import Fetch, Fetched, Found, JobSummary, Member, Metrics, Prediction, RankReport
from meshwire.messages.link import MachineState
from meshwire.messages.local import (
    Cancel,
    ChangeSettings,
    GetJobs,
    GetMachines,
    GetPeers,
    GetStatus,
    Leave,
    LinksMeasured,
    LinkTraffic,
    Machines,
    MeasureLinks,
    PairAccept,
    PairCode,
    Paired,
    PairHost,
    PairJoin,
    Peers,
    PeerSummary,
    SettingsTaken,
    Status,
    Unpair,
    Unpaired,
)
from meshwire.planning.measured_link import MeasuredLink
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsInForce, newest_codec
from tests.daemon.fakedaemon import JOB, SOFTWARE, STATUS, member, summary

DEADLINE_S = 15.0
MEASURED = MeasuredLink(
    send_bytes_s=10.5e6,
    receive_bytes_s=11.25e6,
    both_send_bytes_s=6e6,
    both_receive_bytes_s=6e6,
    rtt_s=0.0042,
    loaded_rtt_s=0.031,
    wired=False,
    peer_wired=False,
    at_s=1_790_000_000.0,
    peer_speed=1.25,
)


def device(at: int) -> str:
    return f"{at:064x}"


def peer(at: int, name: str, state: Any = "linked", **more: Any) -> PeerSummary:
    linked = state == "linked"
    fields: dict[str, Any] = {
        "device": device(at),
        "name": name,
        "state": state,
        "address": f"192.168.1.{at % 250}:29610",
        "rtt_s": 0.0042 if linked else None,
        "software": SOFTWARE if linked else None,
        "cores": 8 if linked else None,
        "memory_bytes": 16 * 2**30 if linked else None,
    }
    return PeerSummary(**(fields | more))


def course(*rounds: int) -> tuple[CoursePoint, ...]:
    """What a daemon has kept of these rounds."""
    return tuple(
        CoursePoint(at_s=float(number), round=number, values=(("loss", 9.0),), samples_s=50.0) for number in rounds
    )


class ScriptedDaemon:
    """Answers what the dashboard asks.

    Attributes:
        asked: what was asked for, but for what the page shows by itself.
        logs: by rank.
        settings: by which its jobs are defined, as their courses tell; None: no course is known.
        points: of their courses.
    """

    def __init__(self, names: tuple[str, ...] = ("anna", "bert", "carl")) -> None:
        self.asked: list[Wire] = []
        self.names = names
        self.peers = [peer(at, name) for at, name in enumerate(names) if at]
        self.jobs: dict[str, JobSummary] = {}
        self.logs: dict[int, bytes] = {}
        self.sent_bytes = 0
        self.failure: str | None = None
        self.warnings: tuple[str, ...] = ()
        self.settings: dict[str, str] | None = {"sync": "bsp", "codec": "int8", "topology": "ring"}
        self.points: tuple[CoursePoint, ...] = ()
        self.machine = MachineState(busy=0.37, celsius=61.0, battery=0.82, plugged=True)
        self.guest = asyncio.Event()  # types the code that is shown

    def train(self, step: int, **changes: Any) -> None:
        """A job of all, at this round."""
        self.sent_bytes = step * 4_000_000
        ranks = tuple(
            RankReport(
                job=JOB,
                rank=rank,
                state="running",
                metrics=Metrics(
                    step=step,
                    round=step,
                    samples=step * 32,
                    values=(("loss", 4.0 / (1 + step / 20) + rank / 50),),
                    step_s=0.42 + rank / 10,
                    exposed_s=step / 50,
                    exchange_s=step / 10,
                    throughput_samples_s=40.0,
                    ages=(step,),
                    sent_bytes=self.sent_bytes,
                    payload_bytes=self.sent_bytes,
                    samples_per_s=max(5.0, 80.0 - 9 * rank),
                    batch=32,
                    waiting_for="rank 2" if rank == 0 and len(self.names) > 2 else None,
                ),
            )
            for rank in range(len(self.names))
        )
        all_ranks = tuple(range(len(self.names)))
        fields: dict[str, Any] = {
            "ranks": ranks,
            "members": self.members,
            "rounds": step,
            "ended_at_s": None,
            "generation": 2,
            "present": all_ranks,
            "learning": all_ranks,
            "hashes_compared": step // 10,
            "replicas_equal": True if step >= 10 else None,
            "prediction": Prediction(samples_s=125.0, alone_samples_s=75.0),
            "codec": "int8",
            "changes": self.jobs[JOB].changes if JOB in self.jobs else (),
        }
        self.jobs[JOB] = summary(JobState.RUNNING, **(fields | changes))

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member(device(at), name) for at, name in enumerate(self.names))

    async def answer(self, body: Wire, emit: Emit) -> Wire:
        if not isinstance(body, GetStatus | GetPeers | GetJobs | GetCourse | GetMachines | Fetch):
            self.asked.append(body)
        if self.failure is not None:
            raise RequestFailed(self.failure)
        match body:
            case GetStatus():
                return self._status()
            case GetPeers():
                return Peers(peers=tuple(self.peers))
            case GetJobs():
                return Found(jobs=tuple(job for job in self.jobs.values() if job.job.startswith(body.prefix)))
            case GetMachines():
                theirs = MachineState(busy=0.9, battery=0.41, plugged=False)
                linked = [one.device for one in self.peers if one.state == "linked"]
                return Machines(machines=((device(0), self.machine), *((one, theirs) for one in linked)))
            case GetCourse():
                return self._course(body.job)
            case ChangeSettings():
                return self._change(body)
            case Fetch():
                return await self._log(body)
            case PairHost():
                emit(PairCode(code="483-917", port=29610, expires_s=300.0, addresses=("192.168.1.20",)))
                await self.guest.wait()
                self.peers.append(peer(70, "dora"))
                return Paired(device=device(70), name="dora")
            case PairJoin():
                if body.code != "111-222":
                    raise RequestFailed("no device shows this code")
                self.peers.append(peer(71, "emil"))
                return Paired(device=device(71), name="emil")
            case PairAccept():
                self.peers = [
                    one.model_copy(update={"state": "linked"}) if one.device == body.peer else one for one in self.peers
                ]
                return Paired(device=body.peer, name=next(one.name for one in self.peers if one.device == body.peer))
            case Unpair():
                gone = next(one for one in self.peers if one.device == body.peer)
                self.peers.remove(gone)
                return Unpaired(removed=(Paired(device=gone.device, name=gone.name),), others=("carl",))
            case MeasureLinks():
                self.peers = [
                    one.model_copy(update={"measured": MEASURED}) if one.state == "linked" else one
                    for one in self.peers
                ]
                return LinksMeasured(failed=())
            case Cancel() | Leave():
                self._end(body.job)
                return Done()
        raise AssertionError(body)

    def _course(self, job: str) -> JobCourse:
        if self.settings is None:
            raise RequestFailed(f"how job {job} went is not known on this device")
        settings = tuple(self.settings.items())
        return JobCourse(summary=self.jobs[job], settings=settings, software=(), points=self.points, presence=())

    def _change(self, body: ChangeSettings) -> SettingsTaken:
        job = self.jobs[body.job]
        before = newest_codec(job.codec or "", job.changes)
        change = SettingsChange(first=job.rounds + 2, codec=body.codec or before, period=body.period)
        self.jobs[body.job] = job.model_copy(update={"changes": (*job.changes, change)})
        now, was = (SettingsInForce(codec=codec or "", period=0) for codec in (change.codec, before))
        return SettingsTaken(first=change.first, now=now, before=was)

    def _end(self, job: str) -> None:
        changes = {"state": JobState.CANCELLED.value, "ended_at_s": 1_790_000_900.0, "error": "cancelled on anna"}
        self.jobs[job] = self.jobs[job].model_copy(update=changes)

    def _status(self) -> Status:
        linked = [one for one in self.peers if one.state == "linked"]
        links = tuple(
            LinkTraffic(name=one.name, bytes_per_s=5e6, sent_bytes=self.sent_bytes, spared_bytes=0) for one in linked
        )
        changes: dict[str, Any] = {
            "device": device(0),
            "links": links,
            "peers_linked": len(linked),
            "warnings": self.warnings,
            "jobs_running": sum(job.ended_at_s is None for job in self.jobs.values()),
        }
        return STATUS.model_copy(update=changes)

    async def _log(self, body: Fetch) -> Fetched:
        if body.rank not in range(len(self.names)):
            raise RequestFailed(f"job {body.job} has no rank {body.rank}")
        log = self.logs.get(body.rank, b"")
        data = log[body.offset_bytes : body.offset_bytes + body.max_bytes]
        if not data and body.wait_s:
            await asyncio.sleep(0.05)
        return Fetched(data=data, total_bytes=len(log), end=False)


@asynccontextmanager
async def served(port: int | None = 0) -> AsyncIterator[Dashboard]:
    """Served while the block runs, once it is opened."""
    made = Dashboard(port)
    try:
        yield made
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await made.close()

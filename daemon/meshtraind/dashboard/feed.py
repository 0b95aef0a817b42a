"""What the page shows, looked at once a second while somebody watches, and told to all who do.

A reader gets the parts that have changed since it was told last, and nothing waits for it: a slow one misses what
others saw in between, and takes no memory. Nobody watches: nobody looks.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshtraind.dashboard.answers import Answers
from meshtraind.dashboard.codec_list import codec_list, read_prices
from meshtraind.dashboard.job_facts import WatchedJob, job_facts, overlap_of, still_runs
from meshtraind.dashboard.page_values import has_ended, shown, shown_job, shown_line
from meshtraind.dashboard.sessions import BrowserSession, Sessions
from meshtraind.dashboard.shown_code import ShownCode
from meshtraind.runtime.tasks import TaskSet
from meshtraind.runtime.threads import in_thread
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.course import GetCourse, JobCourse
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import (
    GetJobs,
    GetMachines,
    GetPeers,
    GetStatus,
    Machines,
    Peers,
    PeerSummary,
    Status,
)
from meshwire.peer_news import news

LOOK_S = 1.0
ALL_JOBS_S = 10.0  # a list of a thousand jobs takes 50 ms; those that have not ended are asked for at every look
MACHINE_S = 5.0  # sensors and the disk are slower than memory
HEARTBEAT_S = 15.0  # a reader that has gone is noticed by what is sent to it

Reply = TypeVar("Reply", bound=Wire)


@dataclass(frozen=True)
class _PagePart:
    """One part of the page, as it is told."""

    version: int
    text: str


@dataclass(frozen=True)
class _JobThatIsOver:
    """What is shown of it, and what that was made of. Thirty of 64 devices each take longer than a look may."""

    job: JobSummary
    settings: dict[str, str]
    shown: dict[str, Any]


class Feed:
    """The parts of the page, and who reads them."""

    def __init__(self, answers: Answers, code: ShownCode, sessions: Sessions) -> None:
        self._answers = answers
        self._code = code
        self._sessions = sessions
        self._parts: dict[str, _PagePart] = {}
        self._versions = 0
        self._changed = asyncio.Event()
        self._readers = 0
        self._closed = False
        self._tasks = TaskSet("dashboard")
        self._looking: asyncio.Task[None] | None = None
        self._jobs: dict[str, JobSummary] | None = None
        self._listed_s: float | None = None
        self._running = 0
        self._peers: dict[str, PeerSummary] | None = None
        self._joined: set[str] | None = None
        self._watched: dict[str, WatchedJob] = {}
        self._over: dict[str, _JobThatIsOver] = {}
        self._machine_s: float | None = None  # when the machine was looked at last
        self._events: deque[dict[str, Any]] = deque(maxlen=limits.DASHBOARD_EVENTS_MAX)
        self._told = 0  # events, ever

    @property
    def full(self) -> bool:
        """No further reader is taken."""
        return self._closed or self._readers >= limits.DASHBOARD_STREAMS_MAX

    async def read(self, session: BrowserSession) -> AsyncIterator[bytes]:
        """The event stream of one page, until its session ends."""
        self._readers += 1
        if self._looking is None:
            self._looking = self._tasks.spawn(self._look_again_and_again(), "look")
            self._looking.add_done_callback(lambda _: self._wake())
        sent: dict[str, int] = {}
        sent_s = time.monotonic()
        try:
            while self._sessions.holds(session) and not self._closed and not self._looking.done():
                changed = self._changed
                fresh = [(name, part) for name, part in self._parts.items() if sent.get(name) != part.version]
                sent = {name: part.version for name, part in self._parts.items()}
                if fresh or time.monotonic() - sent_s > HEARTBEAT_S:
                    sent_s = time.monotonic()
                    yield "".join(part.text for _, part in fresh).encode() or b":\n\n"
                await changed.wait()  # at every look; when those end, so does this
        finally:
            self._readers -= 1
            if not self._readers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def close(self) -> None:
        """Ends all readers."""
        self._closed = True
        self._wake()
        await self._tasks.close()

    def soon(self) -> None:
        """Something was done: what has become of it is looked at once more, all jobs included."""
        self._listed_s = None

    async def _look_again_and_again(self) -> None:
        while True:
            try:
                await self._look()
                self._set("problem", "problem", None)
            except RequestFailed as error:
                self._set("problem", "problem", shown_line(str(error)))
            self._wake()  # readers look whether they are still let in
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        status = await self._ask(GetStatus(), Status)
        peers = (await self._ask(GetPeers(), Peers)).peers
        jobs = await self._list_jobs(status)
        now_s = time.time()
        self._tell_of_peers(status, peers, now_s)
        self._tell_of_jobs(jobs, now_s)
        await self._look_at_machine(status)
        self._choose(jobs)
        await self._ask_of_courses(jobs)
        self._draw(jobs)
        self._jobs = {job.job: job for job in jobs}
        steady = shown(status)
        del steady["up_s"]  # which changes at every look
        self._set("status", "status", steady)
        self._set("peers", "peers", [shown(peer) for peer in peers])
        self._set("jobs", "jobs", [self._shown_over(job) if has_ended(job) else self._shown_job(job) for job in jobs])
        self._set("events", "events", list(self._events))
        self._set("pairing", "pairing", shown(self._code.state))

    async def _list_jobs(self, status: Status) -> list[JobSummary]:
        """The newest jobs, those that have not ended as they are now."""
        now_s = time.monotonic()
        if self._listed_s is None or now_s - self._listed_s > ALL_JOBS_S or status.jobs_running != self._running:
            found = await self._ask(GetJobs(), Found)
            self._listed_s, self._running = now_s, status.jobs_running
            return list(found.jobs[: limits.DASHBOARD_JOBS_MAX])
        jobs = []
        for job in (self._jobs or {}).values():
            if has_ended(job):
                jobs.append(job)
            else:
                found = await self._ask(GetJobs(prefix=job.job), Found)
                jobs.append(next((one for one in found.jobs if one.job == job.job), job))
        return jobs

    async def _look_at_machine(self, status: Status) -> None:
        now_s = time.monotonic()
        if self._machine_s is not None and now_s - self._machine_s < MACHINE_S:
            return
        self._machine_s = now_s
        machines = (await self._ask(GetMachines(), Machines)).machines
        self._set("machines", "machines", {device: shown(state) for device, state in machines})
        prices = await in_thread(lambda _: read_prices(Path(status.data_dir)))
        self._set("codecs", "codecs", shown(codec_list(prices)))

    def _choose(self, jobs: Sequence[JobSummary]) -> None:
        """More is kept of the newest jobs, of those that have not ended first."""
        chosen = [job.job for job in sorted(jobs, key=has_ended)][: limits.DASHBOARD_CHARTS_MAX]
        for gone in self._over.keys() - {job.job for job in jobs}:
            del self._over[gone]
        for gone in self._watched.keys() - set(chosen):
            del self._watched[gone]
            self._parts.pop(f"chart {gone}", None)
        for job in chosen:
            self._watched.setdefault(job, WatchedJob())

    async def _ask_of_courses(self, jobs: Sequence[JobSummary]) -> None:
        """What is kept of a job that this device is in: asked for once, of one job at a look."""
        now_s = time.monotonic()
        for job in jobs:
            one = self._watched.get(job.job)
            if one is None or one.settings:
                continue
            if one.asked_s is not None and (has_ended(job) or now_s - one.asked_s < ALL_JOBS_S):
                continue
            one.asked_s = now_s
            try:
                one.take(await self._ask(GetCourse(job=job.job), JobCourse))
            except RequestFailed:  # it is in no course of this device: other devices run it, or its files have expired
                return
            self._set(f"chart {job.job}", "chart", one.chart.shown(job.job))
            return

    def _shown_over(self, job: JobSummary) -> dict[str, Any]:
        """Made once, for nothing of it changes any more."""
        settings = self._watched.get(job.job, WatchedJob()).settings
        kept = self._over.get(job.job)
        if kept is None or kept.job != job or kept.settings != settings:
            kept = self._over[job.job] = _JobThatIsOver(job, settings, self._shown_job(job))
        return kept.shown

    def _shown_job(self, job: JobSummary) -> dict[str, Any]:
        one = self._watched.get(job.job, WatchedJob())
        told = shown_job(job)
        metrics = {report.rank: report.metrics for report in job.ranks}
        for rank, member in enumerate(told["members"]):
            member["overlap"] = overlap_of([metrics[rank]]) if rank in metrics else None
            member["sends_bytes_s"] = one.traffic.rates.get(rank)
        runs = still_runs(job)
        return told | {
            "facts": job_facts(job, one),
            "prediction": shown(job.prediction and job.prediction.model_dump(include={"samples_s", "alone_samples_s"})),
            "changes": runs,
            "links": one.traffic.links(job, one.settings) if runs else [],
            "owed": one.traffic.owed(job, one.settings) if runs else [],
        }

    async def _ask(self, body: Wire, kind: type[Reply]) -> Reply:
        reply = await self._answers.answer(body, lambda _event: None)
        assert isinstance(reply, kind)
        return reply

    # What has happened, in plain words

    def _tell_of_peers(self, status: Status, peers: Iterable[PeerSummary], now_s: float) -> None:
        after = {peer.device: peer for peer in peers}
        joined = {one.device for one in status.joined}
        if self._peers is not None and self._joined is not None:
            for one in status.joined:
                if one.device not in self._joined:
                    self._event(now_s, f"{shown_line(one.name)} joined, added by {shown_line(one.added_by)}")
            for device in sorted(after.keys() | self._peers.keys()):
                text = _link_news(self._peers.get(device), after.get(device))
                if text is not None:
                    self._event(now_s, text)
        self._peers, self._joined = after, joined

    def _tell_of_jobs(self, jobs: Iterable[JobSummary], now_s: float) -> None:
        if self._jobs is None:
            return
        for job in jobs:
            before = self._jobs.get(job.job)
            name = f"{shown_line(job.name)} ({job.job})"
            if before is None:
                self._event(now_s, f"{name} is here: {shown_line(job.state)}", job.job)
                continue
            for line in news(before, job):
                self._event(now_s, f"{name}: {line}", job.job)
            if job.state != before.state:
                self._event(now_s, f"{name} is {shown_line(job.state)}", job.job)

    def _event(self, at_s: float, text: str, job: str | None = None) -> None:
        self._told += 1
        self._events.append({"number": self._told, "at_s": at_s, "text": text[:1000], "job": job})

    # Curves

    def _draw(self, jobs: Iterable[JobSummary]) -> None:
        now_s = time.monotonic()
        for job in jobs:
            one = self._watched.get(job.job)
            if one is None or has_ended(job):
                continue
            one.traffic.look(job, one.settings, now_s)
            if one.chart.look(job, now_s):
                self._set(f"chart {job.job}", "chart", one.chart.shown(job.job))

    # Parts

    def _set(self, name: str, event: str, value: Any) -> None:
        text = f"event: {event}\ndata: {json.dumps(value, allow_nan=False)}\n\n"
        known = self._parts.get(name)
        if known is None or known.text != text:
            self._versions += 1
            self._parts[name] = _PagePart(self._versions, text)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _link_news(before: PeerSummary | None, after: PeerSummary | None) -> str | None:
    """What has happened to the link with a device; None: nothing that a person is told."""
    states = (before.state if before is not None else None, after.state if after is not None else None)
    if states[0] == states[1]:
        return None
    one = after or before
    assert one is not None
    name = shown_line(one.name)
    match states:
        case (_, "linked"):
            return f"{name} is linked"
        case ("linked", "paired"):
            return f"{name} cannot be reached any more"
        case ("linked" | "paired", _):
            return f"{name} was removed"
        case (_, "waiting"):
            return f"{name} waits for your word"
        case (_, "paired"):
            return f"{name} is paired"
    return None

"""m daemons' parts of one job in one process, of which one may lie: real membership, rounds, executors and passages
from one generation to the next. Links are queues, learners are arithmetic, and lies are told on the way.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from meshtraind.job_start.prepared import DescribedModel
from meshtraind.jobs.routing import JobRouter
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.member_handler import MemberHandler
from meshtraind.session.membership_host import JobPlace, MembershipHost
from meshtraind.session.rounds_factory import RoundsFactory
from meshtraind.storage.job_record import Job
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, job_number, new_job_id
from meshwire.membership.effects import Message as OfMembership
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.job import BlobRef, End, JobSpec, Member, Metrics, RankReport
from meshwire.messages.learner import (
    LearnerApplied,
    LearnerBucket,
    LearnerSealed,
    LearnerStepped,
    RoundDone,
    Start,
)
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from meshwire.rounds.stall import StallWatch
from meshwire.sync_modes.mode import sync_settings
from meshwire.timeouts import Timeouts
from tests.computing import computing
from tests.unpacedlink import UnpacedLink

Values = NDArray[np.float32]
Frame = tuple[Header, bytes | Wire | None]
Lie = Callable[[Header, bytes | Wire | None], Iterable[Frame] | str]
"""What becomes of a frame of the liar; a text: it cannot be read, as its receiver says."""

MANIFEST = ModelManifest(
    tensors=(
        *(
            TensorSpec(name=f"layer{index}", shape=(count,), dtype="float32", kind="parameter")
            for index, count in enumerate((700, 5, 400, 300))
        ),
        TensorSpec(name="running_mean", shape=(90,), dtype="float32", kind="buffer"),
    ),
    optimizer="SGD",
)
BUCKET_BYTES = 1024
PLAN = plan_buckets(MANIFEST, BUCKET_BYTES)
JOB = new_job_id(bytes(8))
PATIENCE_S = 2.0
STALL_S = 0.4


class Line(UnpacedLink):
    """One direction of a link."""

    chunk_payload_bytes_sent = 0
    chunk_bytes_received = 0
    name = "a line"

    def __init__(self, sender: "Peer", receiver: "Peer") -> None:
        self.sender, self.receiver = sender, receiver
        self.writable = True
        self.back: Line
        self._queue: deque[Frame] = deque()

    def notify(self, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        self._put((Header(Kind.CONTROL, 1, job=job, generation=generation, complete=complete), body))

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        self._put((header, None if payload is None else bytes(payload)))

    def _put(self, frame: Frame) -> None:
        told: Iterable[Frame] | str = [frame] if self.sender.lie is None else self.sender.lie(*frame)
        if isinstance(told, str):
            text = told
            asyncio.get_running_loop().call_soon(lambda: self.receiver.violated(self.sender.member.device, text))
            return
        for one in told:
            self._queue.append(one)
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        header, content = self._queue.popleft()
        if self.sender.alive and self.receiver.alive:
            if header.kind is Kind.CHUNK:
                self.back.chunk_bytes_received += header.payload_bytes
            self.receiver.take(self.sender.member.device, header, content)

    def on_writable(self, _callback: object) -> Callable[[], None]:
        return lambda: None

    def refuse(self, text: str) -> None:
        raise AssertionError(f"{self.sender.member.name} closes its link to {self.receiver.member.name}: {text}")

    def socket_bytes_sent(self) -> tuple[int, str]:
        return 0, "link"


class Owner:
    """What a job's session is to those that hear its members."""

    def __init__(self, device: "Peer") -> None:
        self._device = device

    @property
    def rounds(self) -> Any:
        return self._device.learner.rounds

    def member_reported(self) -> None:
        pass

    def member_ended(self, rank: int, end: End) -> None:
        self._device.ends.append((rank, end))


class Peer:
    """One daemon's part, and its learner.

    Attributes:
        means: by round, as the learner was given them; `contributors` likewise.
        failed: why the job has ended here.
    """

    def __init__(self, mesh: "LiarMesh", rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.member = mesh.members[rank]
        self.lie: Lie | None = None
        self.alive = True
        self.means: dict[int, bytes] = {}
        self.contributors: dict[int, int] = {}
        self.failed: list[str] = []
        self.ends: list[tuple[int, End]] = []
        self.cuts: list[int] = []
        self.links: dict[str, Any] = {}
        folder = Path("/nowhere")
        history = SimpleNamespace(put=lambda _record: None)
        self.job = Job(mesh.spec, mesh.members, rank, folder, cast(Any, history))
        for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
            self.job.advance(event)
        self.job.take(mesh.generation)
        self.tasks = TaskSet("test", lambda name, error: self.failed.append(f"{name}: {error!r}"))

    def begin(self) -> None:
        mesh, nothing = self.mesh, lambda *_args: None
        node = SimpleNamespace(
            links=self.links,
            member=self.member,
            device=self.member.device,
            name=self.member.name,
            patience_s=PATIENCE_S,
        )
        connections = {
            rank: self.links[m.device].connection for rank, m in enumerate(mesh.members) if m.device in self.links
        }
        self.learner = SimpleNamespace(
            rounds=None, requests=None, ready=True, has_base=True, notify=self._told, let_go=nothing, begin_anew=nothing
        )
        barriers = SimpleNamespace(entered=nothing, wake=nothing, in_barrier=lambda _rank: False, begin_anew=nothing)
        quiet = SimpleNamespace(
            entered=nothing, round_complete=nothing, forget=nothing, newest=None, newest_round=lambda: None
        )
        keeper = SimpleNamespace(
            begin_learner=nothing, end_learner=nothing, learner_comes=True, learner_failed=False, lie_down=nothing,
            generation_changed=self._changed, fail=self.failed.append, why_none_learns=lambda: "nobody learns",
            turned_away=self.failed.append, learner_given_up=False,
        )  # fmt: skip
        maker = RoundsFactory(self.job, connections, 0.001, Timeouts(patience_s=PATIENCE_S).stall_s)
        maker.memory.make(MemoryLayout.for_bound(PLAN.total_values, mesh.spec.sync.staleness))
        self.memory = maker.memory
        place = JobPlace(cast(Any, node), self.job, connections, 0.001, self.tasks, cast(Any, None))
        self.passage = MembershipHost(
            place, cast(Any, self.learner), cast(Any, barriers), cast(Any, quiet), cast(Any, quiet), maker, keeper
        )
        prepared = DescribedModel(MANIFEST, PLAN, None)
        self.rounds = self.learner.rounds = maker.first(self.passage, prepared, mesh.generation, Entry(anew=True))
        self.rounds._stall = StallWatch(STALL_S)
        self.passage.begin_with_all()
        self.passage._begun = True
        self.members = MemberHandler(self.job, cast(Any, barriers), self.passage, Owner(self))
        assert self.passage.generations is not None
        self.passage.generations.lead(self.rounds.crossing)
        self.rounds.learner.loads()
        self.rounds.learner.loaded(0)
        self.rounds.crossing.take_in()

    def _changed(self) -> None:
        if self.job.generation is not None and self.learner.rounds is not None:
            self.cuts.append(self.rounds.complete)

    # What comes on links, as the router and the links do it

    def take(self, device: str, header: Header, content: bytes | Wire | None) -> None:
        sessions: dict[str, Any] = {JOB: SimpleNamespace(job=self.job, members=self.members, passage=self.passage)}
        registry = SimpleNamespace(session=sessions.get, id_of={job_number(JOB): JOB}.get)
        router: Any = SimpleNamespace(registry=registry)
        if header.kind is Kind.CHUNK:
            place = JobRouter.chunk_announced(router, device, header)
            assert not isinstance(place, str), place
            if place is not None:
                assert content is None or isinstance(content, bytes)
                place[:] = content or b""
                JobRouter.chunk_received(router, device, header)
        elif isinstance(content, OfMembership):
            assert self.passage.generations is not None
            self.passage.generations.notice(device, content)
        else:
            assert isinstance(content, Wire)
            assert JobRouter._to_session(router, sessions[JOB], device, header, content) is None

    def violated(self, device: str, text: str) -> None:
        session = SimpleNamespace(job=self.job, passage=self.passage)
        router: Any = SimpleNamespace(registry=SimpleNamespace(sessions=(session,)))
        JobRouter.violated(router, device, text)

    def report(self) -> None:
        """As once a second."""
        if self.alive and self.learner.rounds is not None:
            metrics = Metrics(receipts=self.rounds.measures()["receipts"])
            report = RankReport(job=JOB, rank=self.rank, state="running", metrics=metrics)
            generation = self.job.generation
            assert generation is not None
            for link in list(self.links.values()):
                link.connection.notify(
                    report, job=job_number(JOB), generation=generation.hash64(), complete=self.rounds.complete
                )
            self.passage.look_for_stalls()

    def linked(self, other: "Peer", line: Line) -> None:
        self.links[other.member.device] = SimpleNamespace(
            connection=line, hello=SimpleNamespace(incarnation=other.member.incarnation), rtt_s=0.001
        )

    def die(self) -> None:
        """As kill -9 does."""
        self.alive = False
        self.close()
        for other in self.mesh.peers:
            if other.alive and other.links.pop(self.member.device, None) is not None:
                other.passage.link_lost(self.member.device, "it was killed")

    # The learner: its gradient is a function of rank and step

    def _told(self, body: Wire) -> None:
        asyncio.get_running_loop().call_soon(self._follow, body)

    def _follow(self, body: Wire) -> None:
        if not self.alive or self.learner.rounds is None:
            return
        learner = self.rounds.learner
        match body:
            case Start(step=step) if step > self.mesh.steps:
                learner.gone("it has finished")
            case Start(step=step):
                if step == self.mesh.dies.get(self.rank):
                    self.die()
                    return
                values = np.random.default_rng((self.rank, step)).standard_normal(PLAN.total_values)
                np.frombuffer(self.memory.raw(step), np.float32)[:] = values
                for bucket in PLAN.buckets:
                    learner.bucket(LearnerBucket(step=step, bucket=bucket.index, weight=self.rank + 1.0))
                learner.sealed(LearnerSealed(step=step, used=bytes(MANIFEST.used_bytes), integers=()))
                learner.stepped(LearnerStepped(step=step, samples=1, step_s=0.01, exposed_s=0.0))
            case RoundDone(round=round_):
                self.means[round_] = bytes(self.memory.result()) if not body.void else b""
                self.contributors[round_] = body.contributors
                learner.applied(LearnerApplied(round=round_).round)

    def close(self) -> None:
        self.passage.close()
        if self.learner.rounds is not None:
            self.rounds.close()


class LiarMesh:
    """All of them.

    Args:
        steps: that each learner takes.
        dies: before which step a rank is killed.
    """

    def __init__(
        self, members: int, codec: str, steps: int, *, sync: str = "bsp", dies: Mapping[int, int] | None = None
    ) -> None:
        self.steps = steps
        self.dies = dies or {}
        self.members = tuple(
            Member(device=f"{rank + 1:064x}", incarnation=7, name=f"n{rank}") for rank in range(members)
        )
        self.generation = computing(JOB, self.members[0].device, self.members)
        self.spec = JobSpec(
            job=JOB, name="test", submitter="0" * 64, created_at_s=0.0, script="train.py", args=(), env=(),
            files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings(sync, shares="equal"),
            codec=codec, on_nan="stop", seed=0, bucket_bytes=BUCKET_BYTES, hash_every=0, trace=False,
        )  # fmt: skip
        self.peers = [Peer(self, rank) for rank in range(members)]

    async def run(self, ranks: Iterable[int], seconds: float = 20.0) -> None:
        """Until these have applied the last round."""
        for one, other in itertools.combinations(self.peers, 2):
            ways = Line(one, other), Line(other, one)
            for way, back in zip(ways, reversed(ways), strict=True):
                way.back = back
            one.linked(other, ways[0])
            other.linked(one, ways[1])
        for peer in self.peers:
            peer.begin()
        waits_for = list(ranks)
        try:
            async with asyncio.timeout(seconds):
                while any(self.steps not in self.peers[rank].means for rank in waits_for):
                    await asyncio.sleep(0.02)
                    for peer in self.peers:
                        peer.report()
        finally:
            self.said = [(peer.failed, peer.job.waiting) for peer in self.peers]
            for peer in self.peers:
                if peer.alive:
                    peer.close()
            await asyncio.gather(*(peer.tasks.close() for peer in self.peers))


def at_round(number: int, lie: Lie) -> Lie:
    """Honest before."""

    def told(header: Header, content: bytes | Wire | None) -> Iterable[Frame] | str:
        round_ = header.round if header.kind is Kind.CHUNK else getattr(content, "round", 0)
        return lie(header, content) if round_ >= number else [(header, content)]

    return told


def of_chunks(change: Callable[[Header, bytes], Frame | str | None], *, payload: bool = True) -> Lie:
    """Changes chunks alone: those that have a payload, or all."""

    def told(header: Header, content: bytes | Wire | None) -> Iterable[Frame] | str:
        if header.kind is not Kind.CHUNK or (payload and content is None):
            return [(header, content)]
        assert content is None or isinstance(content, bytes)
        changed = change(header, content or b"")
        return changed if isinstance(changed, str) else [changed] if changed is not None else []

    return told


def header_of(**changes: Callable[[Header], Any]) -> Lie:
    """Says something else in the headers of chunks."""

    def change(header: Header, content: bytes) -> Frame:
        said = replace(header, **{name: value(header) for name, value in changes.items()})
        return said, content or None

    return of_chunks(change)

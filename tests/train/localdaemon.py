"""A reference daemon for learners in one process: the same local endpoint, and rounds averaged plainly with numpy."""

import contextlib
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshtrain.train.environment import Environment
from meshtrain.train.session import Session
from meshwire.header import Header, Kind
from meshwire.local import MemoryLayout
from meshwire.manifest import first_difference
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.local import (
    Attach,
    LearnerApplied,
    LearnerBarrier,
    LearnerBucket,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerSealed,
    LearnerState,
    LearnerWelcome,
    RoundDone,
    StateTask,
    Stop,
)
from meshwire.parser import Broken, ControlReceived, FrameParser
from meshwire.plan import Plan, plan_buckets
from meshwire.wiretypes import Wire

JOB = "1kx3m9q2v7bd"
NAMES = ("anna", "bert", "cleo", "dora")
WAIT_TIMEOUT_S = 30.0

T = TypeVar("T")


def make_spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job": JOB,
        "name": "test",
        "submitter": "0" * 64,
        "created_at_s": 0.0,
        "script": "train.py",
        "args": (),
        "env": (),
        "files": BlobRef(sha256=bytes(32), size_bytes=0),
        "data": None,
        "sync": "bsp",
        "codec": "fp32",
        "on_nan": "stop",
        "seed": 7,
        "bucket_bytes": 4096,
        "hash_every": 1,
        "trace": False,
    }
    return JobSpec(**{**fields, **changes})


class LocalDaemon:
    """All daemons of a job at once. Use as a context manager; `run` gives every rank a thread."""

    def __init__(self, members: int, *, staleness: int = 0, **spec: Any) -> None:
        self.members = members
        self.spec = make_spec(**spec)
        self.staleness = staleness
        self.lock = threading.Condition()
        self.models: dict[int, LearnerModel] = {}
        self.states: dict[int, tuple[bytes, ...]] = {}
        self.ready: set[int] = set()
        self.barriers_reached: dict[int, int] = {}
        self.buckets: dict[int, dict[int, list[LearnerBucket]]] = {}  # by round and rank
        self.seals: dict[int, dict[int, LearnerSealed]] = {}
        self.applied: list[tuple[int, LearnerApplied]] = []
        self.hashes: dict[int, dict[int, bytes]] = {}
        self.logs: list[tuple[int, LearnerLog]] = []
        self.idle: set[int] = set()
        self.events: list[str] = []  # in the order in which they reached the daemons
        self.stopped = False
        self.silent = False  # answers nothing any more
        self.round = 0

    def __enter__(self) -> "LocalDaemon":
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "state").mkdir()
        self.descriptors = [os.memfd_create(f"learner-{rank}") for rank in range(self.members)]
        self._listeners = []
        self._streams: dict[int, socket.socket] = {}
        self._threads = []
        for rank in range(self.members):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self.folder / f"{rank}.sock"))
            listener.listen()
            self._listeners.append(listener)
            thread = threading.Thread(target=self._serve, args=(rank, listener), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # it may have ended already
                stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_TIMEOUT_S)
        for stream in self._streams.values():
            stream.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._folder.cleanup()

    def environment(self, rank: int) -> Environment:
        return Environment(
            endpoint=f"unix:{self.folder / f'{rank}.sock'}",
            token="secret",
            job=JOB,
            memory_fd=self.descriptors[rank],
        )

    def run(self, script: Callable[[Session, int], T]) -> list[T]:
        """Runs the script once per rank, each in a thread with a session that is finished at the end.

        When one fails the others are stopped, as a job would; the first error is raised.
        """
        errors: list[Exception] = []

        def learner(rank: int) -> T:
            session = Session.attach(self.environment(rank))
            try:
                return script(session, rank)
            except Exception as error:
                errors.append(error)
                self.stop(f"rank {rank} failed")
                raise
            finally:
                session.finish()

        with ThreadPoolExecutor(self.members) as pool:
            results = [pool.submit(learner, rank) for rank in range(self.members)]
        if errors:
            raise errors[0]
        return [result.result() for result in results]

    def stop(self, reason: str) -> None:
        for rank in list(self._streams):
            self._send(rank, Envelope(Role.NOTICE, 0, Stop(reason=reason)))
        with self.lock:
            self.stopped = True
            self.lock.notify_all()

    # One connection

    def _serve(self, rank: int, listener: socket.socket) -> None:
        try:
            stream, _ = listener.accept()
        except OSError:
            return
        self._streams[rank] = stream
        parser = FrameParser()
        while True:
            try:
                count = stream.recv_into(parser.buffer())
            except OSError:
                return
            if not count:
                with contextlib.suppress(OSError):  # the other side may be faster
                    stream.shutdown(socket.SHUT_WR)
                return
            event = parser.received(count)
            assert not isinstance(event, Broken), event
            if isinstance(event, ControlReceived):
                envelope = decode(event.payload)
                assert isinstance(envelope, Envelope), envelope
                if not self.silent:
                    self._take(rank, envelope)

    def _send(self, rank: int, envelope: Envelope) -> None:
        payload = encode(envelope)
        with contextlib.suppress(OSError):  # the learner may have ended; whoever waits for it has a deadline
            self._streams[rank].sendall(Header(Kind.CONTROL, len(payload)).encode() + payload)

    def _take(self, rank: int, envelope: Envelope) -> None:
        if envelope.role is Role.NOTICE:
            self._notice(rank, envelope.body)
            return
        try:
            reply = Envelope(Role.REPLY, envelope.id, self._answer(rank, envelope.body))
        except ValueError as error:
            reply = Envelope(Role.FAILURE, envelope.id, Failure(error=str(error)))
        self._send(rank, reply)

    def _answer(self, rank: int, body: Wire) -> Wire:
        everyone = set(range(self.members))
        match body:
            case Attach(token=token):
                assert token == "secret"
                members = tuple(Member(device=f"{n:064x}", incarnation=1, name=NAMES[n]) for n in range(self.members))
                return LearnerWelcome(
                    spec=self.spec,
                    rank=rank,
                    members=members,
                    staleness=self.staleness,
                    data_dir=None,
                    output_dir=str(self.folder / f"out{rank}"),
                )
            case LearnerModel():
                self._put(self.models, rank, body)
                self._until(lambda: set(self.models) == everyone)
                difference = first_difference(self.models[0].manifest, body.manifest)
                if difference is not None:
                    raise ValueError(f"the models of rank 0 and rank {rank} differ: {difference}")
                return Done()
            case LearnerState(units=units):
                self._put(self.states, rank, units)
                self._until(lambda: set(self.states) == everyone)
                wanted = sorted(self._wanted(rank) if rank else {n for other in everyone for n in self._wanted(other)})
                if rank:
                    self._until(lambda: not wanted or 0 in self.ready)
                return StateTask(units=tuple(wanted), folder=str(self.folder / "state"))
            case LearnerReady():
                with self.lock:
                    self.ready.add(rank)
                    self.lock.notify_all()
                self._until(lambda: self.ready == everyone)
                return Done()
            case LearnerBarrier(number=number):
                self._put(self.barriers_reached, rank, number)
                self._until(lambda: all(self.barriers_reached.get(other, 0) >= number for other in everyone))
                return Done()
        raise ValueError(f"not a learner's request: {body}")

    def _wanted(self, rank: int) -> set[int]:
        return {unit for unit, digest in enumerate(self.states[0]) if digest != self.states[rank][unit]}

    def _notice(self, rank: int, body: Wire) -> None:
        with self.lock:
            match body:
                case LearnerBucket():
                    self.buckets.setdefault(body.step, {}).setdefault(rank, []).append(body)
                    self.events.append(f"{rank} bucket {body.bucket} of step {body.step}")
                case LearnerSealed():
                    self.seals.setdefault(body.step, {})[rank] = body
                case LearnerApplied():
                    self.applied.append((rank, body))
                case LearnerHash():
                    self.hashes.setdefault(body.round, {})[rank] = body.sha256
                case LearnerLog():
                    self.logs.append((rank, body))
                case LearnerIdle():
                    self.idle.add(rank)
            self._complete_round()

    # Rounds, in lockstep: step k of every learner is round k

    def _complete_round(self) -> None:
        number = self.round + 1
        seals = self.seals.get(number, {})
        taking_part = set(range(self.members)) - self.idle | set(seals)
        if not seals or set(seals) != taking_part:
            return
        self.round = number
        binds = {rank: self.buckets[number][rank] for rank in sorted(seals)}
        plan = plan_buckets(self.models[0].manifest, self.spec.bucket_bytes)
        for rank, buckets in binds.items():
            assert [bucket.bucket for bucket in buckets] == list(range(len(plan.buckets))), "in the plan's order, once"
            assert len({(bucket.weight, bucket.samples) for bucket in buckets}) == 1, "R2: one weight a step"
            assert len(seals[rank].used) == math.ceil(len(self.models[0].manifest.tensors) / 8)
            assert len(seals[rank].integers) == self.models[0].manifest.integer_values
        poisons = [(rank, b.poison) for rank, buckets in binds.items() for b in buckets if b.poison is not None]
        weight = sum(buckets[0].weight for buckets in binds.values())
        used = 0
        for seal in seals.values():
            used |= int.from_bytes(seal.used)
        if not poisons:
            self._average(plan, list(binds), weight)
        done = RoundDone(
            round=number,
            step=number,
            void=bool(poisons),
            reason="; ".join(f"rank {rank}: {p.parameter}: {p.reason} (bucket {p.bucket})" for rank, p in poisons),
            stop=bool(poisons) and self.spec.on_nan == "stop",
            weight=weight,
            contributors=sum(1 << rank for rank in binds),
            used=used.to_bytes(len(next(iter(seals.values())).used)),
            integers=tuple(max(values) for values in zip(*(seal.integers for seal in seals.values()), strict=True)),
        )
        for rank in binds:
            self._send(rank, Envelope(Role.NOTICE, 0, done))

    def _average(self, plan: Plan, ranks: list[int], weight: float) -> None:
        """O1: sum(w*g) / sum(w), in fp32 and in rank order, into every result slot."""
        layout = MemoryLayout.for_bound(plan.total_values, 0)
        maps = {rank: np.memmap(self._file(rank), np.float32, "r+", shape=(layout.total_bytes // 4,)) for rank in ranks}
        total = np.zeros(layout.values, np.float32)
        for rank in ranks:
            total += maps[rank][: layout.values]
        mean = total / np.float32(weight)
        for rank in ranks:
            maps[rank][layout.result_offset // 4 :][: layout.values] = mean

    def _file(self, rank: int) -> str:
        return f"/proc/self/fd/{self.descriptors[rank]}"

    def _put(self, where: dict[int, T], rank: int, value: T) -> None:
        with self.lock:
            where[rank] = value
            self.lock.notify_all()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        with self.lock:
            come = self.lock.wait_for(lambda: self.stopped or condition(), max(0.0, deadline_s - time.monotonic()))
            if not come or self.stopped:
                raise ValueError("the other learners did not come")

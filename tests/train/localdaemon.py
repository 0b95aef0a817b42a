"""A reference daemon for learners in one process: the same local endpoint, and the plain rounds of `localrounds`."""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshtrain.errors import MeshtrainError
from meshtrain.train.link.environment import Environment
from meshtrain.train.session import LearnerSession
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header, Kind
from meshwire.frames.parser import Broken, ControlReceived, FrameParser
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.learner import (
    EncoderTask,
    EpochOver,
    LearnerApplied,
    LearnerBucket,
    LearnerEncoder,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerSaved,
    LearnerSealed,
    LearnerState,
    LearnerStepped,
    LearnerTurn,
    LearnerWelcome,
    Save,
    Shown,
    StateTask,
    Stop,
    TurnNews,
)
from meshwire.messages.local import Attach
from meshwire.model.manifest import first_difference
from meshwire.model.plan import plan_buckets
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.neighbours import NEIGHBOURS_MAX, Turn, neighbours
from meshwire.sync_modes.rate_rule import RateRule
from tests.train.localrounds import LocalRounds, Values

JOB = "1kx3m9q2v7bd"
NAMES = ("anna", "bert", "cleo", "dora")
WAIT_TIMEOUT_S = 30.0
AT_THE_SCRIPTS_RATE: Mapping[str, Any] = {"scale_lr": RateRule(kind="none")}
"""Where local steps are compared with a definition that knows nothing of O13."""

T = TypeVar("T")


def make_spec(
    *,
    sync: SyncSettings | str = "bsp",
    straggler: str | None = None,
    visibility: str | None = None,
    own: str | None = None,
    shares: str = "equal",
    **changes: Any,
) -> JobSpec:
    """`sync` as settings, or as text that the options after it complete, as `meshtrain submit` does."""
    if isinstance(sync, str):
        sync = sync_settings(sync, straggler, visibility, own, shares)
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
        "sync": sync,
        "codec": "fp32",
        "on_nan": "stop",
        "seed": 7,
        "bucket_bytes": 4096,
        "hash_every": 1,
        "trace": False,
    }
    return JobSpec(**{**fields, **changes})


class LocalDaemon:
    """All daemons of a job at once. Use as a context manager; `run` gives every rank a thread.

    Args:
        promises: as of `LocalRounds`.
        spec: see `make_spec`.

    Attributes:
        rounds: under `lock`.
        buckets, seals: by step and rank.
        events: in the order in which they reached the daemons.
        silent: set it, and learners hear nothing any more.
        loses: which weights that a rank (the first) shows another one (the second) in a turn never come.
    """

    def __init__(self, members: int, *, promises: bool = True, **spec: Any) -> None:
        self.members = members
        self.spec = make_spec(**spec)
        self.lock = threading.Condition()
        self.rounds = LocalRounds(self.spec, members, self.notify, self._raw_slot, self._result_slot, promises=promises)
        self.models: dict[int, LearnerModel] = {}
        self.states: dict[int, tuple[bytes, ...]] = {}
        self.ready: set[int] = set()
        self.buckets: dict[int, dict[int, list[LearnerBucket]]] = {}
        self.seals: dict[int, dict[int, LearnerSealed]] = {}
        self.applied: list[tuple[int, LearnerApplied]] = []
        self.stepped: list[tuple[int, LearnerStepped]] = []
        self.hashes: dict[int, dict[int, bytes]] = {}
        self.logs: list[tuple[int, LearnerLog]] = []
        self.idle: list[tuple[int, LearnerIdle]] = []
        self.saved: list[tuple[int, LearnerSaved]] = []
        self.encoders: list[tuple[int, LearnerEncoder]] = []
        self.events: list[str] = []
        self.stopped = False
        self.silent = False
        self.loses: Callable[[int, int, Turn], bool] = lambda _sender, _receiver, _turn: False
        self._turns: dict[int, Turn] = {}  # that each rank is in
        self._shown: dict[tuple[Turn, int], bytes] = {}
        self._errors: list[Exception] = []  # of learners against the protocol
        self._told_ready: set[int] = set()
        self._given: dict[int, LearnerSaved] = {}  # the start state, by rank that loads it
        self._maps: dict[int, Values] = {}
        self._begins_from: StateTask | None = None
        self.epochs_over = 0  # that learners are told of with their state

    @property
    def round(self) -> int:
        """The newest complete round."""
        return self.rounds.complete

    def __enter__(self) -> "LocalDaemon":
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "state").mkdir()
        self.descriptors = [os.memfd_create(f"learner-{rank}") for rank in range(self.members)]
        self.kept = [os.memfd_create(f"kept-{rank}") for rank in range(self.members)]
        self._listeners = []
        self._streams: dict[int, socket.socket] = {}
        self._left: set[int] = set()
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

    def __exit__(self, kind: object, *_: object) -> None:
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
        for descriptor in (*self.descriptors, *self.kept):
            os.close(descriptor)
        self._folder.cleanup()
        if kind is None:
            self._raise_errors()

    def environment(self, rank: int) -> Environment:
        return Environment(
            endpoint=f"unix:{self.folder / f'{rank}.sock'}",
            token="secret",
            job=JOB,
            memory_fd=self.descriptors[rank],
            kept_fd=self.kept[rank],
        )

    def run(self, script: Callable[[LearnerSession, int], T]) -> list[T]:
        """Runs the script once per rank, each in a thread with a session that is finished at the end.

        When one fails the others are stopped, as a job would; the first error is raised.
        """
        results, errors = self.run_each([self.environment(rank) for rank in range(self.members)], script)
        self._raise_errors()
        if errors:
            raise errors[0]
        return results

    def run_each(
        self, environments: Sequence[Environment], script: Callable[[LearnerSession, int], T]
    ) -> tuple[list[T], list[Exception]]:
        """Runs the script once in each of these, in order of `mt.rank()`, each in a thread with a session that is
        finished at the end. When one fails the others are stopped. Returns their results, unless one has failed, and
        the errors, the first one first."""
        errors: list[Exception] = []

        def learner(rank: int) -> T:
            session = LearnerSession.attach(environments[rank])
            try:
                result = script(session, rank)
                session.finish()
                return result
            except Exception as error:
                errors.append(error)
                self.stop(f"rank {rank} failed")
                raise
            finally:
                with contextlib.suppress(MeshtrainError):  # the first error is the one to tell
                    session.finish()

        with ThreadPoolExecutor(len(environments)) as pool:
            running = [pool.submit(learner, rank) for rank in range(len(environments))]
        return [] if errors else [each.result() for each in running], errors

    # What a test scripts: see `LocalRounds`

    def hold(self, round_: int) -> None:
        """The results of `round_` come late: at `release`."""
        with self.lock:
            self.rounds.hold(round_)

    def release(self, round_: int) -> None:
        """The results of `round_` come now."""
        with self.lock:
            self.rounds.release(round_)

    def lose(self, rank: int, step: int, *, retry: bool) -> None:
        """The rank's `step` gets lost: dropped before it binds (R5, retry), or cut off in its round (V2)."""
        with self.lock:
            self.rounds.lose(rank, step, retry=retry)

    def pass_over(self, rank: int, round_: int) -> None:
        """The rank nulls `round_` (R4)."""
        with self.lock:
            self.rounds.pass_over(rank, round_)

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Rank 0 sets these batch sizes with its next bind (X4a)."""
        with self.lock:
            self.rounds.resize(sizes)

    def save(self, rank: int, after_round: int, folder: Path) -> None:
        """The rank writes its state there, at its first boundary after this round."""
        self.notify(rank, Save(number=1, after_round=after_round, folder=str(folder)))

    def train_encoder(self, rank: int, task: EncoderTask) -> None:
        """The rank learns LGC's autoencoder, at a boundary."""
        self.notify(rank, task)

    def begin_from(self, folder: Path, round_: int, units: int, kept: bytes = b"") -> None:
        """Before the learners come: all load what was saved after `round_`, or take over what one has `kept`."""
        for descriptor in self.kept:
            os.pwrite(descriptor, kept, 0)
        self._begins_from = StateTask(units=tuple(range(units)), folder=str(folder), round=round_, kept=bool(kept))
        self.rounds.complete = round_
        for learner in self.rounds.learners:
            learner.applied = learner.decided = learner.given = round_

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns when the daemons have come so far; `condition` is asked under `lock` after each message."""
        with self.lock:
            come = self.lock.wait_for(lambda: self.stopped or condition(), WAIT_TIMEOUT_S)
        assert come, "the learners did not come so far"

    def wait_until_all_have_left(self) -> None:
        """Returns when everything is heard that was said."""
        self.wait_until(lambda: len(self._left) == len(self._streams))

    def stop(self, reason: str) -> None:
        for rank in list(self._streams):
            self.notify(rank, Stop(reason=reason))
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
        parser.long_messages = True  # a learner has shown its token
        while True:
            try:
                count = stream.recv_into(parser.buffer())
            except OSError:
                count = 0
            if not count:
                with self.lock:
                    self._left.add(rank)
                    self.lock.notify_all()
                with contextlib.suppress(OSError):  # the other side may be faster
                    stream.shutdown(socket.SHUT_WR)
                return
            event = parser.received(count)
            assert not isinstance(event, Broken), event
            if isinstance(event, ControlReceived):
                envelope = decode(event.payload)
                assert isinstance(envelope, Envelope), envelope
                if not self.silent:
                    try:
                        self._take(rank, envelope)
                    except Exception as error:  # raised again in the test's own thread
                        self._errors.append(error)
                        self.stop(f"what rank {rank} sent breaks the protocol: {error}")

    def _send(self, rank: int, envelope: Envelope) -> None:
        payload = encode(envelope)
        with self.lock, contextlib.suppress(OSError):  # the learner may have ended; who waits for it has a deadline
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
        if isinstance(envelope.body, LearnerReady) and reply.role is Role.REPLY:
            self._tell_ready(rank)

    def _tell_ready(self, rank: int) -> None:
        """The first Start follows the Done of every learner."""
        with self.lock:
            self._told_ready.add(rank)
            if len(self._told_ready) == self.members:
                self.rounds.begin(self.models[0].manifest, self.models[0].samples)

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
                if self.epochs_over:
                    self.notify(rank, EpochOver(epoch=self.epochs_over - 1, unused=0))
                if self._begins_from is not None:
                    return self._begins_from
                self._put(self.states, rank, units)
                folder = self.folder / "state" / str(rank)
                if rank == 0:
                    return StateTask(units=(), folder=str(folder))
                self._until(lambda: 0 in self.ready)
                folder.mkdir()
                self.notify(0, Save(number=-rank, after_round=0, folder=str(folder), digests=units))
                self._until(lambda: rank in self._given)
                left_out = self._given[rank].left_out
                return StateTask(
                    units=tuple(unit for unit in range(len(units)) if unit not in left_out), folder=str(folder)
                )
            case LearnerReady():
                with self.lock:
                    self.ready.add(rank)
                    self.lock.notify_all()
                return Done()
        raise ValueError(f"not a learner's request: {body}")

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
                case LearnerStepped():
                    self.stepped.append((rank, body))
                case LearnerIdle():
                    self.idle.append((rank, body))
                case LearnerHash():
                    digests = self.hashes.setdefault(body.round, {})
                    digests[rank] = body.sha256
                    assert len(set(digests.values())) == 1, f"O9: the bases after round {body.round} differ"
                case LearnerLog():
                    self.logs.append((rank, body))
                case LearnerTurn():
                    self._turn(rank, body)
                case LearnerEncoder():
                    self.encoders.append((rank, body))
                case LearnerSaved(number=number) if number < 0:
                    self._given[-number] = body
                case LearnerSaved():
                    self.saved.append((rank, body))
            if not isinstance(body, LearnerEncoder | LearnerHash | LearnerLog | LearnerSaved | LearnerTurn):
                self.rounds.take(rank, body)
            self.lock.notify_all()

    def _turn(self, rank: int, body: LearnerTurn) -> None:
        """R9: what is shown comes to each neighbour that is in the same turn, or when it is."""
        turn = self._turns[rank] = Turn(body.round, body.turn)
        if body.shown:
            self._shown[turn, rank] = self._mixed_slot(rank, 0).tobytes()
        for other in range(self.members):
            if self._turns.get(other) == turn:
                self._tell_turn(other, turn)

    def _tell_turn(self, rank: int, turn: Turn) -> None:
        around = neighbours(self.spec.sync.over, turn, rank, range(self.members))
        around = tuple(one for one in around if not self.loses(one.rank, rank, turn))
        shown = []
        for place, one in enumerate(around):
            if (turn, one.rank) in self._shown:
                slot = 1 + place + turn.number % 2 * NEIGHBOURS_MAX[self.spec.sync.over]
                self._mixed_slot(rank, slot)[:] = np.frombuffer(self._shown[turn, one.rank], np.uint8)
                shown.append(Shown(slot=slot, weight=one.weight))
        awaited = len(around) - len(shown)
        news = TurnNews(round=turn.round, turn=turn.number, shown=tuple(shown), awaited=awaited, sent=True)
        self.notify(rank, news)

    def notify(self, rank: int, body: Wire) -> None:
        """Says this to the rank's learner."""
        self._send(rank, Envelope(Role.NOTICE, 0, body))

    def _raise_errors(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    # Shared memory

    def _raw_slot(self, rank: int, step: int) -> Values:
        layout = self._layout()
        return self._values(rank, layout)[layout.raw_offset(step) // 4 :][: layout.values]

    def _result_slot(self, rank: int) -> Values:
        layout = self._layout()
        return self._values(rank, layout)[layout.result_offset // 4 :][: layout.values]

    def _layout(self) -> MemoryLayout:
        plan = plan_buckets(self.models[0].manifest, self.spec.bucket_bytes, parse_codec(self.spec.codec))
        return MemoryLayout.for_job(plan.total_values, self.spec.sync, parse_codec(self.spec.codec))

    def _mixed_slot(self, rank: int, slot: int) -> NDArray[np.uint8]:
        layout = self._layout()
        whole = self._values(rank, layout).view(np.uint8)
        return whole[layout.mixed_offset(slot) :][: layout.values * layout.mixed_bytes]

    def _values(self, rank: int, layout: MemoryLayout) -> Values:
        if rank not in self._maps:
            assert self.models[rank].memory_bytes == layout.total_bytes
            path = f"/proc/self/fd/{self.descriptors[rank]}"
            self._maps[rank] = np.memmap(path, np.float32, "r+", shape=(layout.total_bytes // 4,))
        return self._maps[rank]

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

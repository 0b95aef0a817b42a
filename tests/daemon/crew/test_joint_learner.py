"""R6: the connections of a device's learners and of its daemon, each speaking real frames: who is let in, who hears
what and when, and what the end of each means to the others."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshtraind.crew.joint_learner import DaemonEntrance, JointLearner
from meshtraind.crew.slots import CrewMemory
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.machine.event_loop import connect_locally, serve_locally
from meshtraind.transport.connection import Connection, ConnectionEnded, RequestFailed
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.learner import (
    EpochOver,
    Grant,
    LearnerBarrier,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerSaved,
    LearnerSealed,
    LearnerState,
    LearnerWelcome,
    Save,
    Start,
    StateTask,
    Stop,
    Waiting,
)
from meshwire.messages.local import Attach, GetJobs
from meshwire.messages.rounds import SampleBlock
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.sync_modes.mode import SyncSettings
from tests.daemon.waiting import until

JOB = "1kx3m9q2v7bd"
TIMEOUT_S = 10.0
SPEC = JobSpec(
    job=JOB,
    name="test",
    submitter="0" * 64,
    created_at_s=0.0,
    script="train.py",
    args=(),
    env=(),
    files=BlobRef(sha256=bytes(32), size_bytes=0),
    data=None,
    sync=SyncSettings(),
    codec="fp32",
    on_nan="stop",
    seed=7,
    bucket_bytes=4096,
    hash_every=1,
    trace=False,
    learners=2,
)
MANIFEST = ModelManifest(
    tensors=(TensorSpec(name="w", shape=(4,), dtype="float32", kind="parameter"),), optimizer="SGD"
)
SEALED = LearnerSealed(step=1, used=b"\x01", integers=())
GRANT = Grant(batches=((SampleBlock(epoch=0, first=0, end=4),),))
FINISHED = LearnerIdle(reason="it has finished", finished=True)


class Side:
    """One end that hears what it is told. As the daemon it answers what a learner asks."""

    def __init__(self) -> None:
        self.heard: list[Wire] = []
        self.asked: list[Wire] = []
        self.lost_by: str | None = None
        self.connection = Connection(self, name="a side")

    def accept(self) -> Connection:
        self.connection = Connection(self, name="a side")
        return self.connection

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return "none"

    def chunk_received(self, conn: Connection, header: Header) -> None:
        raise AssertionError

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        self.heard.append(body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Any) -> Wire:
        self.asked.append(body)
        match body:
            case Attach():
                conn.attached = body
                members = (Member(device="0" * 64, incarnation=1, name="anna"),)
                return LearnerWelcome(spec=SPEC, rank=0, members=members, data_dir=None, output_dir="out")
            case LearnerState():
                emit(Waiting(reason="bert's state"))
                return StateTask(units=(), folder="state")
        return Done()

    def lost(self, conn: Connection, reason: str) -> None:
        self.lost_by = reason

    async def ask(self, body: Wire) -> Wire:
        return await self.connection.request(body, timeout_s=TIMEOUT_S, name=type(body).__name__)


class Device:
    """Its learners, what stands between, and a daemon."""

    def __init__(self, joint: JointLearner, address: str, daemon: Side, failures: list[str]) -> None:
        self.joint = joint
        self.address = address
        self.daemon = daemon
        self.failures = failures
        self.learners: list[Side] = []

    async def call(self, side: Side) -> None:
        await connect_locally(asyncio.get_running_loop(), lambda: side.connection, self.address)

    async def attach(self) -> list[LearnerWelcome]:
        welcomes = []
        for number, side in enumerate(self.learners):
            await self.call(side)
            welcome = await side.ask(Attach(token=f"t{number}", role="learner", job=JOB, torch="2.13"))
            assert isinstance(welcome, LearnerWelcome)
            welcomes.append(welcome)
        return welcomes

    async def prepare(self, **second: Any) -> list[Wire | BaseException]:
        """What all are answered. `second`: what the second one's model has of its own."""
        size_bytes = 2 * 4096
        for descriptor in self.descriptors:
            os.ftruncate(descriptor, size_bytes)
        model = LearnerModel(manifest=MANIFEST, memory_bytes=size_bytes, learner_bytes=100)
        models = [model, model.model_copy(update=second), model][: len(self.learners)]
        asking = [side.ask(each) for side, each in zip(self.learners, models, strict=True)]
        return await asyncio.gather(*asking, return_exceptions=True)

    descriptors: tuple[int, ...] = ()


@asynccontextmanager
async def device(folder: Path, learners: int = 2) -> AsyncIterator[Device]:
    shared, daemon = SharedMemory(), Side()
    failures: list[str] = []
    tokens = [f"t{place}" for place in range(learners)]
    memory = CrewMemory(learners, shared.file.told)
    loop = asyncio.get_running_loop()
    server, address = await serve_locally(loop, daemon.accept, folder / "d.sock")
    joint = JointLearner(DaemonEntrance(address, "t", JOB), memory, tokens, folder, failures.append)
    crew, own = await serve_locally(loop, joint.accept, folder / "c.sock")
    made = Device(joint, own, daemon, failures)
    made.descriptors = tuple(int(memory.told(place)) for place in range(learners))
    made.learners += [Side() for _ in range(learners)]
    try:
        yield made
    finally:
        await joint.close()
        for side in (*made.learners, daemon):
            side.connection.close("over")
        for listening in (server, crew):
            listening.close()
        await asyncio.sleep(0)
        for side in (*made.learners, daemon):
            if side.lost_by is None and side.connection.last_received_s and side.asked:
                await side.connection.closed()
        memory.close()
        shared.close()


@pytest.mark.asyncio
async def test_each_learner_is_told_its_place_and_the_daemon_meets_one(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        welcomes = await crew.attach()
        assert [welcome.learner for welcome in welcomes] == [0, 1]
        (met,) = crew.daemon.asked
        assert isinstance(met, Attach)
        assert (met.token, met.role, met.pid, met.torch) == ("t", "learner", os.getpid(), "2.13")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "why"),
    [
        (Attach(token="other", role="learner", job=JOB), "wrong token"),
        (Attach(token="t0", role="learner", job="0" * 12), "wrong token"),
        (Attach(token="t0", role="group", job=JOB), "submit without --learners, or exchange by mt.prepare"),
        (LearnerReady(), "the first message must be Attach"),
        (GetJobs(prefix=""), "the first message must be Attach"),
    ],
)
async def test_nobody_else_is_let_in(tmp_path: Path, first: Wire, why: str) -> None:
    async with device(tmp_path) as crew:
        side = crew.learners[0]
        await crew.call(side)
        with pytest.raises((RequestFailed, ConnectionEnded), match=why):
            await side.ask(first)
        assert not crew.daemon.asked


@pytest.mark.asyncio
async def test_a_learner_attaches_once(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        other = Side()
        await crew.call(other)
        with pytest.raises(RequestFailed, match=r"call meshtrain\.prepare in one process only"):
            await other.ask(Attach(token="t1", role="learner", job=JOB))
        other.connection.close("over")
        await other.connection.closed()


@pytest.mark.asyncio
async def test_the_device_has_prepared_when_both_have(tmp_path: Path) -> None:
    """M1: with the memory of both."""
    async with device(tmp_path) as crew:
        await crew.attach()
        assert await crew.prepare() == [Done(), Done()]
        model = crew.daemon.asked[-1]
        assert isinstance(model, LearnerModel)
        assert model.learner_bytes == 2 * 100 + 2 * 4096


@pytest.mark.asyncio
async def test_learners_that_have_prepared_different_models_are_told_both(tmp_path: Path) -> None:
    other = MANIFEST.model_copy(update={"optimizer": "Adam"})
    async with device(tmp_path) as crew:
        await crew.attach()
        answers = await crew.prepare(manifest=other)
        assert all(isinstance(each, RequestFailed) for each in answers)
        assert "learner 2 of this device has prepared something else than learner 1" in str(answers[0])
        assert len(crew.daemon.asked) == 1, "the daemon is not asked"


@pytest.mark.asyncio
async def test_the_second_learner_begins_from_the_firsts_state(tmp_path: Path) -> None:
    """J1: which that one writes once it has its own; the daemon hears that the device is ready when both are."""
    async with device(tmp_path) as crew:
        await crew.attach()
        await crew.prepare()
        first, second = crew.learners
        waiting = asyncio.gather(second.ask(LearnerState(units=(bytes(32), b"1" * 32))))
        assert await first.ask(LearnerState(units=(bytes(32), bytes(32)))) == StateTask(units=(), folder="state")
        assert Waiting(reason="bert's state") in [*first.heard, *second.heard]
        assert await first.ask(LearnerReady()) == Done()
        await until(lambda: any(isinstance(each, Save) for each in first.heard))
        save = next(each for each in first.heard if isinstance(each, Save))
        assert (save.after_round, save.digests) == (0, (bytes(32), b"1" * 32))
        first.connection.notify(LearnerSaved(number=save.number, round=7, units=2, left_out=(0,)))
        (task,) = await waiting
        assert task == StateTask(units=(1,), folder=save.folder, round=7)
        assert not any(isinstance(each, LearnerReady) for each in crew.daemon.asked)
        assert await second.ask(LearnerReady()) == Done()
        assert isinstance(crew.daemon.asked[-1], LearnerReady)
        assert not any(isinstance(each, LearnerSaved) for each in crew.daemon.heard), "it has asked for none"


@pytest.mark.asyncio
async def test_the_device_is_ready_when_the_last_learner_is(tmp_path: Path) -> None:
    async with device(tmp_path, 3) as crew:
        await crew.attach()
        await crew.prepare()
        first, second, third = crew.learners
        await first.ask(LearnerReady())
        waiting = asyncio.gather(second.ask(LearnerReady()))
        other = asyncio.gather(third.ask(LearnerState(units=())))
        await until(lambda: bool(first.heard))
        first.connection.notify(LearnerSaved(number=-2, round=0, units=0))
        await other
        assert not any(isinstance(each, LearnerReady) for each in crew.daemon.asked)
        assert not waiting.done()
        await third.ask(LearnerReady())
        (answer,) = await waiting
        assert answer == Done()


@pytest.mark.asyncio
async def test_a_state_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        await crew.prepare()
        first, second = crew.learners
        waiting = asyncio.gather(second.ask(LearnerState(units=())), return_exceptions=True)
        await first.ask(LearnerReady())
        await until(lambda: bool(first.heard))
        first.connection.notify(LearnerSaved(number=-1, round=0, units=0, error="No space left on device"))
        (answer,) = await waiting
        assert "the first learner cannot write its state: No space left on device" in str(answer)


@pytest.mark.asyncio
async def test_what_one_is_to_do_the_first_one_does(tmp_path: Path) -> None:
    """Its checkpoints and its values; of the second one's values nobody hears."""
    async with device(tmp_path) as crew:
        await crew.attach()
        first, second = crew.learners
        save = Save(number=5, after_round=3, folder="checkpoint")
        crew.daemon.connection.notify(save)
        crew.daemon.connection.notify(Stop(reason="cancelled"))
        await until(lambda: bool(second.heard))
        assert (first.heard, second.heard) == ([save, Stop(reason="cancelled")], [Stop(reason="cancelled")])
        second.connection.notify(LearnerLog(step=1, values=(("loss", 2.0),)))
        second.connection.notify(LearnerSaved(number=5, round=3, units=1))
        first.connection.notify(LearnerLog(step=1, values=(("loss", 1.0),)))
        first.connection.notify(LearnerSaved(number=5, round=3, units=2))
        await until(lambda: len(crew.daemon.heard) == 2)
        told = [LearnerLog(step=1, values=(("loss", 1.0),)), LearnerSaved(number=5, round=3, units=2)]
        assert crew.daemon.heard == told


@pytest.mark.asyncio
async def test_news_of_samples_waits_until_all_learners_do(tmp_path: Path) -> None:
    """X3: a lost device's are dealt again in the middle of a period. One learner would take them into it, and another,
    which has just ended it for want of samples, would not."""
    over = EpochOver(epoch=0, unused=0)
    async with device(tmp_path) as crew:
        await crew.attach()
        await crew.prepare()
        first, second = crew.learners
        begin = Start(step=1, decided=0)
        for body in (GRANT, begin, GRANT, over, Waiting(reason="bert")):
            crew.daemon.connection.notify(body)
        await until(lambda: Waiting(reason="bert") in second.heard)
        assert first.heard == second.heard == [GRANT, begin, Waiting(reason="bert")]
        first.connection.notify(SEALED)
        crew.daemon.connection.notify(Waiting(reason="bert"))
        await until(lambda: len(first.heard) == 4)
        assert first.heard[-1] == Waiting(reason="learner 2 of this device")
        second.connection.notify(SEALED)
        await until(lambda: bool(crew.daemon.heard))
        await until(lambda: len(second.heard) == 6)
        assert second.heard[-2:] == [GRANT, over]
        assert crew.daemon.heard == [SEALED]


@pytest.mark.asyncio
async def test_learners_that_do_different_things_end_by_name(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        first, second = crew.learners
        first.connection.notify(LearnerHash(round=1, sha256=bytes(32)))
        second.connection.notify(LearnerHash(round=1, sha256=b"1" * 32))
        await until(lambda: bool(crew.failures))
        assert crew.failures[0].startswith(
            "learner 2 of this device has 31313131 as the hash of the base after round 1"
        )
        assert not crew.daemon.heard


@pytest.mark.asyncio
@pytest.mark.parametrize("waits", [LearnerModel(manifest=MANIFEST, memory_bytes=1), LearnerBarrier(number=1)])
@pytest.mark.parametrize("sooner", [True, False])
async def test_nobody_waits_for_a_learner_whose_script_has_ended(tmp_path: Path, waits: Wire, sooner: bool) -> None:
    """Without having prepared: the others' mt.prepare, or their barrier, would not return for hours."""
    async with device(tmp_path) as crew:
        await crew.attach()
        first, second = crew.learners
        if sooner:
            crew.joint.ended(1)
        if isinstance(waits, LearnerModel):
            asking = asyncio.gather(first.ask(waits))
        else:
            first.connection.notify(waits)
        if not sooner:
            first.connection.notify(LearnerLog(step=1, values=()))
            await until(lambda: bool(crew.daemon.heard))
            second.connection.close("its script has ended")
            await until(lambda: second.lost_by is not None)
            assert not crew.failures, "it may have failed, which its process tells"
            crew.joint.ended(1)
        await until(lambda: bool(crew.failures))
        assert crew.daemon.lost_by is None
        assert crew.failures[0].startswith("learner 2 of this device has ended without meshtrain.prepare, and others")
    if isinstance(waits, LearnerModel):
        with pytest.raises((ConnectionEnded, RequestFailed)):
            await asking


@pytest.mark.asyncio
async def test_learners_that_prepare_nothing_end_each_by_itself(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        for place, side in enumerate(crew.learners):
            assert crew.daemon.lost_by is None
            side.connection.close("its script has ended")
            await side.connection.closed()
            crew.joint.ended(place)
        await until(lambda: crew.daemon.lost_by is not None)
        assert not crew.failures


@pytest.mark.asyncio
@pytest.mark.parametrize("place", [0, 1])
async def test_without_one_of_its_learners_a_device_has_none(tmp_path: Path, place: int) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        await crew.prepare()
        crew.learners[place].connection.close("it was killed")
        await until(lambda: crew.daemon.lost_by is not None)
        await until(lambda: crew.learners[1 - place].lost_by is not None)


@pytest.mark.asyncio
async def test_a_learner_that_has_finished_may_go_before_the_others(tmp_path: Path) -> None:
    """The daemon hears of it, and of the end of the connection, when all have."""
    async with device(tmp_path) as crew:
        await crew.attach()
        first, second = crew.learners
        first.connection.notify(FINISHED)
        first.connection.close("it has finished")
        await until(lambda: first.lost_by is not None)
        second.connection.notify(LearnerLog(step=1, values=()))
        second.connection.notify(FINISHED)
        await until(lambda: crew.daemon.heard == [FINISHED])
        assert crew.daemon.lost_by is None
        second.connection.close("it has finished")
        await until(lambda: crew.daemon.lost_by is not None)


@pytest.mark.asyncio
async def test_learners_hear_that_their_daemon_has_gone(tmp_path: Path) -> None:
    async with device(tmp_path) as crew:
        await crew.attach()
        crew.daemon.connection.close("the daemon stops")
        await until(lambda: all(side.lost_by is not None for side in crew.learners))

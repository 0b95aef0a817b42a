"""What must not end a job, nor hold it up: learners, links and devices that are lost at awkward moments (G2, J1)."""

import asyncio
from typing import Any, cast

import pytest

from meshtraind.agreement import Agreement
from meshtraind.tasks import TaskSet
from meshwire.messages.job import BarrierReached
from meshwire.messages.learner import BarrierPassed, LearnerBarrier
from tests.daemon.test_learner_notices import JOB, Desk, turns
from tests.daemon.test_session_edges import job_of

# Learners that are replaced


@pytest.mark.asyncio
async def test_a_device_that_is_left_out_hears_its_learner_no_more() -> None:
    """Its process is killed while it sends buckets; what is still to be read of it ended the job everywhere."""
    async with Desk(2, "ssp:2") as desk:
        closed: list[str] = []
        desk.connection.close = closed.append
        desk.link.let_go("this device was left out")
        assert closed
        assert not desk.link.is_over(cast(Any, desk.connection)), "its notices are refused"
        assert not desk.link.ready
        desk.link.attach(cast(Any, desk.connection))  # of the next process


@pytest.mark.asyncio
@pytest.mark.parametrize("ends", ["by an error", "by the others"])
async def test_a_learner_that_is_lost_in_a_barrier_leaves_nothing_behind_in_it(ends: str) -> None:
    """Whatever the others do then, it concerns the next process only when that has entered the barrier itself."""
    async with Desk(2, "ssp:2") as desk:
        desk.say(LearnerBarrier(number=1))
        await turns()
        desk.rounds.dead("its process has ended")
        desk.link.begin_anew(desk.rounds, cast(Any, None))
        desk.links[1].sent.clear()
        if ends == "by an error":
            desk.gone.add(1)
        desk.agreement.news(BarrierReached(job=JOB, rank=1, number=1))
        desk.agreement.entered()
        await turns()
        assert not desk.failed
        assert not desk.rounds._turn.in_barrier
        assert not desk.agreement.in_barrier(0)
        assert not desk.links[1].sent, "the others are not told that it is in the barrier"


@pytest.mark.asyncio
async def test_a_lost_learner_is_in_no_barrier_of_others() -> None:
    """They wait for the next one: it will enter it."""
    job = cast(Any, job_of("ab", 0))
    agreement = Agreement(job, lambda _rank, _message: None, set)
    agreement.news(BarrierReached(job=JOB, rank=1, number=1))
    both = job.generation
    job.generation = both.model_copy(update={"learning": (0,)})
    agreement.entered()
    job.generation = both.model_copy(update={"number": 3})
    agreement.entered()
    tasks = TaskSet("test")
    waiting = tasks.spawn(agreement.barrier(1, 0, lambda _event: None), "barrier")
    await turns()
    assert not waiting.done()
    agreement.news(BarrierReached(job=JOB, rank=1, number=1))
    assert await asyncio.wait_for(waiting, 10) == 0


@pytest.mark.asyncio
async def test_a_script_that_comes_back_passes_the_barriers_before_its_model() -> None:
    """It calls mt.barrier() before mt.prepare, as at the start of the job; the others are beyond that barrier."""
    async with Desk(2, "ssp:2") as desk:
        desk.agreement.passed = 1
        desk.rounds.dead("its process has ended")
        desk.link.begin_anew(desk.rounds, cast(Any, None))
        desk.link.attach(cast(Any, desk.connection))
        told = desk.say(LearnerBarrier(number=1))
        assert told == []
        await turns()
        assert desk.told == [BarrierPassed(number=1, error=None)]
        assert desk.rounds._turn._barrier is None

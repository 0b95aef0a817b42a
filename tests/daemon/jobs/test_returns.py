"""J5: a device that comes up returns to a job that others go on with; while its disk is full it lies as before."""

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from meshtraind.jobs import admission as admission_module
from meshtraind.learner.supervisor import pause_s
from meshtraind.storage.cleanup import remove_inputs
from meshtraind.storage.job_record import EntryMode
from meshtraind.storage.resume_file import NAME
from meshtraind.transport.connection import RequestFailed
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number
from meshwire.message_base import Wire
from meshwire.messages.generation import Where
from meshwire.messages.job import End, Generation, Offer
from meshwire.messages.local import Cancel
from tests.daemon.job_start.test_checkpointing import JOB
from tests.daemon.lostmesh import FIRST, Daemon, is_over, resume_of, started, with_members
from tests.daemon.waiting import until


@pytest.mark.asyncio
@pytest.mark.parametrize("left_in_order", [False, True])
async def test_who_cannot_take_in_what_it_returns_to_lies_as_before_and_tries_again(
    mesh: list[Daemon], left_in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may be full for a while: the others go on, hear no end from here, and it comes back when there is room.
    A person sees why it does not, and no end of the job."""
    monkeypatch.setattr("meshtraind.jobs.admission.pause_s", lambda _tries: 0.01)
    late = mesh[2]
    late.was_in(None if left_in_order else FIRST)
    late.start()
    late.link(started(mesh[0]))
    admission, seen = late.jobs.admission, set[tuple[str, str]]()
    heard: list[Wire] = []
    late.links[mesh[0].device].connection.notify = lambda body, **_: heard.append(body)
    admission.left_behind(mesh[0].device, Where(job=JOB, generation=FIRST, ancestors=(), samples=0))

    def sees(text: str) -> bool:
        (shown,) = late.questions.summaries(JOB)
        assert shown.ended_at_s is None
        seen.add((shown.state, shown.waiting_for or ""))
        return any(text in why for _, why in seen)

    await until(lambda: sees("tries again"), str(seen))
    assert {state for state, _ in seen} <= {JobState.OFFERED, JobState.FETCHING, JobState.READY}
    assert late.state in (JobState.LOST, JobState.OFFERED, JobState.FETCHING)
    late.link(started(mesh[1]))  # which has the files
    await until(lambda: JOB in late.jobs.registry.jobs and late.jobs.registry.jobs[JOB].state is JobState.STARTING)
    assert late.jobs.registry.jobs[JOB].entry_mode is EntryMode.REJOIN
    assert not admission.comes_back(JOB)
    assert not admission.may_return(JOB)
    assert not [body for body in heard if isinstance(body, End)]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["leaves", "is over", "stops"])
async def test_who_cannot_return_yet_can_be_stopped(
    mesh: list[Daemon], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a person, by the end of the job, and by the end of its daemon, which returns after its next start."""
    monkeypatch.setattr("meshtraind.jobs.admission.pause_s", lambda _tries: 0.2)
    late = mesh[2]
    late.was_in()
    late.start()
    late.link(started(mesh[0]))
    admission = late.jobs.admission
    admission.left_behind(mesh[0].device, Where(job=JOB, generation=FIRST, ancestors=(), samples=0))
    await until(lambda: bool(admission._returning.get(JOB)) and JOB not in late.jobs.registry.jobs)
    match how:
        case "leaves":
            await late.questions.leave(JOB)
            assert late.state is JobState.CANCELLED
        case "is over":
            end = End(job=JOB, outcome="succeeded", reason="", now=False)
            admission.ended_elsewhere(mesh[0].device, end)
            assert late.state is JobState.SUCCEEDED
        case "stops":
            await late.close()
            late.links.clear()
            late.start()
            assert late.waits
            assert late.state is JobState.LOST
            return
    await until(partial(is_over, late))
    assert not late.jobs.admission.comes_back(JOB)
    await asyncio.sleep(0.3)
    assert not late.began
    assert JOB not in late.jobs.registry.jobs


WHERE = Where(job=JOB, generation=FIRST, ancestors=(), samples=0)


def goes_on(late: Daemon, with_: Daemon) -> None:
    """One that is linked tells that the others go on with the job."""
    late.jobs.admission.left_behind(with_.device, WHERE)


def lies(late: Daemon) -> bool:
    """It has tried to return in vain, and what came of that is deleted."""
    admission = late.jobs.admission
    return "tries again" in (admission.waiting(JOB) or "") and not admission.is_under_way(JOB)


async def in_vain(mesh: list[Daemon], pause_s: float, *, left_in_order: bool = False, fetches: bool = False) -> Daemon:
    """The third one tries to return to what the first one goes on with, which has not the files.

    Args:
        pause_s: until it tries again.
        fetches: it is left in the middle of its first try.
    """
    cast(Any, admission_module).pause_s = lambda _tries: pause_s
    late = mesh[2]
    late.was_in(None if left_in_order else FIRST)
    late.start()
    late.link(started(mesh[0]))
    if fetches:
        halt(late, mesh[0])
    goes_on(late, mesh[0])
    if fetches:
        await until(lambda: late.state is JobState.FETCHING)
    else:
        await until(partial(lies, late))
    return late


@pytest.fixture(autouse=True)
def _pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtraind.jobs.admission.pause_s", pause_s)


def halt(late: Daemon, other: Daemon) -> None:
    """No answer of the other one arrives."""

    async def never(_body: Wire, *, timeout_s: float, name: str) -> Wire:
        raise await asyncio.sleep(timeout_s, TimeoutError(name))

    late.links[other.device].connection.request = never


def hears(late: Daemon, device: str, outcome: str, *, now: bool = False) -> None:
    """As a link tells it."""
    end = End(job=JOB, outcome=cast(Any, outcome), reason=f"it has {outcome} there", now=now)
    late.jobs.notice(device, Header(kind=Kind.CONTROL, payload_bytes=0, job=job_number(JOB)), end)


async def comes_up_again(late: Daemon) -> None:
    async with asyncio.timeout(5.0):
        await late.close()
    late.links.clear()
    late.start()


@pytest.mark.asyncio
@pytest.mark.parametrize("fetches", [True, False])
async def test_a_daemon_that_is_stopped_on_its_way_back_lies_as_before(mesh: list[Daemon], fetches: bool) -> None:
    """In the middle of a try, and between two: after a power cut its word counts with the others' (J5)."""
    late = await in_vain(mesh, 0.0 if fetches else 60.0, fetches=fetches)
    await comes_up_again(late)
    assert late.state is JobState.LOST
    assert late.waits


@pytest.mark.asyncio
async def test_no_way_back_is_tried_while_the_daemon_stops(mesh: list[Daemon]) -> None:
    late = await in_vain(mesh, 0.01)
    late.jobs.registry.closing = True  # others are still told
    halt(late, mesh[0])
    await asyncio.sleep(0.05)
    await until(lambda: not late.jobs.admission.is_under_way(JOB))
    await comes_up_again(late)
    assert late.waits


@pytest.mark.asyncio
@pytest.mark.parametrize("left_in_order", [False, True])
@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize("outcome", ["cancelled", "succeeded"])
async def test_who_is_on_its_way_back_hears_that_the_job_is_over(
    mesh: list[Daemon], left_in_order: bool, fetches: bool, outcome: str
) -> None:
    """Also one that was stopped with `meshtrain down`; and it knows after another start."""
    late = await in_vain(mesh, 60.0, left_in_order=left_in_order, fetches=fetches)
    hears(late, mesh[0].device, outcome)
    assert not late.jobs.admission.comes_back(JOB)
    (shown,) = late.questions.summaries(JOB)
    assert shown.state == outcome
    await until(partial(is_over, late))
    await comes_up_again(late)
    assert is_over(late)
    assert late.state.value == outcome


@pytest.mark.asyncio
@pytest.mark.parametrize("fetches", [False, True])
async def test_the_failure_of_one_ends_no_way_back_to_others(mesh: list[Daemon], fetches: bool) -> None:
    """G10: it is the end of its sender's part. When all that went on have said so, the job has failed."""
    late = await in_vain(mesh, 60.0, fetches=fetches)
    late.link(started(mesh[1]))
    hears(late, mesh[0].device, "failed", now=True)
    assert late.jobs.admission.comes_back(JOB)
    goes_on(late, mesh[0])  # it is back, too
    hears(late, mesh[1].device, "failed")
    assert late.jobs.admission.comes_back(JOB)
    hears(late, mesh[0].device, "failed")
    assert not late.jobs.admission.comes_back(JOB)
    (shown,) = late.questions.summaries(JOB)
    assert (shown.state, shown.error) == (JobState.FAILED, "it has failed there")


@pytest.mark.asyncio
async def test_who_cancels_what_others_go_on_with_is_told_when_they_cannot_hear(mesh: list[Daemon]) -> None:
    """They would go on, and nobody would tell them later."""
    late = await in_vain(mesh, 60.0)
    asked: list[Wire] = []

    async def hears_of_it(body: Wire, *, timeout_s: float, name: str) -> Wire:
        assert timeout_s > 0, name
        asked.append(body)
        return body

    late.links[mesh[0].device].connection.request = hears_of_it
    await late.questions.cancel(Cancel(job=JOB, now=False), "n2", forward=True)
    assert [type(body) for body in asked] == [Cancel]
    late.links.clear()
    with pytest.raises(RequestFailed, match="no device of job"):
        await late.questions.cancel(Cancel(job=JOB, now=False), "n2", forward=True)
    assert late.jobs.admission.comes_back(JOB)


@pytest.mark.asyncio
@pytest.mark.parametrize("revives", [False, True])
@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_a_persons_word_counts_while_what_came_in_vain_is_deleted(
    mesh: list[Daemon], revives: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds where there are many files; for a person the job waits all the while."""
    late = mesh[2]
    late.was_in()
    late.start()
    late.link(started(mesh[0]))
    holds = asyncio.Event()
    in_thread = asyncio.to_thread

    async def to_thread(work: Any, *args: Any, **kwargs: Any) -> Any:
        if work is remove_inputs:
            await holds.wait()
        return await in_thread(work, *args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    if revives:
        offer(late, mesh[1])
    else:
        goes_on(late, mesh[0])
    await until(lambda: late.questions.summaries(JOB)[0].state == JobState.READY)
    if how == "leave":
        await late.questions.leave(JOB)
    elif revives:
        await late.questions.cancel(Cancel(job=JOB, now=True), "n2", forward=True)
    else:
        hears(late, mesh[0].device, "cancelled")
    assert not late.jobs.admission.comes_back(JOB)
    (shown,) = late.questions.summaries(JOB)
    assert shown.state == JobState.CANCELLED
    holds.set()
    await until(partial(is_over, late))
    await until(lambda: not late.jobs.admission.is_under_way(JOB))
    assert late.state is JobState.CANCELLED


def offer(late: Daemon, by: Daemon) -> None:
    """Another one that lost the job offers to begin it again."""
    spec = late.spec.model_copy(update={"submitter": by.device, "resume": resume_of(by)})
    members = with_members([by, late])
    assert late.jobs.admission.offered(Offer(spec=spec, members=members), by.device).refusal is None


@pytest.mark.asyncio
async def test_who_has_left_is_not_led_back_by_what_is_heard_in_that_moment(mesh: list[Daemon]) -> None:
    late = mesh[2]
    late.was_in()
    late.start()
    late.link(started(mesh[0]))
    await late.questions.leave(JOB)
    goes_on(late, mesh[0])
    assert not late.jobs.admission.is_under_way(JOB)
    assert not late.jobs.admission.comes_back(JOB)
    await until(partial(is_over, late))


@pytest.mark.asyncio
async def test_a_job_that_begins_again_between_two_tries_is_returned_to_no_more(mesh: list[Daemon]) -> None:
    """And a person sees its end at once."""
    late = await in_vain(mesh, 60.0)
    mesh[1].was_in()
    late.link(started(mesh[1]))
    offer(late, mesh[1])
    job = late.jobs.registry.jobs[JOB]
    await until(lambda: job.state is JobState.READY)
    generation = FIRST.model_copy(update={"number": 2, "root": 2, "ranks": (1, 2), "learning": (), "counted": (1, 2)})
    generation = Generation.load({**generation.model_dump(), "members": with_members([mesh[1], late])})
    late.jobs.admission._promised[JOB] = generation
    late.jobs.admission.begin(JOB)
    assert late.began
    assert not late.jobs.admission.comes_back(JOB)
    job.advance(JobEvent.FAIL, "a division by zero")
    job.advance(JobEvent.STOPPED)
    (shown,) = late.questions.summaries(JOB)
    assert (shown.state, shown.error) == (JobState.FAILED, "a division by zero")
    assert late.jobs.registry.jobs[JOB] is job


@pytest.mark.asyncio
async def test_what_fails_next_is_told_and_the_file_for_another_start_stays(
    mesh: list[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full again, after another member has sent what the first one lacked."""
    late = await in_vain(mesh, 0.01)
    full = late.blobs.ensure_space

    def refuses(_size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(late.blobs, "ensure_space", refuses)
    late.link(started(mesh[1]))
    await until(lambda: "No space left" in (late.jobs.admission.waiting(JOB) or ""))
    assert (late.folder / NAME).exists()
    monkeypatch.setattr(late.blobs, "ensure_space", full)
    await until(lambda: JOB in late.jobs.registry.jobs and late.jobs.registry.jobs[JOB].state is JobState.STARTING)

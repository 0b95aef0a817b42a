"""J5: daemons that all lost a job begin it again from a checkpoint; a job that somebody ended stays ended."""

import asyncio
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.session.session import JobSession
from meshtraind.storage.checkpoint_store import CHECKPOINTS, list_checkpoints
from meshtraind.storage.cleanup import RESUME
from meshtraind.storage.job_record import EntryMode, Job
from meshtraind.storage.resume_file import NAME, JobFile, load_all
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number
from meshwire.message_base import Wire
from meshwire.messages.generation import AskIn, Where
from meshwire.messages.job import (
    End,
    Fetch,
    Generation,
    Metrics,
    Offer,
    RankReport,
    Remains,
    ResumePoint,
)
from meshwire.messages.local import Cancel
from tests.daemon.job_start.test_checkpointing import JOB, MEMBERS
from tests.daemon.jobs.test_resume import written
from tests.daemon.lostmesh import FIRST, Daemon, come_up, is_over, resume_of, with_members
from tests.daemon.waiting import until


@pytest.mark.asyncio
async def test_a_majority_begins_the_job_again_under_its_id_from_the_checkpoint_that_one_has(
    mesh: list[Daemon],
) -> None:
    """J5: and who comes up later returns to it."""
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh[:2])
    (shown,) = mesh[0].questions.summaries("")
    assert (shown.state, shown.ended_at_s, shown.error) == (JobState.READY, None, None)
    await until(lambda: all(daemon.began for daemon in mesh[:2]))
    for rank, daemon in enumerate(mesh[:2]):
        ((job, generation),) = daemon.began
        assert (generation.number, generation.root, generation.ranks) == (2, 2, (0, 1))
        assert generation.proposer == mesh[0].device
        assert (job.spec.job, job.rank, job.entry_mode) == (JOB, rank, EntryMode.REVIVAL)
        assert job.spec.resume is not None
        assert (job.spec.resume.job, job.spec.resume.round) == (JOB, 40)
        assert {path.name for path in (daemon.folder / RESUME).iterdir()} > {"manifest.json"}
        assert job.started_at_s == 5.0
        assert not daemon.waits
        job.take(generation)
        (kept,) = load_all([daemon.folder]).values()
        assert kept.generation == generation, "another power cut goes on from here"
    mesh[2].start()
    where = Where(job=JOB, generation=mesh[0].began[0][1], ancestors=(FIRST.hash64(),), samples=0)
    mesh[2].link(mesh[0])
    mesh[2].jobs.admission.left_behind(mesh[0].device, where)
    assert mesh[2].jobs.registry.jobs[JOB].entry_mode is EntryMode.REJOIN
    assert not mesh[2].waits


@pytest.mark.asyncio
@pytest.mark.parametrize("given_up", [False, True])
async def test_a_job_of_which_nothing_was_saved_begins_from_its_start_when_all_are_there(
    mesh: list[Daemon], given_up: bool
) -> None:
    """J5: whoever is away may have a checkpoint, so it is waited for by name; what is lost is told. One of a history
    that was given up after a partition is none to go on from."""
    shutil.rmtree(mesh[1].folder / CHECKPOINTS)
    if given_up:
        written(mesh[1].folder, 60, mesh[1].spec, given_up=True)
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh[:2])
    revivals = mesh[0].jobs.admission.revivals
    away = MEMBERS[2].name
    await until(lambda: f"but {away} may have one" in (revivals.waiting(JOB) or ""))
    assert not any(daemon.began for daemon in mesh[:2])
    mesh[2].start()
    for daemon in mesh[:2]:
        daemon.link(mesh[2])
    await until(lambda: all(daemon.began for daemon in mesh))
    for daemon in mesh:
        ((job, generation),) = daemon.began
        assert (generation.number, generation.root, generation.ranks) == (2, 2, (0, 1, 2))
        assert job.entry_mode is EntryMode.REVIVAL
        assert job.spec.resume is None
        assert (daemon.folder / "src" / "train.py").exists()
        (lost,) = job.given_up
        assert (lost.first, lost.last, lost.made_by) == (1, 77, (0, 1, 2))


def run_sessions(daemon: Daemon) -> tuple[list[Any], list[int]]:
    """Jobs that begin here have a session. Returns the sessions, and the ranks that they hear lie down."""
    sessions: list[Any] = []
    lying: list[int] = []

    def began(job: Job, generation: Generation, links: object) -> None:
        daemon._began(job, generation, links)
        job.take(generation)
        passage = SimpleNamespace(is_out=False)
        session = SimpleNamespace(job=job, closed=asyncio.Event(), member_lies_down=lying.append, guests=())
        session.passage = passage
        sessions.append(session)
        daemon.jobs.registry._sessions[JOB] = sessions[-1]

    cast(Any, daemon.jobs.registry).start = began
    return sessions, lying


async def begin_on_two(mesh: list[Daemon]) -> tuple[list[Any], list[Any]]:
    """All have lost the job, and two of them begin it again. Returns the sessions of each."""
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh[:2])
    first, second = (run_sessions(daemon)[0] for daemon in mesh[:2])
    await until(lambda: first and second)
    return first, second


def lie_down(daemon: Daemon, session: Any) -> None:
    session.job.lies_down = True
    del daemon.jobs.registry._sessions[JOB]
    session.closed.set()


@pytest.mark.asyncio
@pytest.mark.parametrize("one", [0, 1])
async def test_daemons_that_have_no_base_any_more_begin_the_job_again_as_after_a_power_cut(
    mesh: list[Daemon], one: int
) -> None:
    """J3, J5: each when all have lain down, in whichever order; a person who watches sees no end."""
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh[:2])
    (first, second), (_, heard) = zip(run_sessions(mesh[one]), run_sessions(mesh[1 - one]), strict=True)
    await until(lambda: first and second)
    lie_down(mesh[one], first[0])
    await until(lambda: heard == [one])
    assert mesh[one].waits
    (shown,) = mesh[one].questions.summaries("")
    assert (shown.state, shown.ended_at_s, shown.error) == (JobState.READY, None, None)
    assert (shown.waiting_for or "").startswith(f"{MEMBERS[1 - one].name}, for ")
    assert mesh[one].state is JobState.LOST
    assert not (mesh[one].folder / "src").exists()
    lie_down(mesh[1 - one], second[0])
    await until(lambda: len(first) == len(second) == 2)
    for daemon in mesh[:2]:
        (_, (job, generation)) = daemon.began
        assert (generation.number, generation.root, generation.ranks) == (3, 3, (0, 1))
        assert job.spec.resume is not None
        assert job.spec.resume.round == 40
        assert not daemon.waits
        daemon.jobs.registry._sessions.clear()


@pytest.mark.asyncio
async def test_a_job_that_is_cancelled_while_it_lies_down_does_not_begin_again(mesh: list[Daemon]) -> None:
    first, _ = await begin_on_two(mesh)
    first[0].job.lies_down = True
    first[0].end = lambda *_reason, **_now: lie_down(mesh[0], first[0])  # it was ending already
    await mesh[0].questions.cancel(Cancel(job=JOB, now=True), "n0", forward=True)
    assert mesh[0].state is JobState.CANCELLED
    assert not mesh[0].waits
    mesh[1].jobs.registry._sessions.clear()


@pytest.mark.asyncio
async def test_who_leaves_a_job_while_it_lies_down_is_not_in_it_when_it_begins_again(mesh: list[Daemon]) -> None:
    _, second = await begin_on_two(mesh)
    lie_down(mesh[1], second[0])
    await asyncio.sleep(0)  # its files are being removed
    assert not second[0].job.ended
    await mesh[1].questions.leave(JOB)
    assert mesh[1].state is JobState.CANCELLED
    assert not mesh[1].waits
    await until(lambda: not mesh[1].jobs.admission.may_return(JOB))
    mesh[0].jobs.registry._sessions.clear()


@pytest.mark.asyncio
async def test_a_job_whose_scripts_are_killed_in_every_life_rests_ever_longer(mesh: list[Daemon]) -> None:
    """J5, J3: memory that runs out does so again. Each life has a supervisor of its own, which knows of no other."""
    for daemon in mesh:
        daemon.was_in()
    mesh[0].start()
    rests: list[float] = []

    def added(_job: str, _file: JobFile, rests_until_s: float) -> None:
        rests.append(rests_until_s - asyncio.get_running_loop().time())

    cast(Any, mesh[0].jobs.admission.revivals).add = added
    point = ResumePoint(job=JOB, round=40, files=mesh[0].spec.files)
    for rounds in (40, 50, 139, 139, 140, 40, 40):
        spec = mesh[0].spec.model_copy(update={"resume": point})
        job = Job(spec, MEMBERS, 0, mesh[0].folder, mesh[0].history, EntryMode.REVIVAL, 5.0, FIRST)
        mesh[0].jobs.registry.add(job)
        for event in (JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
            job.advance(event)
        job.report(RankReport(job=JOB, rank=1, state=JobState.RUNNING, metrics=Metrics(round=rounds)))
        job.lies_down = True
        closed = asyncio.Event()
        closed.set()
        await mesh[0].jobs.admission._lay_down(job, cast(Any, SimpleNamespace(closed=closed)))
    assert [round(rest) for rest in rests] == [0, 1, 2, 4, 0, 0, 1]


@pytest.mark.asyncio
async def test_a_log_does_not_end_where_the_job_begins_again(mesh: list[Daemon]) -> None:
    """Else who follows it would see nothing of what comes."""
    first, _ = await begin_on_two(mesh)
    fetch = Fetch(job=JOB, what="log", rank=0, offset_bytes=0, max_bytes=100, wait_s=0.1)
    follows = mesh[0].jobs._tasks.spawn(mesh[0].questions.fetch(fetch, forward=True), "follow")
    await asyncio.sleep(0)
    lie_down(mesh[0], first[0])
    assert not (await follows).end
    assert mesh[0].waits
    mesh[0].jobs.admission.give_up(JOB, "cancelled", "a person says so")
    assert (await mesh[0].questions.fetch(fetch, forward=True)).end
    mesh[1].jobs.registry._sessions.clear()


@pytest.mark.asyncio
async def test_a_daemon_that_is_stopped_while_a_job_lies_down_begins_it_again_later(mesh: list[Daemon]) -> None:
    first, _ = await begin_on_two(mesh)
    mesh[1].jobs.registry._sessions.clear()

    async def false() -> bool:
        return False

    async def closes() -> None:
        lie_down(mesh[0], first[0])

    first[0].job.lies_down = True
    first[0].leave = first[0].stays = false
    first[0].end = lambda *_reason, **_now: None  # it is ending already
    first[0].close = closes
    await mesh[0].close()
    mesh[0].links.clear()
    mesh[0].start()
    assert mesh[0].waits
    assert mesh[0].state is JobState.LOST


@pytest.mark.asyncio
async def test_a_daemon_that_was_started_again_is_not_taken_for_one_that_lies_down(mesh: list[Daemon]) -> None:
    """J5: what it tells of is what its former life was in; those that have the job go on with it. A device that asks in
    has nothing, and is taken in by neither: each would wait for the other."""
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh[:2])
    sessions, heard = run_sessions(mesh[0])
    await until(lambda: sessions)
    remains = Remains(job=JOB, generation=mesh[0].began[0][1])
    header = Header(kind=Kind.CONTROL, payload_bytes=0)
    mesh[0].links[mesh[1].device].hello.incarnation += 1
    assert mesh[0].jobs.notice(mesh[1].device, header, remains) is None
    assert heard == []
    sessions[0].passage.is_out = True
    assert mesh[0].jobs.notice(mesh[1].device, header, remains) is None
    assert heard.pop() == 1
    sessions[0].passage.is_out = False
    mesh[0].links[mesh[1].device].hello.incarnation -= 1
    assert mesh[0].jobs.notice(mesh[1].device, header, remains) is None
    assert heard == [1]
    broken = remains.model_copy(update={"generation": remains.generation.model_copy(update={"ranks": (0, 1, 7)})})
    assert "not those of its members" in (mesh[0].jobs.notice(mesh[1].device, header, broken) or "")
    mesh[0].jobs.registry._sessions.clear()


@pytest.mark.asyncio
async def test_who_asks_into_a_job_that_lies_here_is_told_so(mesh: list[Daemon]) -> None:
    """J5: one comes back to a member that has just lain down. It was told before it had a session: each would wait for
    the other."""
    for daemon in mesh[:2]:
        daemon.was_in()
    mesh[0].start()
    mesh[1].start()
    mesh[1].jobs.admission.revivals.drop(JOB)  # it is on its way back, and nobody has told it that this is in vain
    mesh[0].link(mesh[1])
    heard: list[Wire] = []
    mesh[0].links[mesh[1].device].connection = SimpleNamespace(notify=lambda body, **_: heard.append(body))
    ask = AskIn(job=JOB, member=mesh[1].member, linked=())
    mesh[0].jobs.notice(mesh[1].device, Header(kind=Kind.CONTROL, payload_bytes=0, job=job_number(JOB)), ask)
    assert heard == [Remains(job=JOB, generation=FIRST)]


@pytest.mark.asyncio
async def test_a_checkpoint_that_cannot_be_read_is_no_reason_to_begin_from_the_start(mesh: list[Daemon]) -> None:
    (manifest,) = mesh[1].folder.rglob("manifest.json")
    manifest.write_text("{")
    for daemon in mesh:
        daemon.was_in()
    come_up(mesh)
    revivals = mesh[0].jobs.admission.revivals
    await until(lambda: "is not used" in (revivals.waiting(JOB) or ""))
    assert not any(daemon.began for daemon in mesh)


@pytest.mark.asyncio
async def test_a_job_that_cannot_begin_lies_as_before_and_is_tried_again(mesh: list[Daemon]) -> None:
    """J5: nothing of it is deleted, a person sees why, and the others hear no end."""
    mesh[1].torch = None
    for daemon in mesh[:2]:
        daemon.was_in()
    come_up(mesh[:2])
    revivals = mesh[0].jobs.admission.revivals
    await until(lambda: "it has no torch" in (revivals.waiting(JOB) or ""))
    await until(lambda: not any(JOB in daemon.jobs.registry.jobs for daemon in mesh[:2]))
    for daemon in mesh[:2]:
        assert daemon.waits
        assert daemon.state is JobState.LOST
        assert (daemon.folder / NAME).exists()
        assert not (daemon.folder / "src").exists()
    assert list_checkpoints(mesh[1].folder, JOB, 1, lambda: None)[0].round == 40
    (shown,) = mesh[0].questions.summaries("")
    assert shown.state == JobState.READY
    assert "has no torch" in (shown.waiting_for or "")
    mesh[1].jobs._node.software.torch = "2.0"  # type: ignore[misc]
    await until(lambda: all(daemon.began for daemon in mesh[:2]))


@pytest.mark.asyncio
async def test_nobody_sees_a_job_fail_that_could_not_begin_again_this_time(mesh: list[Daemon]) -> None:
    """J5: who watches it would take that for its end."""
    mesh[0].was_in()
    mesh[0].start()
    admission = mesh[0].jobs.admission
    spec = mesh[0].spec.model_copy(update={"submitter": mesh[1].device, "resume": resume_of(mesh[1])})
    assert admission.offered(Offer(spec=spec, members=with_members(mesh[:2])), mesh[1].device).refusal is None
    admission.ended_elsewhere(mesh[1].device, End(job=JOB, outcome="failed", reason="its disk is full", now=True))
    (shown,) = mesh[0].questions.summaries(JOB)
    watched = await mesh[0].questions._summary(JOB)
    assert (shown.state, shown.ended_at_s, shown.error) == (JobState.READY, None, None)
    assert (watched, mesh[0].state) == (shown, JobState.LOST)
    assert admission.is_under_way(JOB), "what came of it is being deleted"
    admission.revivals.drop(JOB)
    admission._began_s = float("-inf")
    (shown,) = mesh[0].questions.summaries(JOB)
    assert shown.state == JobState.LOST


@pytest.mark.asyncio
async def test_a_job_that_was_cancelled_by_a_person_never_begins_again(mesh: list[Daemon]) -> None:
    """J5: neither where it is cancelled while it lies there, nor where another member knows of it."""
    for daemon in mesh:
        daemon.was_in()
    mesh[1].start()
    await mesh[1].questions.cancel(Cancel(job=JOB, now=False), "n1", forward=True)
    assert not mesh[1].waits
    await until(lambda: not (mesh[1].folder / NAME).exists())
    for late in (mesh[0], mesh[2]):
        late.start()
        late.link(mesh[1])
        await until(partial(is_over, late))
        assert late.state is JobState.CANCELLED
    assert not any(daemon.began for daemon in mesh)
    assert list_checkpoints(mesh[1].folder, JOB, 1, lambda: None), "what it learned stays"


@pytest.mark.asyncio
async def test_what_ended_before_its_daemon_did_is_not_begun_again_nor_by_those_that_missed_it(
    mesh: list[Daemon],
) -> None:
    """J5: it failed by its script, or succeeded, and one was away; or its file was left by a kill after its end."""
    mesh[0].was_in(state=JobState.FAILED)
    mesh[1].was_in()
    come_up(mesh[:2])
    assert not mesh[0].waits
    await until(lambda: mesh[1].state is JobState.FAILED)
    mesh[2].was_in(state=JobState.SUCCEEDED)
    assert not mesh[1].waits
    assert not any(daemon.began for daemon in mesh)


@pytest.mark.asyncio
async def test_only_an_end_that_concerns_this_device_ends_a_job_that_waits(mesh: list[Daemon]) -> None:
    """J5: not an offer that is called off, not the failure of one that the others had gone on without, not a stranger's
    word; nor does one who left in order decide."""
    without = FIRST.model_copy(update={"number": 2, "root": 2, "ranks": (0, 1), "learning": (0, 1), "counted": (0, 1)})
    mesh[1].was_in(without)
    mesh[1].start()
    admission = mesh[1].jobs.admission
    end = End(job=JOB, outcome="failed", reason="its disk is full", now=False)
    admission.ended_elsewhere(mesh[0].device, end.model_copy(update={"now": True}))
    admission.ended_elsewhere(mesh[2].device, end)
    admission.ended_elsewhere("f" * 64, end.model_copy(update={"outcome": "cancelled"}))
    assert mesh[1].waits
    admission.ended_elsewhere(mesh[0].device, end)
    assert not mesh[1].waits
    assert mesh[1].state is JobState.FAILED
    mesh[2].was_in(None)
    mesh[2].start()
    assert not mesh[2].waits
    assert mesh[2].jobs.admission.may_return(JOB)


@pytest.mark.asyncio
async def test_who_leaves_it_while_it_waits_ends_it_for_no_other(mesh: list[Daemon]) -> None:
    """J5: the others begin it without that one, if they are enough."""
    for daemon in mesh[:2]:
        daemon.was_in()
    mesh[0].start()
    await mesh[0].questions.leave(JOB)
    assert (mesh[0].waits, mesh[0].state) == (False, JobState.CANCELLED)
    mesh[1].start()
    mesh[1].link(mesh[0])
    await asyncio.sleep(0.05)
    assert mesh[1].waits


@pytest.mark.asyncio
async def test_who_was_in_something_newer_does_not_join_what_is_older(mesh: list[Daemon]) -> None:
    """J5, G4: a laptop that trained apart and kept its power is not followed back."""
    newer = FIRST.model_copy(update={"number": 3, "root": 3})
    mesh[1].was_in(newer)
    mesh[1].start()
    apart = FIRST.model_copy(update={"number": 9, "ranks": (2,), "learning": (2,), "proposer": mesh[2].device})
    where = Where(job=JOB, generation=apart, ancestors=(FIRST.hash64(),), samples=10**6)
    mesh[1].jobs.admission.left_behind(mesh[2].device, where)
    assert JOB not in mesh[1].jobs.registry.jobs
    assert mesh[1].waits


@pytest.mark.asyncio
async def test_others_that_go_on_are_joined_also_while_it_begins_again(mesh: list[Daemon]) -> None:
    """J5: a link to them may come a moment too late."""
    for daemon in mesh[:2]:
        daemon.was_in()
    come_up(mesh[:1])
    offer = Offer(
        spec=mesh[1].spec.model_copy(update={"submitter": mesh[1].device, "resume": resume_of(mesh[1])}),
        members=with_members(mesh[:2]),
    )
    mesh[1].start()
    mesh[1].link(mesh[0])
    assert mesh[0].jobs.admission.offered(offer, mesh[1].device).refusal is None
    where = Where(job=JOB, generation=FIRST, ancestors=(), samples=0)
    mesh[0].jobs.admission.left_behind(mesh[2].device, where)
    await until(
        lambda: JOB in mesh[0].jobs.registry.jobs and mesh[0].jobs.registry.jobs[JOB].entry_mode is EntryMode.REJOIN
    )
    assert not mesh[0].waits


@pytest.mark.asyncio
async def test_a_daemon_that_is_stopped_while_it_begins_again_lies_there_again(mesh: list[Daemon]) -> None:
    """J5: `meshtrain down` ends nothing that had not begun."""
    daemon = mesh[0]
    daemon.was_in()
    daemon.start()
    spec = daemon.spec.model_copy(update={"submitter": mesh[1].device, "resume": resume_of(mesh[1])})
    mesh[1].was_in()
    mesh[1].start()
    mesh[1].link(daemon)
    offer = Offer(spec=spec, members=with_members(mesh[:2]))
    assert daemon.jobs.admission.offered(offer, mesh[1].device).refusal is None
    await until(lambda: daemon.jobs.registry.jobs[JOB].state is JobState.READY)
    async with asyncio.timeout(5.0):
        await daemon.close()
    daemon.start()
    assert daemon.waits


class Last:
    """What a session asks when its daemon is stopped.

    Args:
        others: whether somebody else is in the generation.
        saves: whether the learner writes a checkpoint in time.
        hub_keeps: the other one is a hub, which has saved the state.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        others: bool = False,
        saves: bool = True,
        lets_go: bool = False,
        hub_keeps: bool = False,
    ) -> None:
        spec = daemon.spec.model_copy(update={"resume": None})
        self.job = Job(spec, MEMBERS, 0, daemon.folder, daemon.history)
        for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
            self.job.advance(event)
        ranks = (0, 1) if others or hub_keeps else (0,)
        members = (MEMBERS[0], MEMBERS[1].model_copy(update={"hub": hub_keeps}), *MEMBERS[2:])
        now = {"number": 3, "root": 3, "ranks": ranks, "learning": (0,), "members": members, "counted": (0,)}
        self.job.take(FIRST.model_copy(update=now))
        self.passage: Any = SimpleNamespace(
            saved=False,
            is_out=False,
            may_leave=lets_go,
            leave=self._leaves,
            save=self._saves,
            hand_over=self._hands_over,
        )
        self._hub_keeps = hub_keeps
        self._writes = saves
        self._metrics = SimpleNamespace(part="")
        self.tell_report = lambda: None
        self.ends: list[str] = []

    async def _leaves(self) -> None:
        self.passage.is_out = True

    async def _saves(self) -> None:
        self.passage.saved = self._writes

    async def _hands_over(self) -> bool:
        return self._hub_keeps

    async def leave(self) -> bool:
        return await JobSession.leave(cast(JobSession, self))

    async def stays(self) -> bool:
        return await JobSession.stays(cast(JobSession, self))

    def end(self, outcome: str, reason: str, *, now: bool) -> None:
        self.ends.append(reason)
        self.job.advance(JobEvent.FAIL, reason)

    async def close(self) -> None:
        """Nothing runs."""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("how", "ends", "waits"),
    [
        ({}, False, True),
        ({"saves": False}, True, False),
        ({"others": True}, True, False),
        ({"others": True, "lets_go": True}, False, False),
        ({"saves": False, "hub_keeps": True}, False, True),
    ],
    ids=["the last one", "without a checkpoint", "others that only forward", "others go on", "a hub has it"],
)
async def test_who_is_stopped_last_begins_the_job_again_and_who_leaves_others_with_it_returns(
    mesh: list[Daemon], how: dict[str, bool], ends: bool, waits: bool
) -> None:
    """J5: `down` on all laptops in the evening, `up` in the morning."""
    daemon = mesh[0]
    daemon.start()
    last = Last(daemon, **how)
    daemon.jobs.registry._jobs[JOB] = last.job
    daemon.jobs.registry._sessions[JOB] = cast(JobSession, last)
    await daemon.close()
    assert bool(last.ends) is ends
    assert last.job.state == (JobState.FAILED if ends else JobState.RUNNING)
    daemon.start()
    assert daemon.waits is waits
    assert daemon.state == (JobState.FAILED if ends else JobState.LOST)

"""A running job asks devices to join it, and what a device answers (`submit --peers N:MAX`; G7, J1)."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.jobs import admission
from meshtraind.jobs.admission import Admission
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.registry import JobRegistry
from meshtraind.jobs.routing import JobRouter
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.peers.selection import choose_members
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session import invitations as inviting
from meshtraind.session.invitations import Inviter
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.job_history import UnknownJobError
from meshtraind.storage.job_record import EntryMode, Job
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.jobs.lifecycle import JobEvent, JobState
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.generation import AskIn, Invite
from meshwire.messages.job import BlobRef, End, JobSpec, Member, OfferReply
from meshwire.messages.learner import SampleSpace
from meshwire.messages.link import Software
from meshwire.messages.local import Cancel
from meshwire.sync_modes.mode import sync_settings
from tests.computing import computing
from tests.daemon.linkusers import DialsNobody
from tests.daemon.waiting import until

JOB = "j" + "0" * 11
ANNA, BERT, CLEO, DORA = (
    Member(device=f"{n + 1:064x}", incarnation=n + 10, name=name)
    for n, name in enumerate(("anna", "bert", "cleo", "dora"))
)
FIRST = computing(JOB, ANNA.device, (ANNA, BERT))
SPEC = JobSpec(
    job=JOB, name="train", submitter=ANNA.device, created_at_s=1.0, script="train.py", args=(), env=(),
    files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32", on_nan="stop",
    seed=1, bucket_bytes=4096, hash_every=0, trace=False, peers_max=3,
)  # fmt: skip
HISTORY = SimpleNamespace(put=lambda _record: None)


def link(to: Member, connection: Any = None) -> Any:
    software = SimpleNamespace(torch="2.0")
    hello = SimpleNamespace(incarnation=to.incarnation, name=to.name, software=software, hub=to.hub)
    return SimpleNamespace(hello=hello, connection=connection, device=to.device, member=to)


class Invited:
    """Cleo, who is linked to both members."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrong: list[Exception] = []
        self.taken_in: list[Job] = []
        self.jobs: dict[str, Job] = {}
        self.links = {member.device: link(member) for member in (ANNA, BERT)}
        self.node = SimpleNamespace(
            device=CLEO.device, name="cleo", member=CLEO, links=self.links, history=HISTORY,
            data_dir=folder, settings=LiveSettings(folder),
            software=SimpleNamespace(torch="2.0"), job_folder=lambda job: folder / job,
            blobs=SimpleNamespace(release=lambda _job: None, trim=lambda: None),
        )  # fmt: skip
        self.registry = SimpleNamespace(
            closing=False, running=0, jobs=self.jobs, session=lambda _job: None, add=self._add,
            come_back=self._come_back,
        )  # fmt: skip
        self.tasks = TaskSet("test")
        self.admission = Admission(cast(Any, self.node), cast(Any, self.registry), self.tasks, {})
        invited = self

        class FakeIntake:
            def __init__(self, *_: object, begins: bool) -> None:
                assert not begins, "it loads the others' state, not a checkpoint"

            async def run(self) -> None:
                await asyncio.sleep(0)
                if invited.wrong:
                    raise invited.wrong.pop()

        monkeypatch.setattr(admission, "Intake", FakeIntake)

    def _add(self, job: Job) -> None:
        job.advance(JobEvent.ACCEPT)
        self.jobs[job.spec.job] = job

    async def _come_back(self, job: Job, device: str, where: object) -> None:
        assert where is None
        job.advance(JobEvent.START)
        self.taken_in.append(job)

    async def asked(self, spec: JobSpec = SPEC, by: Member = ANNA) -> str | None:
        reply = await self.admission.invited(Invite(spec=spec, generation=FIRST), by.device)
        return reply.refusal


@pytest.fixture
def cleo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invited:
    return Invited(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("count", "count_max", "chosen"), [(2, None, 2), (2, 3, 3), (2, 64, 4), (4, 4, 4), (5, 64, "only 4 devices")]
)
def test_a_job_begins_on_as_many_as_are_there(count: int, count_max: int | None, chosen: int | str) -> None:
    """`--peers N:MAX`: on N at least, and on more if they are linked: they need not load what they can begin with."""
    software = Software(meshtrain="1", python="3.11.1", torch="2.0", system="Linux")
    links = {}
    for member in (BERT, CLEO, DORA):
        links[member.device] = link(member)
        links[member.device].hello.software = software
    node = cast(Any, SimpleNamespace(device=ANNA.device, member=ANNA, software=software, links=links))
    everybody = {device: {ANNA.device, *links} for device in (ANNA.device, *links)}
    if isinstance(chosen, str):
        with pytest.raises(RequestFailed, match=chosen):
            choose_members(node, (), count, count_max, everybody)
    else:
        members, _ = choose_members(node, (), count, count_max, everybody)
        assert members == (ANNA, BERT, CLEO, DORA)[:chosen]


@pytest.mark.asyncio
async def test_two_members_that_ask_at_once_get_one_answer_and_one_job_begins(cleo: Invited) -> None:
    """Whoever asks, and also if one of them is lost meanwhile: the answer comes when the files are there."""
    assert set(await asyncio.gather(cleo.asked(by=ANNA), cleo.asked(by=BERT))) == {None}
    await asyncio.sleep(0)
    (job,) = cleo.taken_in
    assert (job.entry_mode, job.rank, job.members) == (EntryMode.LATE_JOIN, 2, (ANNA, BERT, CLEO))
    assert await cleo.asked() is None
    assert len(cleo.taken_in) == 1


@pytest.mark.asyncio
async def test_a_missing_pairing_is_named_before_anything_is_sent(cleo: Invited) -> None:
    """G7: without links to all members it could not take part."""
    del cleo.links[BERT.device]
    refusal = await cleo.asked()
    assert refusal is not None
    assert "cleo has no link to bert: pair these" in refusal
    cleo.links[BERT.device] = link(BERT.model_copy(update={"incarnation": 99}))
    assert "no link to bert" in (await cleo.asked() or ""), "that is the member of before"
    assert not cleo.jobs
    cleo.links[BERT.device] = link(BERT)
    assert await cleo.asked() is None


@pytest.mark.asyncio
async def test_what_stands_against_it_is_said(cleo: Invited) -> None:
    assert "--codec zip is unknown" in (await cleo.asked(SPEC.model_copy(update={"codec": "zip"})) or "")
    cleo.node.software.torch = None
    assert "no torch" in (await cleo.asked() or "")
    cleo.node.software.torch = "2.0"
    cleo.registry.running = limits.JOBS_RUNNING_MAX
    assert "jobs run there already" in (await cleo.asked() or "")
    cleo.registry.closing = True
    assert "stopping" in (await cleo.asked() or "")
    assert not cleo.jobs


@pytest.mark.asyncio
async def test_an_invitation_that_nobody_can_have_sent_is_refused(cleo: Invited) -> None:
    """A rank beyond those that a job can have would end in the history of jobs, and not in an answer."""
    full = SPEC.model_copy(update={"peers_max": 2})
    for spec, update, why in (
        (full, {}, "has all the devices"),
        (SPEC.model_copy(update={"peers_max": None}), {}, "has all the devices"),
        (SPEC, {"ranks": (0, 5)}, "not those of its members"),
        (SPEC, {"members": (ANNA, CLEO)}, "was in the job already"),
        (SPEC, {"ranks": (1,), "learning": (1,), "counted": (1,), "proposer": BERT.device}, "not in the job"),
        (SPEC, {"job": "k" + "0" * 11}, "is one of job k"),
    ):
        invite = Invite(spec=spec, generation=FIRST.model_copy(update=update))
        assert why in ((await cleo.admission.invited(invite, ANNA.device)).refusal or "")
    assert not cleo.jobs
    assert await cleo.asked() is None
    assert "another job" in (await cleo.asked(SPEC.model_copy(update={"seed": 2})) or "")


@pytest.mark.asyncio
async def test_files_that_do_not_fit_are_an_answer_and_the_next_invitation_a_new_try(cleo: Invited) -> None:
    cleo.wrong.append(BlobError("not enough space"))
    assert await cleo.asked() == "not enough space"
    assert cleo.jobs[JOB].state is JobState.FAILED
    assert await cleo.asked() is None
    await asyncio.sleep(0)
    assert [job.state for job in cleo.taken_in] == [JobState.STARTING]


@pytest.mark.asyncio
async def test_who_has_left_a_job_is_not_drawn_into_it_again(cleo: Invited) -> None:
    assert await cleo.asked() is None
    await asyncio.sleep(0)
    (job,) = cleo.taken_in
    job.advance(JobEvent.CANCEL, "cleo left it, the others went on")
    job.advance(JobEvent.STOPPED)
    assert await cleo.asked() == "the job has ended there: cleo left it, the others went on"


@pytest.mark.asyncio
async def test_who_leaves_while_its_files_come_is_not_drawn_into_it_again(cleo: Invited) -> None:
    """A person who does not want a job here must not wait until it has begun."""
    queries = JobQueries(cast(Any, cleo.node), cast(Any, cleo.registry), cleo.admission)
    asked = cleo.tasks.spawn(cleo.asked(), "ask")
    await asyncio.sleep(0)
    await queries.leave(JOB)
    assert "cleo left it" in (await asked or "")
    assert "cleo left it" in (await cleo.asked() or "")
    assert cleo.jobs[JOB].state is JobState.CANCELLED
    assert not cleo.taken_in
    await cleo.tasks.close()


@pytest.mark.asyncio
async def test_cancelling_while_the_files_come_ends_it_for_all(tmp_path: Path) -> None:
    """Ended here alone, the job would be joined anew a minute later."""
    asked: list[str] = []

    def member(name: str, answer: Exception | None) -> Any:
        async def request(body: Wire, **_: object) -> Done:
            assert body == Cancel(job=JOB, now=False)
            asked.append(name)
            if answer is not None:
                raise answer
            return Done()

        return SimpleNamespace(request=request)

    job = Job(SPEC, (ANNA, BERT, CLEO), 2, tmp_path, cast(Any, HISTORY), EntryMode.LATE_JOIN)
    links = {
        ANNA.device: link(ANNA, member("anna", RequestFailed("no job there"))),
        BERT.device: link(BERT, member("bert", None)),
    }
    board = SimpleNamespace(jobs={JOB: job}, session=lambda _job: None)
    node = cast(Any, SimpleNamespace(device=CLEO.device, links=links))
    questions = JobQueries(node, cast(Any, board), cast(Any, None))
    await questions.cancel(Cancel(job=JOB, now=False), "cleo", forward=True)
    assert asked == ["anna", "bert"]
    links.clear()
    with pytest.raises(RequestFailed, match=r"no device of job .* is linked now; see `meshtrain peers`"):
        await questions.cancel(Cancel(job=JOB, now=False), "cleo", forward=True)


def test_its_rank_is_that_of_the_generation_that_takes_it_in(tmp_path: Path) -> None:
    """Another device may have joined before; and it was never away."""
    job = Job(SPEC, (ANNA, BERT, CLEO), 2, tmp_path, cast(Any, HISTORY), EntryMode.LATE_JOIN)
    members = (ANNA, BERT, DORA, CLEO)
    fields: dict[str, Any] = {"members": members, "ranks": (0, 1, 2, 3), "learning": (0, 1, 2), "number": 3}
    job.take(FIRST.model_copy(update=fields))
    assert (job.rank, job.members) == (3, members)
    assert job.summary().returned == ()


def routed(node: Any) -> JobRouter:
    """A router of a device that has promised nothing."""
    router = JobRouter.__new__(JobRouter)
    router._node = node
    router._tasks = TaskSet("test")
    router.registry = JobRegistry(node, DialsNobody(), router._tasks)
    router.admission = cast(Any, SimpleNamespace(promised=lambda _job: False))
    return router


@pytest.mark.parametrize(("peers_max", "hears"), [(3, True), (None, False)])
def test_only_a_job_that_takes_newcomers_hears_those_that_ask(peers_max: int | None, hears: bool) -> None:
    """A paired device is not a member for that, and no message of it but this one counts as one's."""
    heard: list[object] = []
    router = routed(SimpleNamespace(links={}))
    passage = SimpleNamespace(
        is_member=lambda device: device == ANNA.device,
        generations=SimpleNamespace(notice=lambda _device, body: heard.append(body)),
    )
    job = SimpleNamespace(spec=SimpleNamespace(peers_max=peers_max), ended=False, members=(ANNA, BERT))
    session = SimpleNamespace(job=job, passage=passage)
    registry = cast(Any, router.registry)
    registry._ids, registry._sessions, registry._members = {7: JOB}, {JOB: session}, {ANNA.device, BERT.device}
    ask = AskIn(job=JOB, member=CLEO, linked=())
    cast(Any, router)._of_generations(CLEO.device, SimpleNamespace(job=7), ask)
    assert heard == ([ask] if hears else [])


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.LOST, None])
def test_who_asks_into_a_job_that_succeeded_before_a_restart_hears_so(state: JobState | None) -> None:
    """Else it would ask for ever. One that was lost here may go on elsewhere."""
    told: list[End] = []

    def find(job: str) -> Any:
        if state is None:
            raise UnknownJobError(job)
        return SimpleNamespace(state=state)

    connection = SimpleNamespace(notify=lambda body, **_: told.append(body))
    links = {CLEO.device: link(CLEO, connection)}
    router = cast(Any, routed(SimpleNamespace(history=SimpleNamespace(find=find), links=links)))
    router.admission.revivals = SimpleNamespace(tell=lambda _device, _job: None)  # it does not lie here
    router._of_generations(CLEO.device, SimpleNamespace(job=7), AskIn(job=JOB, member=CLEO, linked=()))
    assert [end.outcome for end in told] == (["succeeded"] if state is JobState.SUCCEEDED else [])


@pytest.mark.parametrize(
    ("way", "state"),
    [(EntryMode.LATE_JOIN, JobState.CANCELLED), (EntryMode.REJOIN, JobState.LOST)],
    ids=["joins", "returns"],
)
def test_a_job_that_succeeds_before_its_files_are_there(tmp_path: Path, way: EntryMode, state: JobState) -> None:
    """Of who joins nothing is in it; who returns was lost."""
    admission = cast(Any, Admission.__new__(Admission))
    job = Job(SPEC, (ANNA, BERT, CLEO), 2, tmp_path, cast(Any, HISTORY), way)
    job.advance(JobEvent.ACCEPT)
    admission._registry = SimpleNamespace(jobs={JOB: job}, session=lambda _job: None)
    admission.end_unstarted = lambda of, event, reason: of.advance(event, reason)
    admission.end_job(End(job=JOB, outcome="succeeded", reason="the job has ended", now=False))
    assert (job.state, job.error) == (state, "the job has ended")


# The side that asks


class Guest:
    """Cleo's end of anna's link."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[Invite] = []

    async def request(self, body: Invite, *, timeout_s: float, name: str) -> OfferReply:
        self.asked.append(body)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return OfferReply(refusal=answer)


class Looked:
    """A member that counts how often somebody has looked at its rounds."""

    def __init__(self, rounds: Any) -> None:
        self.looks = 0
        self._rounds = rounds

    @property
    def rounds(self) -> Any:
        self.looks += 1
        return self._rounds


@pytest.mark.asyncio
async def test_a_refusal_is_told_once_and_asked_about_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and in what `status -v` shows; a link that breaks is no refusal. Nobody is asked before round 1."""
    guest = Guest("no torch", "no torch", ConnectionEnded("broke"), None)
    job = Job(SPEC, (ANNA, BERT), 0, tmp_path, cast(Any, HISTORY))
    for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
        job.advance(event)
    job.take(FIRST)
    node = SimpleNamespace(device=ANNA.device, links={}, patience_s=5.0)
    node.links = {BERT.device: link(BERT), CLEO.device: link(CLEO, guest)}
    monkeypatch.setattr(inviting, "LOOK_INTERVAL_S", 0.001)
    clock = SimpleNamespace(now_s=0.0)
    loop = asyncio.get_running_loop()
    rounds = SimpleNamespace(
        complete=0, sample_space=SampleSpace(total=3, batch=9, whole_batches=False, drop_last=False)
    )
    tasks = TaskSet("test")
    member = Looked(rounds)
    asking = Inviter(cast(Any, node), job, 3, cast(Any, member), tasks)

    def job_asks() -> bool:
        return any(guest.asking for guest in asking._invitations._guests.values())

    async def looks() -> None:
        """It looks twice from now on: once with all that holds now, and whom that one asks has answered."""
        seen = member.looks
        await until(lambda: member.looks >= seen + 3, "a look")

    monkeypatch.setattr(loop, "time", _shifted(loop.time, clock))
    with caplog.at_level(logging.INFO):
        tasks.spawn(asking.run(), "invite")
        clock.now_s += 100.0
        await looks()
        assert not guest.asked, "there is no state to give before round 1"
        rounds.complete = 1
        await looks()
        for count, seconds in ((1, 2.0), (2, 2.0)):
            clock.now_s += seconds
            await until(lambda count=count: len(guest.asked) >= count and not job_asks(), "an answer")  # type: ignore[misc]
        assert len(guest.asked) == 2
        assert guest.asked[0] == Invite(spec=SPEC, generation=FIRST)
        assert [record for record in caplog.records if "does not join: no torch" in record.message] != []
        assert sum("does not join" in record.message for record in caplog.records) == 1
        assert job.summary().not_joining == (("cleo", "no torch"),)
        clock.now_s += 4.0
        await until(lambda: len(guest.asked) == 3 and job.summary().not_joining == (), "the link that breaks")
        await until(lambda: asking._invitations._guests, "the device to be seen anew")
        clock.now_s += 2.0
        await until(lambda: len(guest.asked) == 4 and not job_asks(), "its yes")
        assert asking.asked == (CLEO.device,)
    await tasks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("total", "drop_last"), [(2, False), (29, True)])
async def test_a_job_takes_no_more_devices_than_its_data_is_enough_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, drop_last: bool
) -> None:
    """X4: the newcomer's script could not prepare its loader, and would be started again three times."""
    guest = Guest()
    job = Job(SPEC, (ANNA, BERT), 0, tmp_path, cast(Any, HISTORY))
    for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
        job.advance(event)
    job.take(FIRST)
    links = {BERT.device: link(BERT), CLEO.device: link(CLEO, guest)}
    node = SimpleNamespace(device=ANNA.device, links=links, patience_s=5.0)
    space = SampleSpace(total=total, batch=10, whole_batches=False, drop_last=drop_last)
    rounds = SimpleNamespace(complete=1, sample_space=space)
    monkeypatch.setattr(inviting, "LOOK_INTERVAL_S", 0.001)
    loop = asyncio.get_running_loop()
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(loop, "time", _shifted(loop.time, clock))
    tasks = TaskSet("test")
    tasks.spawn(Inviter(cast(Any, node), job, 3, cast(Any, SimpleNamespace(rounds=rounds)), tasks).run(), "invite")
    for _ in range(2):
        await asyncio.sleep(0.02)
        clock.now_s += 100.0
    assert not guest.asked
    assert job.summary().not_joining == (("cleo", "the job's data is enough for 2 devices"),)
    await tasks.close()


def _shifted(time_s: Any, clock: Any) -> Any:
    return lambda: time_s() + clock.now_s

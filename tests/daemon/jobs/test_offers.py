"""Offers of paired devices that never become jobs: they expire, leave nothing, and keep nobody else out."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

import meshtraind.jobs.submission
from meshtraind.jobs import admission
from meshtraind.jobs.checkpoint_search import CheckpointSearch
from meshtraind.jobs.routing import JobRouter
from meshtraind.jobs.submission import Submission, check_ranks
from meshtraind.learner import software
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_history import JobHistory
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.collectives.strategy import topology_of
from meshwire.frames import header
from meshwire.jobs.lifecycle import JobState, new_job_id
from meshwire.message_base import Wire
from meshwire.messages.job import (
    FilesProgress,
    Generation,
    JobSpec,
    Member,
    Offer,
    OfferReply,
    Prepare,
    Promise,
    ResumePoint,
)
from meshwire.messages.local import Resubmit, ResumeFrom
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.jobs.test_file_intake import Peer, make_spec
from tests.daemon.linkusers import DialsNobody
from tests.torch_backend.specs import SPEC

ANNA, BERT = (Member(device=letter * 64, incarnation=1, name=name) for letter, name in (("a", "anna"), ("b", "bert")))


class Anna(Peer):
    """Offers jobs, and may never go on with them."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store)
        self.told: list[FilesProgress] = []
        self.spec = make_spec(store, {"train.py": b"print()"})

    def notify(self, body: Wire, **_to: Any) -> None:
        if isinstance(body, FilesProgress):
            self.told.append(body)

    def offer(self, number: int, **changes: Any) -> Offer:
        job = new_job_id(number.to_bytes(8))
        spec: JobSpec = self.spec.model_copy(update={"job": job, "submitter": ANNA.device, **changes})
        return Offer(spec=spec, members=(ANNA, BERT))


class Bert:
    """A daemon without a network."""

    def __init__(self, folder: Path, anna: Anna) -> None:
        folder.mkdir()
        self.folder = folder
        self.anna = anna
        self.links: dict[str, Any] = {ANNA.device: SimpleNamespace(connection=anna, hello=ANNA)}
        self.history = JobHistory(folder / "jobs.db", 0.0)
        self.node: Any = SimpleNamespace(
            device=BERT.device, name="bert", member=BERT, incarnation=1, links=self.links, history=self.history,
            software=SimpleNamespace(torch="2.0"), job_folder=lambda job: folder / "jobs" / job,
            blobs=BlobStore(folder / "blobs"), data_dir=folder, settings=LiveSettings(folder),
        )  # fmt: skip
        self.jobs = JobRouter(cast(Any, self.node), DialsNobody())

    def offered(self, offer: Offer) -> str | None:
        return self.jobs.admission.offered(offer, ANNA.device).refusal

    async def until(self, offer: Offer, *states: JobState) -> Job:
        job = self.jobs.registry.jobs[offer.spec.job]
        async with asyncio.timeout(10):
            while job.state not in states:
                await job.news(1.0)
        return job


@pytest_asyncio.fixture
async def bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bert]:
    monkeypatch.setattr(admission, "EXPIRY_POLL_S", 0.01)
    bert = Bert(tmp_path / "bert", Anna(BlobStore(tmp_path / "anna")))
    yield bert
    bert.anna.open.set()
    await bert.jobs.close()
    bert.history.close()


@pytest.mark.asyncio
async def test_an_offer_that_is_not_gone_on_with_expires_and_the_submitter_is_told(
    bert: Bert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it lay there for ever, with its files, and kept one of the places."""
    monkeypatch.setattr(limits, "OFFER_SILENCE_S_MAX", 0.5)
    offer = bert.anna.offer(1)
    assert bert.offered(offer) is None
    await bert.until(offer, JobState.READY)
    job = await bert.until(offer, JobState.FAILED)
    assert "its offer has expired after" in (job.error or "")
    assert (bert.anna.told[-1].ready, bert.anna.told[-1].error) == (False, job.error)
    assert "it has ended there: its offer has expired" in (bert.offered(offer) or ""), "repeated too late"
    async with asyncio.timeout(10):
        while job.folder.exists():
            await asyncio.sleep(0.01)
    assert bert.jobs.registry.running == 0


@pytest.mark.asyncio
async def test_an_offer_whose_files_never_come_expires(bert: Bert, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OFFER_SILENCE_S_MAX", 0.2)
    bert.anna.open.clear()
    offer = bert.anna.offer(1)
    assert bert.offered(offer) is None
    job = await bert.until(offer, JobState.FAILED)
    assert "its offer has expired after" in (job.error or "")


@pytest.mark.asyncio
async def test_an_offer_that_is_repeated_stays_but_not_for_ever(bert: Bert, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may still receive a large data folder."""
    monkeypatch.setattr(limits, "OFFER_SILENCE_S_MAX", 1.0)
    monkeypatch.setattr(limits, "OFFER_S_MAX", 2.0)
    offer = bert.anna.offer(1)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert bert.offered(offer) is None
    job = await bert.until(offer, JobState.READY)
    while not job.ended:
        assert bert.offered(offer) is None
        await job.news(0.1)
    assert loop.time() - began_s >= 2.0


@pytest.mark.asyncio
async def test_a_daemon_whose_files_were_replaced_takes_no_job_before_it_is_restarted(
    bert: Bert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6: what of itself it imports with its first job, and the job's learner, would be of another version."""
    installed = Path(shutil.copy2(header.__file__, tmp_path / "header.py"))
    monkeypatch.setattr(header, "__file__", str(installed))
    monkeypatch.setattr(software, "_AT_START", software._traits())
    assert bert.offered(bert.anna.offer(1)) is None
    installed.write_text("WIRE_VERSION = 77\n")
    refusal = "meshtrain was installed anew there while its daemon runs: meshtrain down, then meshtrain up"
    assert bert.offered(bert.anna.offer(2)) == refusal
    installed.unlink()
    assert bert.offered(bert.anna.offer(3)) == refusal


@pytest.mark.asyncio
async def test_offers_in_a_loop_leave_room_for_others_and_do_not_grow(bert: Bert) -> None:
    """Whoever is paired may run jobs here, and not keep everybody else from it."""
    refusals = [bert.offered(bert.anna.offer(number)) for number in range(100)]
    assert refusals[: limits.OFFERS_OPEN_MAX] == [None] * limits.OFFERS_OPEN_MAX
    assert all("wait there to begin already" in str(refusal) for refusal in refusals[limits.OFFERS_OPEN_MAX :])
    assert len(bert.jobs.registry.jobs) == len(bert.history.newest()) == limits.OFFERS_OPEN_MAX
    assert limits.OFFERS_OPEN_MAX < limits.JOBS_RUNNING_MAX


@pytest.mark.asyncio
async def test_arguments_beyond_what_a_person_may_type_are_refused(bert: Bert) -> None:
    """A message of a megabyte may hold half a million of them, and what is offered is remembered."""
    for changes in ({"args": ("",) * 200_000}, {"env": (("A", "x" * 200_000),)}):
        assert "its arguments and environment take" in (bert.offered(bert.anna.offer(1, **changes)) or "")
    assert bert.offered(bert.anna.offer(1, args=("x" * limits.JOB_SPEC_BYTES_MAX,))) is None


@pytest.mark.asyncio
async def test_a_codec_that_does_not_go_with_the_bound_is_refused(bert: Bert) -> None:
    """C2: whoever submits has looked; but its daemon may be any."""
    bound = {"sync": sync_settings("ssp:2")}
    refusal = "--codec powersgd does not go with --sync ssp:2 (there: install the same version of meshtraind)"
    assert bert.offered(bert.anna.offer(1, codec="powersgd", **bound)) == refusal
    assert bert.offered(bert.anna.offer(2, codec="powersgd:half", **bound)) is None
    assert bert.offered(bert.anna.offer(3, codec="powersgd")) is None


@pytest.mark.asyncio
async def test_arguments_are_not_remembered(bert: Bert) -> None:
    """Nobody asks for them afterwards: a hundred offers left 6 MB, which each list of jobs read and threw away."""
    offer = bert.anna.offer(1, args=("x" * 60_000,))
    assert bert.offered(offer) is None
    assert len(bert.history.find(offer.spec.job).pack()) < 2_000


@pytest.mark.asyncio
async def test_a_submission_repeats_its_offer_while_others_receive_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says why when a member does not stand by it any more."""
    monkeypatch.setattr(meshtraind.jobs.submission, "OFFER_REPEAT_S", 0.0)
    monkeypatch.setattr(meshtraind.jobs.submission, "PROGRESS_INTERVAL_S", 0.01)
    replies = [OfferReply(refusal=None)] * 3 + [OfferReply(refusal="its offer has expired after 180 s")]
    asked: list[Wire] = []

    async def request(body: Wire, **_how: Any) -> Wire:
        asked.append(body)
        return replies[len(asked) - 1]

    links = {BERT.device: SimpleNamespace(connection=SimpleNamespace(request=request))}
    node: Any = SimpleNamespace(device=ANNA.device, links=links)
    nobody: Any = None
    submission = Submission(node, nobody, nobody, lambda _event: None)
    offer = Anna(BlobStore(tmp_path / "anna")).offer(1)
    alone = Generation.first(offer.spec.job, ANNA.device, (BERT,))
    await submission._offer_all(offer.spec, alone)
    with pytest.raises(RequestFailed, match="bert refused the job: its offer has expired"):
        await submission._await_files(offer.spec, alone)
    assert len(asked) == 4


@pytest.mark.asyncio
async def test_who_submits_a_job_need_not_be_in_it(bert: Bert) -> None:
    """G2: the first generation of a job is its submitter's to propose, as it is offered and not otherwise."""
    offer = bert.anna.offer(1)
    alone = offer.model_copy(update={"members": (BERT,)})
    assert bert.offered(alone) is None
    await bert.until(alone, JobState.READY)
    first = Generation.first(alone.spec.job, ANNA.device, (BERT,))
    later = bert.jobs.admission.prepared(first.model_copy(update={"number": 2}))
    assert later.refusal == "the proposed generation is wrong: it is not the first one of this job"
    assert bert.jobs.admission.prepared(first).refusal is None


@pytest.mark.asyncio
@pytest.mark.parametrize(("members", "is_asked_first"), [((BERT,), True), ((ANNA, BERT), False)])
async def test_a_port_is_agreed_upon_before_a_member_may_hear_that_scripts_begin(
    bert: Bert, members: tuple[Member, ...], is_asked_first: bool
) -> None:
    """P9: rank 0 promises one, and the others are told with theirs."""
    offer = bert.anna.offer(1)
    offer = offer.model_copy(update={"members": members, "spec": offer.spec.model_copy(update={"engine": "torchrun"})})
    assert bert.offered(offer) is None
    await bert.until(offer, JobState.READY)
    first = Generation.first(offer.spec.job, ANNA.device, members)
    promise = bert.jobs.admission.prepared(first, 4000)
    assert promise.refusal is None
    port = bert.jobs.registry.jobs[offer.spec.job].port
    assert port == promise.port
    assert (port != 4000) is is_asked_first


@pytest.mark.asyncio
async def test_rank_0_is_asked_for_a_port_before_all_others() -> None:
    """P9."""
    asked: dict[str, Prepare] = {}

    def link(name: str, port: int | None) -> Any:
        async def request(body: Prepare, **_how: Any) -> Wire:
            asked[name] = body
            return Promise(refusal=None, port=port)

        return SimpleNamespace(connection=SimpleNamespace(request=request, notify=lambda *_, **__: None))

    cleo = BERT.model_copy(update={"device": "9" * 64, "name": "cleo"})
    node: Any = SimpleNamespace(
        device=ANNA.device, links={BERT.device: link("bert", 4000), cleo.device: link("cleo", 1)}
    )
    nobody: Any = None
    submission = Submission(node, nobody, nobody, lambda _event: None)
    await submission._agree(SPEC, Generation.first(SPEC.job, ANNA.device, (BERT, cleo)))
    assert [(name, body.port) for name, body in asked.items()] == [("bert", None), ("cleo", 4000)]


@pytest.mark.parametrize(
    ("topology", "peers_max", "complaint"),
    [
        ("ring", None, None),
        ("sharded:0,1,1", None, None),
        ("star:2", None, "--topology star:2: the job has no such rank; rank 0 is anna, rank 1 is bert$"),
        ("star:2", 3, None),  # who joins later has it
        ("hierarchical:1,60", 4, "rank 1 is bert, and others join up to 4 in all$"),
    ],
)
def test_ranks_that_a_job_can_never_have_are_refused(
    topology: str, peers_max: int | None, complaint: str | None
) -> None:
    """C2: it would be another topology, without a word."""
    of = topology_of(topology)
    if complaint is None:
        assert check_ranks(of, (ANNA, BERT), peers_max) == "rank 0 is anna, rank 1 is bert"
    else:
        with pytest.raises(RequestFailed, match=complaint):
            check_ranks(of, (ANNA, BERT), peers_max)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "topology", ["star:64", "sharded:" + "9" * 99, "hierarchical:", "ring:0", "\u0663", "tree\x1b[31m", ""]
)
async def test_a_topology_that_no_person_can_have_typed_is_refused(bert: Bert, topology: str) -> None:
    """C2: whoever submits checks it before: this one has not."""
    refusal = bert.offered(bert.anna.offer(1, topology=topology)) or ""
    assert "--topology" in refusal
    assert "same version" in refusal
    assert not bert.jobs.registry.jobs


@pytest.mark.asyncio
@pytest.mark.parametrize("topology", ["star:0", "star:2", "ring", None])
async def test_who_resumes_a_job_is_told_whom_its_topology_names_now(
    topology: str | None, bert: Bert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C2: ranks go by who submits, or by --on: the one in the middle had a cable."""
    spec = bert.anna.spec.model_copy(update={"topology": topology})
    point = ResumePoint(job=spec.job, round=40, files=spec.files)
    resumed = SimpleNamespace(spec=spec, point=point, source=None)

    async def brings(*_asked: object) -> Any:
        return resumed

    monkeypatch.setattr(Submission, "_bring", brings)
    monkeypatch.setattr(CheckpointSearch, "bring_files", brings)
    body = Resubmit(resume=ResumeFrom(job=spec.job))
    resubmission = Submission(bert.node, bert.jobs.admission, body, lambda _progress: None)
    notes: list[str] = []
    if topology == "star:2":
        with pytest.raises(RequestFailed, match="the job has no such rank; rank 0 is bert, rank 1 is anna"):
            await resubmission._again(body, "owner", notes, (BERT, ANNA))
        return
    assert (await resubmission._again(body, "owner", notes, (BERT, ANNA))).topology == topology
    told = ["--topology star:0, as before: now rank 0 is bert, rank 1 is anna (others: --on, in the order of ranks)"]
    assert notes == (told if topology == "star:0" else [])
    assert (await resubmission._again(body, "owner", notes)).topology == topology, "ranks are those of before"

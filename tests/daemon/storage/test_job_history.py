"""The job history: survives restarts, tells prefixes apart, and never guesses about a file it does not know."""

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.api.peer_handler import PeerHandler
from meshtraind.jobs import admission
from meshtraind.jobs.admission import Admission
from meshtraind.jobs.queries import JobQueries
from meshtraind.runtime.data_folder import FORMAT
from meshtraind.storage import job_record as jobs_here
from meshtraind.storage.job_history import (
    AmbiguousJobError,
    HistoryError,
    JobHistory,
    UnknownJobError,
)
from meshtraind.storage.job_record import EntryMode, Job, summary_of
from meshtraind.storage.resume_file import JobFile, load_all
from meshwire import limits
from meshwire.jobs.lifecycle import TERMINAL_STATES, JobEvent, JobRecord, JobState, new_job_id
from meshwire.messages.job import BlobRef, Find, Found, GivenUp, JobSpec, Member, Metrics, RankReport
from meshwire.sync_modes.mode import sync_settings

DEVICE = "ab" * 32


def record(number: int, state: JobState = JobState.SUCCEEDED, at_s: float = 1_790_000_000.0) -> JobRecord:
    return JobRecord(
        id=new_job_id((2**60 - 1 - (number << 10)).to_bytes(8, "big")),  # later ones sort before
        name=f"job-{number}",
        spec={"script": "train.py", "args": ["--lr", "1e-3"], "env": {"KEY": "ü"}},
        state=state,
        members=(DEVICE, "cd" * 32),
        submitter=DEVICE,
        created_s=at_s + number,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def history(path: Path) -> Iterator[JobHistory]:
    history = JobHistory(path, now_s=0.0)
    yield history
    history.close()


def test_records_read_back_equal_after_a_restart(path: Path) -> None:
    ended = record(1).model_copy(
        update={"started_s": 1.5, "ended_s": 2.5, "exit_code": 1, "error": "rank 1: ZeroDivisionError"}
    )
    first = JobHistory(path, now_s=0.0)
    first.put(ended)
    first.put(record(2))
    first.close()
    second = JobHistory(path, now_s=9.0)
    assert second.lost == ()
    assert second.find(ended.id) == ended
    assert second.newest() == (record(2), ended)
    assert second.newest(1) == (record(2),)
    second.close()


def test_put_replaces_what_was_known(history: JobHistory) -> None:
    history.put(record(1, JobState.RUNNING))
    history.put(record(1, JobState.FAILED))
    assert [job.state for job in history.newest()] == [JobState.FAILED]


def test_a_full_disk_is_told_as_one_and_leaves_nothing_half_done(history: JobHistory) -> None:
    """SQLite ends a transaction by itself where the disk is full."""
    history.put(record(1))
    (pages,) = history._db.execute("PRAGMA page_count").fetchone()
    history._db.execute(f"PRAGMA max_page_count = {pages}")
    long = record(2).model_copy(update={"spec": {"script": "x" * 20_000}})

    def put_both() -> None:
        with history._explained(), history._transaction():
            history._put(record(3))
            history._put(long)

    with pytest.raises(HistoryError, match="full") as caught:
        put_both()
    assert "rollback" not in str(caught.value)
    history._db.execute("PRAGMA max_page_count = 1000")
    with history._transaction():
        history._put(long)
    assert history.newest() == (long, record(1))


@pytest.mark.parametrize("state", sorted(JobState))
def test_jobs_that_ran_when_the_daemon_died_are_lost(path: Path, state: JobState) -> None:
    """Every job that had not ended is marked, with the reason; an ended one is left as it was."""
    first = JobHistory(path, now_s=0.0)
    first.put(record(1, state))
    first.close()
    second = JobHistory(path, now_s=77.0)
    (job,) = second.newest()
    if state in TERMINAL_STATES:
        assert second.lost == ()
        assert job == record(1, state)
    else:
        assert second.lost == (job,)
        assert job.state is JobState.LOST
        assert job.ended_s == 77.0
        assert f"stopped while the job was {state.value}" in (job.error or "")
    second.close()


@pytest.mark.parametrize(("started_s", "way_on"), [(None, "submit the job again"), (1.0, "meshtrain submit --resume ")])
def test_a_lost_job_says_how_it_goes_on(path: Path, started_s: float | None, way_on: str) -> None:
    """One that has trained may have a checkpoint."""
    first = JobHistory(path, now_s=0.0)
    first.put(record(1, JobState.RUNNING).model_copy(update={"started_s": started_s}))
    first.close()
    second = JobHistory(path, now_s=77.0)
    assert way_on in (second.lost[0].error or "")
    second.close()


def test_a_known_error_of_a_lost_job_is_kept(path: Path) -> None:
    first = JobHistory(path, now_s=0.0)
    first.put(record(1, JobState.FAILING).model_copy(update={"error": "rank 1 raised KeyError"}))
    first.close()
    second = JobHistory(path, now_s=1.0)
    assert second.lost[0].error == "rank 1 raised KeyError"
    second.close()


def test_a_prefix_is_enough_when_it_is_unique(history: JobHistory) -> None:
    """Id prefixes, as in docker."""
    near, far = record(1), record(2, at_s=1_900_000_000.0)
    history.put(near)
    history.put(far)
    assert near.id[:3] != far.id[:3]
    assert history.find(near.id[:3]) == near
    assert history.find(far.id) == far


def test_ambiguous_and_unknown_prefixes_are_named(history: JobHistory) -> None:
    for number in range(8):
        history.put(record(number))
    with pytest.raises(AmbiguousJobError, match=rf"begin with 'zz'.*{record(7).id} \(job-7\).*\.\.\."):
        history.find("zz")
    for unknown in ("z0z", "", "%", "_", "1%", "0" * 12, "'; DROP TABLE jobs; --"):
        with pytest.raises(UnknownJobError):
            history.find(unknown)
    assert len(history.newest()) == 8


def test_a_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
        db.execute("CREATE TABLE other (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(HistoryError, match=rf"newer meshtraind \(format {FORMAT + 1}.*update"):
        JobHistory(path, now_s=0.0)
    assert path.read_bytes() == before


def test_a_file_that_is_no_history_is_named(path: Path) -> None:
    path.write_bytes(b"not a database, and longer than sqlite's header of one hundred bytes" * 4)
    with pytest.raises(HistoryError, match=r"jobs\.db: file is not a database"):
        JobHistory(path, now_s=0.0)


def test_an_unopenable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="no-such-folder"):
        JobHistory(tmp_path / "no-such-folder" / "jobs.db", now_s=0.0)


def test_only_the_owner_can_read_it(history: JobHistory, path: Path) -> None:
    """A job's environment may hold secrets."""
    history.put(record(1))
    for file in path.parent.glob("jobs.db*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_limits(history: JobHistory) -> None:
    big = record(1).model_copy(update={"spec": {"x": "y" * limits.JOB_SPEC_BYTES_MAX}})
    with pytest.raises(HistoryError, match=f"specification of job {big.id}"):
        history.put(big)
    with pytest.raises(ValueError, match="error"):
        history.put(record(1).model_copy(update={"error": "x" * (limits.ERROR_CHARS_MAX + 1)}))
    for count in (0, limits.JOBS_LISTED_MAX + 1):
        with pytest.raises(ValueError, match="can be listed"):
            history.newest(count)
    assert history.newest() == ()


def test_a_killed_daemon_knows_since_when_a_job_ran_and_how_far_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was lost `meshtrain jobs` says so; one that it returns to goes on to count from its start."""
    monkeypatch.setattr(jobs_here, "SAVE_INTERVAL_S", 0.0)
    spec = JobSpec(
        job=new_job_id(bytes(8)), name="train", submitter=DEVICE, created_at_s=1.0, script="train.py", args=(),
        env=(), files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32",
        on_nan="stop", seed=1, bucket_bytes=4096, hash_every=0, trace=False,
    )  # fmt: skip
    members = tuple(Member(device=letter * 64, incarnation=1, name=letter) for letter in "ab")
    history = JobHistory(tmp_path / "jobs.db", now_s=0.0)
    job = Job(spec, members, 0, tmp_path, history)
    for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START):
        job.advance(event)
    given_up = GivenUp(first=3, last=5, samples=12, made_by=(1,), kept=(0,))
    report = RankReport(job=spec.job, rank=1, state="running", metrics=Metrics(round=7), given_up=(given_up,))
    job.report(report)
    began_s = job.started_at_s
    JobFile(spec=spec, members=members, started_at_s=began_s).save(tmp_path)
    history.close()

    history = JobHistory(tmp_path / "jobs.db", now_s=1e10)
    (lost,) = (summary_of(record) for record in history.lost)
    assert (lost.state, lost.rounds, lost.started_at_s) == (JobState.LOST, 7, began_s)
    assert lost.given_up == (given_up,)
    left = load_all([tmp_path])[spec.job]
    again = Job(left.spec, members, 0, tmp_path, history, EntryMode.REJOIN, left.started_at_s)
    for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START):
        again.advance(event)
    assert again.summary().started_at_s == began_s
    history.close()


def test_nobody_waits_for_mt_prepare_where_scripts_have_process_groups(tmp_path: Path) -> None:
    """P5: `status` said so as long as the job ran, and the owner was told that it needs help."""
    spec = JobSpec(
        job=new_job_id(bytes(8)), name="train", submitter=DEVICE, created_at_s=1.0, script="train.py", args=(),
        env=(), files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32",
        on_nan="stop", seed=1, bucket_bytes=4096, hash_every=0, trace=False,
    )  # fmt: skip
    members = tuple(Member(device=letter * 64, incarnation=1, name=letter) for letter in "ab")
    history = JobHistory(tmp_path / "jobs.db", now_s=0.0)
    job = Job(spec, members, 0, tmp_path, history)
    job.wait("a and b to prepare", to_prepare=True)
    assert job.summary().waiting_for == job.waiting == "a and b to prepare"
    job.report(RankReport(job=spec.job, rank=1, state="running", metrics=Metrics(stage="process group")))
    assert (job.summary().waiting_for, job.waiting) == (None, "")
    job.wait("promises of generation 2: b")
    assert job.waiting == "promises of generation 2: b", "that is waited for with process groups, too"
    history.close()


def ended(number: int, ended_s: float, *, began: bool = True, error: str | None = None) -> JobRecord:
    changes = {"ended_s": ended_s, "started_s": 1.0 if began else None, "error": error}
    return record(number, JobState.FAILED).model_copy(update=changes)


def test_offers_in_a_loop_drive_out_each_other_and_nothing_that_was_trained(history: JobHistory) -> None:
    """Once nothing was ever forgotten: 190 offers left 15 MB."""
    trained, waiting = ended(0, 10.0), record(1, JobState.OFFERED)
    history.put(trained)
    history.put(waiting)
    offers = [ended(2 + number, 20.0 + number, began=False) for number in range(limits.UNBEGUN_REMEMBERED_MAX + 50)]
    for offer in offers:
        history.put(offer)
    assert {job.id for job in history.newest()} == {job.id for job in (trained, waiting, *offers[50:])}


def test_jobs_are_forgotten_by_number_age_and_bytes_and_never_one_that_has_not_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOBS_REMEMBERED_MAX", 5)
    monkeypatch.setattr(limits, "JOBS_REMEMBERED_S_MAX", 100.0)
    monkeypatch.setattr(limits, "HISTORY_BYTES_MAX", 40_000)
    history = JobHistory(path, now_s=0.0)
    running = [record(number, JobState.RUNNING) for number in range(20, 30)]
    for job in running:
        history.put(job)
    for number in range(8):
        history.put(ended(number, float(number)))
    assert [job.ended_s for job in history.newest()] == [None] * 10 + [7.0, 6.0, 5.0, 4.0, 3.0]
    history.put(ended(9, 105.5))
    assert {job.ended_s for job in history.newest()} == {None, 6.0, 7.0, 105.5}, "older than 100 s"
    for number in range(10, 14):
        history.put(ended(number, 106.0 + number, error="x" * 15_000))
    assert {job.ended_s for job in history.newest()} == {None, 105.5, 118.0, 119.0}, "more do not fit into 40 kB"
    history.close()
    again = JobHistory(path, now_s=10_000.0)
    assert {job.state for job in again.newest()} == {JobState.LOST}, "they had not ended when the daemon did"
    again.close()


def test_no_more_is_read_than_a_list_holds(history: JobHistory) -> None:
    """A list of a thousand tracebacks took half a second of the daemon, and anybody who is paired may ask for it."""
    for number in range(60):
        history.put(ended(number, float(number), error="x" * 15_000))
    listed = history.newest()
    assert [job.created_s for job in listed] == [record(59 - at).created_s for at in range(len(listed))]
    assert limits.JOBS_LISTED_BYTES_MAX - 32_000 < 15_000 * len(listed) < limits.JOBS_LISTED_BYTES_MAX
    oldest = record(0).id
    assert [job.id for job in history.newest(id_prefix=oldest)] == [oldest], "an id is found, however old"


@pytest.mark.asyncio
async def test_lists_that_peers_ask_for_leave_the_loop_to_others(history: JobHistory) -> None:
    """Sixty-four at once: a heartbeat, a round or a person's `status` goes between any two."""
    history.put(ended(1, 2.0))
    node: Any = SimpleNamespace(history=history)
    coming = SimpleNamespace(waiting=lambda _job: None, comes_back=lambda _job: False)
    registry: Any = SimpleNamespace(jobs={})
    peers = PeerHandler(node, registry, JobQueries(node, registry, cast(Any, coming)), cast(Any, None), cast(Any, None))
    loop = asyncio.get_running_loop()
    turns, listed_at = 0, []

    def turn() -> None:
        nonlocal turns
        turns += 1
        handle[0] = loop.call_soon(turn)

    async def ask() -> None:
        reply = await peers.request(cast(Any, None), cast(Any, None), Find(prefix=""), cast(Any, None))
        assert isinstance(reply, Found)
        listed_at.append((turns, len(reply.jobs)))

    handle = [loop.call_soon(turn)]
    await asyncio.gather(*(ask() for _ in range(limits.REQUESTS_PER_CONNECTION_MAX)))
    handle[0].cancel()
    assert len(set(listed_at)) == limits.REQUESTS_PER_CONNECTION_MAX
    assert {count for _, count in listed_at} == {1}


def test_the_file_shrinks_when_most_of_it_was_forgotten(path: Path) -> None:
    history = JobHistory(path, now_s=0.0)
    for number in range(200):
        history.put(ended(number, float(number), error="x" * 15_000))
    history.close()
    grown_bytes = path.stat().st_size
    JobHistory(path, now_s=limits.JOBS_REMEMBERED_S_MAX + 195.0).close()
    assert grown_bytes > 3 * limits.MIB
    assert path.stat().st_size < limits.MIB / 4


def test_what_is_known_of_rounds_given_up_converges_and_does_not_grow(tmp_path: Path, history: JobHistory) -> None:
    """Members pass on what they know, in any order and as often as they like; a liar cannot fill anything."""
    spec = JobSpec(
        job=new_job_id(bytes(8)), name="train", submitter=DEVICE, created_at_s=1.0, script="train.py", args=(),
        env=(), files=BlobRef(sha256=bytes(32), size_bytes=1), data=None, sync=sync_settings("bsp"), codec="fp32",
        on_nan="stop", seed=1, bucket_bytes=4096, hash_every=0, trace=False,
    )  # fmt: skip
    members = tuple(Member(device=letter * 64, incarnation=1, name=letter) for letter in "ab")
    everybody = tuple(range(limits.MEMBERS_MAX))
    many = [
        GivenUp(
            first=2**32 - 9,
            last=2**32 - 1 - n % 5,
            samples=2**63 - 1,
            made_by=everybody,
            kept=(n % 40, *everybody[:63]),
            saved=(2**32 - 1 - n % 3, f"{n % 7:08x}") if n % 4 == 0 else None,
            unsaved=f"{n % 6}" * limits.GIVEN_UP_REASON_CHARS_MAX if n % 4 > 1 else None,
        )
        for n in range(200)
    ]
    jobs = [Job(spec, members, rank, tmp_path, history) for rank in (0, 1)]
    for job, news in zip(jobs, (many, many[::-1]), strict=True):
        for one in news:
            job.take_given_up([one])
    for _ in range(2):
        jobs[0].take_given_up(jobs[1].given_up)
        jobs[1].take_given_up(jobs[0].given_up)
    assert jobs[0].given_up == jobs[1].given_up
    assert len(jobs[0].given_up) == limits.GIVEN_UP_MAX
    assert {one.saved is None for one in jobs[0].given_up} == {True, False}
    assert all(one.unsaved is None for one in jobs[0].given_up if one.saved), "some member has saved it"
    summary = jobs[0].summary()
    assert summary.given_up == jobs[0].given_up
    assert len(summary.pack()) < limits.JOBS_LISTED_BYTES_MAX // 20
    assert summary_of(history.find(spec.job)).given_up == jobs[0].given_up
    before = jobs[0].given_up
    jobs[0].report(RankReport(job=spec.job, rank=1, state="running"))  # a restarted daemon knows nothing of it
    assert jobs[0].given_up == before


def test_a_job_is_not_called_lost_while_its_members_are_looked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: a daemon that was just started does not know yet whether the others go on. Whoever follows the job goes on,
    too; it is over when no member has told of it for a while, or at once if none could."""
    with closing(JobHistory(path, 5.0)) as before:
        before.put(record(1, JobState.RUNNING))
    with closing(JobHistory(path, 5.0)) as history:
        node: Any = SimpleNamespace(history=history, data_dir=path.parent)
        board: Any = SimpleNamespace(jobs={})
        left: Any = SimpleNamespace(generation=None)
        board.admission = Admission(node, board, cast(Any, None), {record(1).id: left})
        questions = JobQueries(node, board, board.admission)
        (job,) = questions.summaries("")
        assert (job.state, job.ended_at_s, job.error, job.waiting_for) == (
            JobState.READY,
            None,
            None,
            admission.RETURNS,
        )
        board.admission._left.clear()
        (job,) = questions.summaries("")
        assert job.state == JobState.LOST, "nothing of it is left that could go on"
        board.admission._left[record(1).id] = left
        monkeypatch.setattr(admission, "RETURNS_WITHIN_S", 0.0)
        (job,) = questions.summaries("")
        assert job.state == JobState.LOST
        assert job.ended_at_s == 5.0

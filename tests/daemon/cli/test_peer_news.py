"""What a person is told of who takes part in a job: losses, returns, restarts, and how it went on."""

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from meshtrain.cli.ui.follow_view import View
from meshtrain.cli.ui.peer_table import peer_rows, render_peers
from meshtrain.following.job_news import FAILURE_HOLD_S
from meshtrain.following.status_line import status_text
from meshtrain.following.watching import outcome_lines
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import GivenUp, JobSummary, Metrics, RankReport, RefusedRank
from meshwire.messages.local import GetJobs, GetStatus
from meshwire.peer_news import joined, news, outcome_notes, part_of
from meshwire.text import printable
from tests.daemon.fakedaemon import JOB, MEMBERS, STATUS, Endpoint, known_jobs, member, run, summary

THREE = (*MEMBERS, member("ef" * 32, "cleo"))
pytestmark = pytest.mark.usefixtures("plain_environment")

KILLED = "rank 2 (cleo): the script was killed by signal 9\nTraceback: no"


def report(rank: int, **changes: Any) -> RankReport:
    fields: dict[str, Any] = {"state": "running", "metrics": Metrics(step=9, round=6)}
    return RankReport(job=JOB, rank=rank, **(fields | changes))


def job(
    generation: int,
    present: tuple[int, ...],
    learning: tuple[int, ...] | None = None,
    cleo: RankReport | None = None,
    **changes: Any,
) -> JobSummary:
    reports = (report(0), report(1), *([cleo] if cleo is not None else []))
    fields: dict[str, Any] = {
        "members": THREE,
        "ranks": reports,
        "generation": generation,
        "present": present,
        "learning": present if learning is None else learning,
        "rounds": 6,
    }
    return summary(changes.pop("state", JobState.RUNNING), **(fields | changes))


FIRST = job(1, (0, 1, 2), cleo=report(2))
LOST = job(2, (0, 1), cleo=report(2))
BACK = job(3, (0, 1, 2), (0, 1), cleo=report(2), returned=(2,))
AGAIN = job(4, (0, 1, 2), cleo=report(2), returned=(2,))


def test_a_restart_of_all_scripts_is_one_line() -> None:
    """P6: it says whatever else could be said of who is in, and who has failed."""
    said = "cleo was lost: restarting on anna and bert, 1 of 3"
    failed = report(1, restarts=1, failure="rank 1 (bert): cleo is gone: the connection broke")
    after = LOST.model_copy(update={"restarted": said, "ranks": (report(0), failed, report(2))})
    assert news(FIRST, after) == [said]
    assert news(after, after) == []
    console = Console(file=io.StringIO(), width=120)
    console.print(render_peers(after))
    assert f"note: {said}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"note: {said}" not in outcome_notes(after)


def test_a_loss_and_a_return_are_three_lines() -> None:
    """G2: each change of who is in, or who computes, is a generation."""
    assert news(FIRST, LOST) == ["cleo was lost; anna and bert go on (generation 2)"]
    assert news(LOST, BACK) == ["cleo is back, loading (generation 3)"]
    assert news(BACK, AGAIN) == ["cleo computes again (generation 4)"]
    assert news(AGAIN, AGAIN) == []


def test_who_goes_on_provisionally_is_told_what_may_become_of_it(endpoint: Endpoint) -> None:
    """G4: a part that is not entitled goes on after 30 s, and yields to one that is."""
    apart = job(2, (2,), cleo=report(2), provisional=True)
    told = (
        "cleo goes on provisionally, apart from anna and bert: if those have gone on too, what it computes meanwhile "
        "is given up, and kept as a checkpoint"
    )
    assert news(FIRST, apart) == ["anna and bert were lost; cleo goes on (generation 2)", told]
    assert news(apart, apart) == []
    assert news(LOST, job(3, (0, 1), provisional=False)) == []
    endpoint.answers[GetJobs] = known_jobs(apart)
    assert f"{JOB}: {told}" in run("jobs").stderr
    screen = Console(file=io.StringIO(), width=200)
    screen.print(render_peers(apart))
    assert isinstance(screen.file, io.StringIO)
    assert f"note: {told}" in " ".join(screen.file.getvalue().split())
    ended = job(2, (2,), cleo=report(2), provisional=True, state=JobState.CANCELLED)
    endpoint.answers[GetJobs] = known_jobs(ended)
    assert told not in run("jobs").stderr


def test_who_joins_was_not_away() -> None:
    """`--peers N:MAX`: it gets the next rank, loads, and computes."""
    two = job(1, (0, 1), members=MEMBERS)
    loading = job(2, (0, 1, 2), (0, 1), cleo=report(2))
    assert news(two, loading) == ["cleo joined, loading (generation 2)"]
    assert part_of(loading, 2) == "loading"
    assert news(loading, job(3, (0, 1, 2), cleo=report(2))) == ["cleo computes now, too (generation 3)"]


def test_whoever_looks_seldom_misses_steps_and_not_the_result() -> None:
    assert news(LOST, AGAIN) == ["cleo computes again (generation 4)"]
    assert news(FIRST, job(5, (0,))) == ["bert and cleo were lost; anna goes on (generation 5)"]


def test_who_was_taken_out_was_not_lost() -> None:
    left = job(2, (0, 1), cleo=report(2, part="leaves"))
    assert news(FIRST, left) == ["cleo was taken out; anna and bert go on (generation 2)"]
    assert part_of(left, 2) == "left"


def test_who_broke_the_protocol_was_refused_and_the_reason_is_said() -> None:
    """G10: in the news, in the table, and at the end."""
    refused = (RefusedRank(rank=2, reason="round 9, bucket 0: fp32: not a number", violations=1),)
    out = job(2, (0, 1), cleo=report(2), refused=refused)
    why = "was refused: round 9, bucket 0: fp32: not a number"
    assert news(FIRST, out) == [f"cleo {why}; anna and bert go on (generation 2)"]
    assert part_of(out, 2) == "refused"
    ended = job(2, (0, 1), state=JobState.SUCCEEDED, refused=refused)
    assert outcome_notes(ended) == [f"it ended without cleo, which {why}"]


def test_nothing_is_told_of_a_job_that_this_device_was_not_in() -> None:
    assert news(job(0, ()), AGAIN) == []


def test_a_script_that_failed_is_told_with_its_reason_and_what_follows() -> None:
    """J3: it is started again, and after some restarts no more."""
    again = job(2, (0, 1, 2), (0, 1), cleo=report(2, failure=KILLED, restarts=1))
    assert news(FIRST, again) == ["cleo: the script was killed by signal 9; it is started again (restart 1)"]
    assert news(again, again) == []
    forwards = job(3, (0, 1, 2), (0, 1), cleo=report(2, failure=KILLED, restarts=1, part="forwards"))
    assert news(again, forwards) == [
        "cleo: the script was killed by signal 9; it is not started again: this peer forwards what the others send"
    ]


@pytest.mark.parametrize(
    ("seen", "part"),
    [
        (FIRST, "in"),
        (LOST, "lost"),
        (BACK, "loading"),
        (AGAIN, "back"),
        (job(3, (0, 1, 2), (0, 1), cleo=report(2, part="forwards", failure=KILLED)), "forwards"),
        (job(3, (0, 1, 2), (0, 1), cleo=report(2, part="rests")), "rests"),
        (job(3, (0, 1), (0, 1), cleo=report(2, part="rests")), "lost"),
        (job(1, (0, 1, 2), cleo=report(2, exit_code=0)), "done"),
        (job(2, (0, 1), cleo=report(2, exit_code=0)), "done"),
        (job(2, (0, 1)), "lost"),
        (job(0, (), cleo=report(2)), "-"),
    ],
)
def test_one_word_says_how_a_member_takes_part(seen: JobSummary, part: str) -> None:
    assert part_of(seen, 2) == part


def test_the_table_has_a_line_for_whoever_was_lost_and_no_reason_to_wait() -> None:
    """What it said last is no longer so; of whom this daemon never heard there is a line, too."""
    waiting = report(2, restarts=1, metrics=Metrics(step=9, round=6, waiting_for="round 7 waits for rank 0"))
    rows = peer_rows(job(2, (0, 1), cleo=waiting))
    assert [row[:3] for row in rows] == [("anna", "in", "9"), ("bert", "in", "9"), ("cleo", "lost (run 2)", "9")]
    assert rows[2][-1] == "-"
    assert peer_rows(job(2, (0, 1)))[2][:3] == ("cleo", "lost", "0")
    assert "waits" not in status_text(job(2, (0, 1), cleo=waiting), lasting=[2])


def test_where_a_job_stands_says_who_is_missing_and_what_a_change_waits_for() -> None:
    waiting = job(2, (0, 1), waiting_for="a new generation: cleo asks in")
    assert status_text(waiting) == "train running · 2 of 3 peers · waiting: a new generation: cleo asks in · round 6"


def test_a_follower_is_told_each_event_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = View([one.name for one in THREE], [0, 1, 2], io.StringIO())
    for seen in (FIRST, FIRST, LOST, LOST, BACK, AGAIN):
        view.status(seen)
    assert capsys.readouterr().err.splitlines() == [
        f"job {JOB} running",
        "cleo was lost; anna and bert go on (generation 2)",
        "cleo is back, loading (generation 3)",
        "cleo computes again (generation 4)",
    ]


def test_a_job_that_ended_well_says_without_whom_and_what_was_started_again() -> None:
    """It has succeeded: the others have finished it."""
    ended = job(2, (0, 1), state=JobState.SUCCEEDED, cleo=report(2))
    assert outcome_lines(ended)[1:] == ["note: it ended without cleo, which was lost on the way"]
    left = job(2, (0, 1), state=JobState.SUCCEEDED, cleo=report(2, part="leaves"))
    assert outcome_lines(left)[1:] == ["note: it ended without cleo, which was taken out of it"]
    again = job(3, (0, 1, 2), state=JobState.SUCCEEDED, cleo=report(2, failure=KILLED, restarts=1, exit_code=0))
    assert outcome_lines(again)[1:] == ["note: cleo: the script was killed by signal 9; it was started again"]
    never = job(3, (0, 1, 2), state=JobState.SUCCEEDED, cleo=report(2, failure=KILLED, part="forwards"))
    assert outcome_lines(never)[1:] == ["note: cleo: the script was killed by signal 9; it was not started again"]
    assert outcome_lines(job(4, (0, 1, 2), state=JobState.SUCCEEDED, cleo=report(2, exit_code=0)))[1:] == []


def test_a_job_that_failed_names_what_learners_had_died_of_before() -> None:
    failed = job(3, (0, 1, 2), state=JobState.FAILED, cleo=report(2, failure=KILLED), error="rank 0 (anna): no memory")
    lines = outcome_lines(failed)[1:]
    killed = "error on cleo: the script was killed by signal 9\nTraceback: no"
    where = f"All that the scripts said: meshtrain logs {JOB}"
    assert lines == ["error on anna: no memory", killed, where]
    named = failed.model_copy(update={"error": KILLED})
    assert outcome_lines(named)[1:] == [killed, where]


WRONG = "train.py, line 6, in hook: KeyError: 'loss'\n    totals['loss'] += loss"


@pytest.mark.parametrize(("ranks", "where"), [((0, 1, 2), "all 3 devices"), ((0, 2), "anna and cleo"), ((1,), "bert")])
def test_the_same_error_is_shown_once_with_whom_it_was_on(ranks: tuple[int, ...], where: str) -> None:
    """Each daemon tells it of its own rank, once as a failure and once as the job's end."""
    names = ("anna", "bert", "cleo")
    texts = {rank: f"rank {rank} ({names[rank]}): {WRONG}" for rank in ranks}
    reports = tuple(
        report(rank, state="failed", failure=texts.get(rank), error=texts.get(rank, texts[ranks[0]]))
        for rank in range(3)
    )
    failed = summary(JobState.FAILED, members=THREE, ranks=reports, error=texts[ranks[0]])
    assert outcome_lines(failed)[1:-1] == [f"error on {where}: {WRONG}"]


def test_of_two_devices_both_are_all() -> None:
    reports = tuple(report(rank, failure=f"rank {rank} ({name}): x") for rank, name in enumerate(("anna", "bert")))
    failed = summary(JobState.FAILED, ranks=reports, error="rank 1 (bert): x")
    assert outcome_lines(failed)[1:-1] == ["error on both devices: x"]
    alone = summary(JobState.FAILED, members=MEMBERS[:1], ranks=reports[:1], error="rank 0 (anna): x")
    assert outcome_lines(alone)[1:-1] == ["error on anna: x"]


def test_a_cancelled_job_is_one_line() -> None:
    cancelled = summary(
        JobState.CANCELLED,
        rounds=6,
        error="cancelled on anna (abcd)",
        ranks=(report(0, state="cancelled", error="cancelled on anna (abcd)"),),
    )
    assert [line.partition(" after ")[0] for line in outcome_lines(cancelled)] == [f"job {JOB} (train) cancelled"]
    assert outcome_lines(cancelled)[0].endswith(", 6 rounds, on anna (abcd)")


def test_who_has_ended_its_script_was_not_lost() -> None:
    """Its daemon takes part no more once its script has failed, and is there all the same."""
    failed = job(2, (0, 1), cleo=report(2, failure=KILLED, state="failed"))
    assert news(FIRST, failed) == []
    assert part_of(failed, 2) == "ended"


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.SUCCEEDED])
def test_an_error_that_the_job_ends_with_is_told_by_its_end_alone(
    state: JobState, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held back for a moment; what has happened meanwhile is told after it, in order."""
    now_s = 0.0
    monkeypatch.setattr("meshtrain.following.job_news.time", SimpleNamespace(monotonic=lambda: now_s))
    again = job(2, (0, 1, 2), (0, 1), cleo=report(2, failure=KILLED, restarts=1))
    view = View([one.name for one in THREE], [0, 1, 2], io.StringIO())
    for seen in (FIRST, again, job(2, (0, 1, 2), state=state)):
        view.status(seen)
    assert capsys.readouterr().err.splitlines() == [f"job {JOB} running", f"job {JOB} {state}"]
    view = View([one.name for one in THREE], [0, 1, 2], io.StringIO())
    back = job(3, (0, 1, 2), cleo=report(2, failure=KILLED, restarts=1))
    for seen in (FIRST, again, back):
        view.status(seen)
    assert capsys.readouterr().err.splitlines() == [f"job {JOB} running"]
    now_s = FAILURE_HOLD_S
    view.status(back)
    assert capsys.readouterr().err.splitlines() == [
        "cleo: the script was killed by signal 9; it is started again (restart 1)",
        "cleo computes again (generation 3)",
    ]


def test_jobs_shows_how_many_of_the_members_take_part(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(LOST, job(1, (0, 1, 2), job="1kx2000000aa"))
    rows = [line.split() for line in run("jobs").stdout.splitlines()]
    assert [row[3] for row in rows[1:]] == ["2/3", "3"]


LOSS = GivenUp(first=101, last=1100, samples=64000, made_by=(1, 2), kept=(0,))
LOSS_TOLD = (
    "rounds 101 to 1100 of bert and cleo (64000 samples) were given up: they were apart from anna, whose history is "
    "kept"
)
SAVED = LOSS.model_copy(update={"saved": (1099, "ab12cd34")})
SAVED_TOLD = f"{LOSS_TOLD}. To go on from what was given up: meshtrain submit --resume {JOB}@1099-ab12cd34"


def test_rounds_that_all_have_given_up_are_told_as_such() -> None:
    """J3: there is no other side."""
    lost = GivenUp(first=951, last=1100, samples=9600, made_by=(0, 1), kept=(0, 1))
    told = (
        "rounds 951 to 1100 of anna and bert (9600 samples) were given up: every script was lost, and the newest "
        "checkpoint is that after round 950"
    )
    assert news(AGAIN, AGAIN.model_copy(update={"given_up": (lost,)})) == [told]


def test_rounds_that_were_given_up_are_told_once_to_who_follows_on_any_member(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """G4: also where this device was not in the job, and to who begins to follow later; more of the same is no news."""
    with_loss = AGAIN.model_copy(update={"given_up": (LOSS,)})
    longer = AGAIN.model_copy(update={"given_up": (LOSS.model_copy(update={"last": 1101}),)})
    assert news(AGAIN, with_loss) == [LOSS_TOLD]
    assert news(with_loss, longer) == []
    assert news(job(0, ()), with_loss) == [LOSS_TOLD]
    second = LOSS.model_copy(update={"first": 2000, "last": 2000, "samples": 8, "made_by": (0,), "kept": (1, 2)})
    twice = AGAIN.model_copy(update={"given_up": (LOSS, second)})
    assert news(with_loss, twice) == [
        "round 2000 of anna (8 samples) was given up: it was apart from bert and cleo, whose history is kept"
    ]
    view = View([one.name for one in THREE], [0, 1, 2], io.StringIO())
    for seen in (with_loss, with_loss, longer):
        view.status(seen)
    assert capsys.readouterr().err.splitlines() == [f"job {JOB} running", LOSS_TOLD]


def test_the_checkpoint_of_what_was_given_up_is_named_as_it_is_to_be_typed() -> None:
    """G4: with the loss, or as soon as some member tells of it; and why there is none."""
    unsaved = LOSS.model_copy(update={"unsaved": "the disk is full\x1b"})
    without, named, failed = (AGAIN.model_copy(update={"given_up": (one,)}) for one in (LOSS, SAVED, unsaved))
    assert news(AGAIN, named) == [SAVED_TOLD]
    assert news(without, named) == [SAVED_TOLD]
    assert news(failed, named) == [SAVED_TOLD]
    assert news(named, named) == []
    assert news(AGAIN, failed) == [f"{LOSS_TOLD}; their base was not saved: {printable(unsaved.unsaved or '')}"]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_rounds_that_were_given_up_are_in_the_summary_of_every_end(state: JobState) -> None:
    ended = job(4, (0, 1, 2), state=state, cleo=report(2), given_up=(LOSS,))
    assert f"note: {LOSS_TOLD}" in outcome_lines(ended)


def test_rounds_that_were_given_up_are_noted_wherever_jobs_are_listed(endpoint: Endpoint) -> None:
    running = job(4, (0, 1, 2), cleo=report(2), given_up=(SAVED,), ended_at_s=None)
    endpoint.answers[GetJobs] = known_jobs(running)
    endpoint.answers[GetStatus] = STATUS.model_copy(update={"jobs_running": 1})
    assert f"{JOB}: {SAVED_TOLD}" in run("jobs").stderr.splitlines()
    assert f"note: {SAVED_TOLD}" in run("status").stdout.splitlines()
    assert f"note: {SAVED_TOLD}" in run("top").stdout.splitlines()
    drawn = io.StringIO()
    Console(file=drawn, width=300).print(render_peers(running))
    assert f"note: {SAVED_TOLD}" in drawn.getvalue()
    told = json.loads(run("jobs", "--json").stdout)[0]["given_up"][0]
    assert (told["last"], told["saved"], told["unsaved"]) == (1100, [1099, "ab12cd34"], None)


def test_names_are_joined_as_people_do() -> None:
    assert [joined(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]

"""How a job goes is kept while it runs: bounded, without what was given up, and readable after a daemon's end."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.peers.node import Node
from meshtraind.session.course import NAME, CourseKeeper, described, load_course, save_course
from meshtraind.storage.job_record import Job
from meshwire import limits
from meshwire.messages.job import JobSummary, Metrics, RankReport
from meshwire.model.masks import parse_masks
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.rate_rule import parse_rate_rule
from meshwire.sync_modes.settings_changes import SettingsChange
from tests.daemon.fakedaemon import ANNA, BERT, JOB, SOFTWARE, summary


class JobSeen:
    """A job as far as its course is made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = summary(ended_at_s=None, generation=1, present=(0, 1), learning=(0, 1))
        self.spec = SPEC

    def at(self, round_: int, **changes: Any) -> None:
        metrics = [
            Metrics(
                round=round_ - rank,
                values=(("loss", 1.0 + rank), ("norm", math.nan if rank else 4.0)),
                throughput_samples_s=10.0 * (rank + 1),
                sent_bytes=100 * round_,
            )
            for rank in range(2)
        ]
        ranks = tuple(RankReport(job=JOB, rank=rank, state="running", metrics=one) for rank, one in enumerate(metrics))
        self.now = self.now.model_copy(update={"ranks": ranks, **changes})

    def summary(self) -> JobSummary:
        return self.now


SPEC = cast(
    Any,
    SimpleNamespace(
        script="train.py", args=("--lr", "1"), env=(("WANDB_API_KEY", "s3cret"),),
        sync=sync_settings("bsp"),
        codec="fp16", topology=None, masks=None, scale_lr=None, engine="mesh", on_nan="stop", seed=7,
        checkpoint_every="5",
        resume=None, requirements=(), restarts_max=None, as_module=False, learners=1,
    ),
)  # fmt: skip
NODE = cast(
    Node,
    SimpleNamespace(
        device=ANNA, software=SOFTWARE, links={BERT: SimpleNamespace(hello=SimpleNamespace(software=SOFTWARE))}
    ),
)


@pytest.fixture
def job(tmp_path: Path) -> JobSeen:
    folder = tmp_path / "jobs" / JOB
    folder.mkdir(parents=True)
    return JobSeen(folder)


def keeper(job: JobSeen) -> CourseKeeper:
    return CourseKeeper(NODE, cast(Job, job))


def test_a_point_is_the_mean_of_values_and_the_sum_of_speeds_and_bytes(job: JobSeen) -> None:
    kept = keeper(job)
    kept.look(job.now, 5.0)
    assert kept.course().points == ()  # no round yet
    job.at(3)
    kept.look(job.now, 6.0)
    kept.look(job.now, 7.0)  # nothing new
    (point,) = kept.course().points
    assert point.values == (("loss", 1.5), ("norm", 4.0))
    assert (point.at_s, point.round, point.samples_s, point.sent_bytes, point.learning) == (6.0, 3, 30.0, 600, 2)
    assert dict(kept.course().software) == {0: SOFTWARE, 1: SOFTWARE}


def test_a_speed_is_not_told_while_one_that_computes_has_told_none(job: JobSeen) -> None:
    kept = keeper(job)
    job.at(3)
    job.now = job.now.model_copy(update={"ranks": job.now.ranks[:1]})
    kept.look(job.now, 1.0)
    assert kept.course().points[0].samples_s is None


def test_rounds_that_are_given_up_are_not_in_it(job: JobSeen) -> None:
    kept = keeper(job)
    for round_ in (1, 2, 9, 4, 5):
        job.at(round_)
        kept.look(job.now, float(round_))
    assert [point.round for point in kept.course().points] == [1, 2, 4, 5]


def test_it_stays_small_however_long_a_job_takes(job: JobSeen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COURSE_POINTS_MAX", 20)
    monkeypatch.setattr(limits, "COURSE_PRESENCE_MAX", 10)
    kept = keeper(job)
    for round_ in range(1, 1000):
        job.at(round_, learning=(0, 1) if round_ % 2 else (0,), generation=round_)
        kept.look(job.now, float(round_))
        assert len(kept._points) <= 20
    points, presence = kept.course().points, kept.course().presence
    assert points[0].round == 1
    assert points[-1].round > 900
    assert len(presence) == 10
    assert (presence[0].generation, presence[-1].generation) == (1, 999)


def test_who_is_there_is_told_when_it_changes(job: JobSeen) -> None:
    kept = keeper(job)
    job.now = job.now.model_copy(update={"generation": 0})
    kept.look(job.now, 1.0)
    assert kept.course().presence == ()
    for at_s, generation, present, learning in (
        (2.0, 1, (0, 1), (0, 1)),
        (3.0, 1, (0, 1), (0, 1)),
        (4.0, 2, (0,), (0,)),
    ):
        job.now = job.now.model_copy(update={"generation": generation, "present": present, "learning": learning})
        kept.look(job.now, at_s)
    assert [(one.at_s, one.present) for one in kept.course().presence] == [(2.0, (0, 1)), (4.0, (0,))]


def test_a_daemon_that_returns_goes_on_with_it(job: JobSeen) -> None:
    first = keeper(job)
    for round_ in (1, 2, 3):
        job.at(round_)
        first.look(job.now, float(round_))
    packed = first.to_save(0.0, 30.0)
    assert packed is not None
    assert first.to_save(29.0, 30.0) is None
    assert first.to_save(29.0, 0.0) is not None
    save_course(job.folder, packed)
    second = keeper(job)
    second.go_on()
    job.at(4)
    second.look(job.now, 50.0)
    assert [point.round for point in second.course().points] == [1, 2, 3, 4]
    assert len(second.course().presence) == 1
    kept = load_course(job.folder)
    assert kept is not None
    assert (kept.points, kept.presence) == (first.course().points, first.course().presence)
    assert kept.summary.ranks[0].metrics.sent_bytes == 300


def test_a_daemon_that_returns_late_in_a_long_job_goes_on_as_coarsely(
    job: JobSeen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COURSE_POINTS_MAX", 10)
    first = keeper(job)
    for round_ in range(1, 30):
        job.at(round_)
        first.look(job.summary(), float(round_))
    packed = first.to_save(0.0, 30.0)
    assert packed is not None
    save_course(job.folder, packed)
    alone = cast(Node, SimpleNamespace(device=ANNA, software=SOFTWARE, links={}))
    second = CourseKeeper(alone, cast(Job, job))
    second.go_on()
    before = [point.round for point in second.course().points]
    apart = min(after - before for before, after in itertools.pairwise(before))
    assert apart > 1
    for round_ in (before[-1] + 1, before[-1] + apart):
        job.at(round_)
        second.look(job.summary(), float(round_))
    kept = second.course()
    assert [point.round for point in kept.points] == [*before, before[-1] + apart], "not every round again"
    assert dict(kept.software) == {0: SOFTWARE, 1: SOFTWARE}, "of who is away now, too"


def test_a_setting_that_is_endless_is_cut(job: JobSeen) -> None:
    job.spec = SimpleNamespace(**vars(SPEC) | {"args": ("x" * 10**6,)})
    assert len(dict(keeper(job).course().settings)["arguments"]) == limits.REASON_CHARS_MAX


def test_a_script_that_is_a_module_is_told_as_one() -> None:
    spec = cast(Any, SimpleNamespace(**vars(SPEC) | {"script": "shop/train.py", "as_module": True}))
    assert dict(described(spec))["script"] == "shop/train.py, as a module"


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x81\xa1a\x01", bytes(limits.COURSE_BYTES_MAX + 1)])
def test_what_is_no_course_is_not_read(job: JobSeen, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (job.folder / NAME).write_bytes(content)
    assert load_course(job.folder) is None
    assert "cannot be read" in caplog.text


def test_where_there_is_none_nothing_is_wrong(job: JobSeen, caplog: pytest.LogCaptureFixture) -> None:
    assert load_course(job.folder) is None
    assert not caplog.text


def test_no_value_of_an_environment_variable_is_in_it() -> None:
    told = dict(described(SPEC))
    assert told["environment variables"] == "WANDB_API_KEY"
    assert "s3cret" not in str(told)
    assert told["arguments"] == "--lr 1"
    assert "topology" not in told
    assert "scale-lr" not in told
    scaled = cast(Any, SimpleNamespace(**vars(SPEC) | {"scale_lr": parse_rate_rule("linear,warmup=9")}))
    assert dict(described(scaled))["scale-lr"] == "linear,warmup=9"
    masked = cast(Any, SimpleNamespace(**vars(SPEC) | {"masks": parse_masks("0.8,every=50")}))
    assert dict(described(masked))["masks"] == "0.8,every=50,move=0.3", "as it is typed"


def test_it_names_all_settings_that_the_rounds_went_over_to() -> None:
    """C3."""
    changes = (SettingsChange(first=9, codec="int8"), SettingsChange(first=20, codec="int8", period=1))
    told = "from round 9 on gradients travel in int8; from round 20 on a period has 1 local step"
    assert dict(described(SPEC, changes))["changed"] == told
    assert "changed" not in dict(described(SPEC))

"""18.3: which daemon asks for other settings by itself, and when none does."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.session.session import JobSession
from meshtraind.session.settings_choice import SettingsChoice, slowness, wish_for
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import JobSummary, Member, Metrics, Prediction, RankReport
from meshwire.planning.replan import RATES, Replanned, SettingsForecast, StepForecast, Why
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsInForce, SettingsWish

JOB = "0" * 11 + "1"
MEMBERS = tuple(Member(device=f"{rank:064x}", incarnation=1, name=name) for rank, name in enumerate(("anna", "bert")))
STEP = StepForecast(
    compute_s=1.0,
    each=(
        SettingsForecast(codec="fp16", period=0, step_s=tuple(1.0 + 1.0 / rate for rate in RATES)),
        SettingsForecast(codec="int8", period=0, step_s=tuple(1.0 + 0.5 / rate for rate in RATES)),
    ),
)
PREDICTED = Prediction(samples_s=32.0, alone_samples_s=32.0, step=STEP)


def report(rank: int, batch: int = 32, samples_per_s: float = 32.0, rounds_planned: int = 0) -> RankReport:
    metrics = Metrics(batch=batch, samples_per_s=samples_per_s, rounds_planned=rounds_planned)
    return RankReport(
        job=JOB,
        rank=rank,
        state=JobState.RUNNING,
        exit_code=None,
        error=None,
        failure=None,
        restarts=0,
        metrics=metrics,
    )


def summary(**more: Any) -> JobSummary:
    given = {"ranks": (report(0), report(1)), "learning": (0, 1), "present": (0, 1), **more}
    return JobSummary(
        job=JOB, name="job", state="running", members=MEMBERS, submitter=MEMBERS[0].device, created_at_s=0.0,
        started_at_s=0.0, ended_at_s=None, exit_code=None, error=None, script="train.py", **given,
    )  # fmt: skip


def asked(seen: JobSummary, rank: int = 0, prediction: Prediction | None = PREDICTED, step_s: float = 5.0) -> list[str]:
    """What is asked for while so many seconds pass between two steps."""
    return [each.codec for each in wished(seen, rank, prediction, step_s, SyncSettings()) if each.codec is not None]


def wished(
    seen: JobSummary, rank: int, prediction: Prediction | None, step_s: float, sync: SyncSettings
) -> list[SettingsWish]:
    """The same, with the period."""
    spec = SimpleNamespace(prediction=prediction, codec="fp16", sync=sync)
    job = cast(Job, SimpleNamespace(rank=rank, spec=spec, state=JobState.RUNNING))
    job.in_force = lambda changes=None: Job.in_force(job, changes)  # type: ignore[method-assign]
    choice = SettingsChoice(job)
    found = [choice.look(seen, step, step * step_s) for step in range(60)]
    return [wish_for(each.settings, job.in_force(seen.changes)) for each in found if each is not None]


def test_the_lowest_rank_that_computes_asks_for_all() -> None:
    assert asked(summary())[:1] == ["int8"]
    assert asked(summary(), rank=1) == []
    assert asked(summary(learning=(1,)), rank=1)[:1] == ["int8"]
    assert asked(summary(learning=())) == []


def test_a_longer_period_is_asked_for() -> None:
    """C3: with a period each look is compared with what that period was predicted to take; a person's word stays."""
    curves = [
        SettingsForecast(
            codec="fp16", period=period, worth=worth, step_s=tuple(1.0 + 4 / period / rate for rate in RATES)
        )
        for period, worth in ((2, 1.0), (8, 0.9))
    ]
    predicted = PREDICTED.model_copy(update={"step": StepForecast(compute_s=1.0, each=tuple(curves))})
    local = sync_settings("local:2")
    longer = SettingsWish(period=8, by="plan")
    assert wished(summary(), 0, predicted, 2 * 3.0, local) == [], "a learner's step is a period of two"
    assert wished(summary(), 0, predicted, 2 * 9.0, local)[:1] == [longer]
    counts = summary(ranks=(report(0), report(1, rounds_planned=500)))
    assert wished(counts, 0, predicted, 2 * 9.0, local) == [], "X6: the script has told its last round"
    changed = SettingsChange(first=5, period=8, by="plan")
    assert wished(summary(changes=(changed,)), 0, predicted, 8 * 1.5, local) == [], "as predicted of that period"
    assert wished(summary(changes=(changed.model_copy(update={"by": "person"}),)), 0, predicted, 18.0, local) == []


def test_what_a_person_has_chosen_stays() -> None:
    """At the beginning, where nothing is predicted then, or while it runs."""
    assert asked(summary(), prediction=None) == []
    assert asked(summary(), prediction=PREDICTED.model_copy(update={"step": None})) == []
    assert asked(summary(changes=(SettingsChange(first=5, codec="fp16"),))) == []
    assert asked(summary(changes=(SettingsChange(first=5, codec="fp16", by="plan"),)))[:1] == ["int8"]


def test_as_predicted_nothing_is_asked_for() -> None:
    assert asked(summary(), step_s=2.0) == []


def test_the_slowest_member_tells_how_slow_computing_is() -> None:
    """Of those that compute and have told."""
    slow = summary(ranks=(report(0), report(1, samples_per_s=8.0)))
    assert slowness(slow, STEP) == pytest.approx(4.0)
    assert slowness(slow.model_copy(update={"learning": (0,)}), STEP) == pytest.approx(1.0)
    for unknown in (report(1, batch=0), report(1, samples_per_s=0.0)):
        assert slowness(summary(ranks=(unknown,)), STEP) == 1.0
    assert asked(slow) == []


@pytest.mark.asyncio
async def test_what_is_chosen_is_asked_for_as_the_plans_own(caplog: pytest.LogCaptureFixture) -> None:
    """And where the members do not agree, the job goes on as it is."""
    session = JobSession.__new__(JobSession)
    wishes: list[SettingsWish] = []
    spawned: list[Any] = []
    chosen: list[Replanned | None] = [Replanned(SettingsInForce(codec="int8", period=0), Why.SLOWER, 5.0, 3.0), None]
    seen: list[tuple[int, float]] = []

    async def change_settings(wish: SettingsWish) -> None:
        wishes.append(wish)
        raise RequestFailed("the members have not agreed within 60 s")

    def look(_summary: JobSummary, step: int, now_s: float) -> Replanned | None:
        seen.append((step, now_s))
        return chosen.pop(0)

    now = SettingsInForce(codec="fp16", period=0)
    session.job = cast(Job, SimpleNamespace(spec=SimpleNamespace(job=JOB), in_force=lambda _changes: now))
    session._choice = cast(SettingsChoice, SimpleNamespace(look=look))
    session._metrics = cast(Any, SimpleNamespace(step=7))
    session._tasks = cast(Any, SimpleNamespace(spawn=lambda coroutine, _name: spawned.append(coroutine)))
    session.change_settings = change_settings  # type: ignore[method-assign, assignment]
    session._changing = True
    session._choose_settings(summary())
    assert not seen, "somebody is about to change it"
    session._changing = False
    session._choose_settings(summary())
    session._choose_settings(summary())
    assert [step for step, _ in seen] == [7, 7]
    (asking,) = spawned
    await asking
    assert wishes == [SettingsWish(codec="int8", by="plan")]
    assert "stays as it is: the members have not agreed" in caplog.text


@pytest.mark.asyncio
async def test_a_session_asks_the_chooser_with_every_report() -> None:
    """Or no job would ever go over by itself."""
    session, seen = JobSession.__new__(JobSession), summary()
    asked_for: list[JobSummary] = []
    session.job = cast(Job, SimpleNamespace(was_here=False, summary=lambda: seen, spec=SimpleNamespace(job=JOB)))
    told: list[None] = []
    session.tell_report = lambda: told.append(None)  # type: ignore[method-assign]
    chooser = SimpleNamespace(look=lambda looked, _step, _now_s: asked_for.append(looked))
    session._choice, session._changing = cast(SettingsChoice, chooser), False
    session._metrics = cast(Any, SimpleNamespace(step=7))

    async def keep(_summary: JobSummary, _every_s: float) -> None:
        raise ConnectionError("the first look is over")

    session._keep_course = keep  # type: ignore[method-assign, assignment]
    with pytest.raises(ConnectionError):
        await session._report_regularly()
    assert (told, asked_for) == ([None], [seen])

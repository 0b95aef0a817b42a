"""P4, P8: a script with a process group fails, and those of the others go on without it where it is of that kind."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.learner.supervisor import LearnerSupervisor
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.metrics import MetricsKeeper
from meshtraind.session.session import JobSession
from meshwire.jobs.lifecycle import JobState, new_job_id
from meshwire.messages.job import Member

MEMBERS = tuple(Member(device=f"{rank:064x}", incarnation=1, name=name) for rank, name in enumerate(("anna", "bert")))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("survives", "others", "fails"), [(True, True, False), (True, False, True), (False, True, True)]
)
async def test_a_script_that_fails(survives: bool, others: bool, fails: bool) -> None:
    """It is started no more, not even where it was killed: its process is in no group any more."""
    fails = not (survives and others)
    session = JobSession.__new__(JobSession)
    job = SimpleNamespace(
        state=JobState.RUNNING,
        ending=False,
        rank=1,
        spec=SimpleNamespace(job=new_job_id(bytes(8)), engine="mesh"),
        members=MEMBERS,
        reports={},
        others_go_on=others,
    )
    session.job = cast(Any, job)
    session._node = cast(Any, SimpleNamespace(name="bert", patience_s=0.01, links={}))
    session._learners = LearnerSupervisor(session._node, session.job, 1)
    session._metrics = MetricsKeeper({})
    session._tasks = TaskSet("job x", session._task_failed)
    group = SimpleNamespace(used=True, loss=None, is_disturbed=False, survives_losses=survives)
    session.worlds = cast(Any, SimpleNamespace(world=None, is_between=False, group=group))
    session._why_ended = None
    session.learner = cast(Any, SimpleNamespace(rounds=None, requests=None))
    session.tell_report = lambda: None  # type: ignore[method-assign]
    died: list[bool] = []

    def learner_died(*, failed: bool) -> bool:
        died.append(failed)
        return True

    session.passage = cast(Any, SimpleNamespace(founding=True, is_out=False, learner_died=learner_died))
    ended: list[tuple[str, str]] = []

    def end(outcome: str, why: str, *, now: bool) -> None:
        assert not now, "it may save what it has"
        ended.append((outcome, why))
        job.ending = True

    session.end = end  # type: ignore[method-assign, assignment]
    try:
        assert not session._goes_on_after(-9), "no other process is started"
        assert [outcome for outcome, _ in ended] == ["failed"] * fails
        assert all("rank 1 (bert): the script was killed by signal 9" in why for _, why in ended)
        assert died == ([] if fails else [True])
        assert session.learner_given_up is not fails
    finally:
        job.ending = True
        await session._tasks.close()

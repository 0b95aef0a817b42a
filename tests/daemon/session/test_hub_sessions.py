"""H3: when a job ends on a hub, which hears of it from the laptops alone, and when it keeps the state instead."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.session.session import JobSession
from meshtraind.storage.job_record import Job
from meshwire.jobs.lifecycle import JobEvent
from meshwire.messages.job import Generation, Member, Metrics, RankReport
from meshwire.sync_modes.mode import SyncSettings
from tests.sim.clusterrounds import job_spec

JOB = "j" + "0" * 11
MEMBERS = tuple(
    Member(device=f"{rank:064x}", incarnation=1, name=name, hub=name == "nas")
    for rank, name in enumerate(("anna", "bert", "nas"))
)


def session_of(tmp_path: Any, ranks: tuple[int, ...]) -> tuple[JobSession, list[str]]:
    """A hub's, in a generation of these ranks, whose laptops compute; and how it ends."""
    session, ends = JobSession.__new__(JobSession), list[str]()
    job = Job(job_spec(JOB, MEMBERS[0].device, SyncSettings()), MEMBERS, 2, tmp_path, cast(Any, _NoHistory()))
    for event in (JobEvent.ACCEPT, JobEvent.FILES_COMPLETE, JobEvent.START, JobEvent.LEARNER_STARTED):
        job.advance(event)
    computing = tuple(rank for rank in ranks if rank != 2)
    first = Generation.first(JOB, MEMBERS[0].device, MEMBERS)
    job.take(first.model_copy(update={"number": 4, "ranks": ranks, "learning": computing, "counted": computing}))
    session.job = job
    session._node = cast(Any, SimpleNamespace(member=MEMBERS[2], device=MEMBERS[2].device, links={}))
    session._over, session._lying, session._failed_elsewhere = set(), set(), {}
    session.worlds = cast(Any, SimpleNamespace(group=SimpleNamespace(exchanged=False, used=False)))
    session.passage = cast(Any, SimpleNamespace(generations=object(), computes_now=False, is_out=False))
    session._succeed = lambda: ends.append("succeeded")  # type: ignore[method-assign]
    session.end = lambda outcome, _reason, **_how: ends.append(outcome)  # type: ignore[method-assign]
    return session, ends


class _NoHistory:
    def put(self, record: object) -> None:
        """Nobody reads it."""


def ended_well(session: JobSession, rank: int) -> None:
    report = RankReport(job=JOB, rank=rank, state="finishing", exit_code=0, metrics=Metrics(round=7))
    session.job.report(report)
    session.member_reported()


@pytest.mark.parametrize("ranks", [(0, 2), (0, 1, 2)], ids=["the last laptop", "one of two"])
def test_a_script_that_ends_well_on_the_last_laptop_ends_the_job_on_the_hub(
    tmp_path: Any, ranks: tuple[int, ...]
) -> None:
    """Nobody would train any more; as long as another laptop does, the hub stays."""
    session, ends = session_of(tmp_path, ranks)
    ended_well(session, 0)
    assert ends == (["succeeded"] if ranks == (0, 2) else [])
    if not ends:
        ended_well(session, 1)
        assert ends == ["succeeded"]


def test_a_hub_stays_until_each_laptop_has_failed(tmp_path: Any) -> None:
    """A laptop that is away may go on from it."""
    session, ends = session_of(tmp_path, (0, 2))
    session._failed_elsewhere[0] = "a disk is full"
    session._check_abandoned()
    assert not ends
    session._failed_elsewhere[1] = "no data"
    session._check_abandoned()
    assert ends == ["failed"]

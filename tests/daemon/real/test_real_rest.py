"""A laptop's owner has learners rest: the others go on without it, and it comes back by itself."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from meshwire.messages.config import ConfigShown, SetConfig
from meshwire.peer_news import part_of
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosDaemon, ChaosMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def set_hours(daemon: ChaosDaemon, hours: str) -> None:
    assert isinstance(daemon.ask(SetConfig(key="quiet_hours", value=hours), "config"), ConfigShown)


def test_a_laptop_rests_in_its_quiet_hours_and_comes_back(tmp_path: Path) -> None:
    """R5, J3: in lockstep, where nobody could go on without a learner that only stands still."""
    now = datetime.now()
    quiet = f"{now - timedelta(hours=1):%H:%M}-{now + timedelta(hours=1):%H:%M}"
    with ChaosMesh(2) as mesh:
        first, second = mesh.daemons.values()
        stop = tmp_path / "stop"
        job = jobs.submit(first, tmp_path, jobs.UNTIL_STOPPED, args=(str(stop),), hash_every=1).job
        jobs.wait_for(first, job, lambda seen: seen.rounds >= 5, "round 5")
        set_hours(second, quiet)
        jobs.wait_for(first, job, lambda seen: part_of(seen, 1) == "rests", "its rest")
        assert not second.learners()
        jobs.go_on(first, job, 5, "rounds without it")
        set_hours(second, "off")
        jobs.wait_for(first, job, lambda seen: seen.learning == (0, 1), "its return")
        jobs.go_on(first, job, 5, "rounds with both")
        stop.touch()
        summary = jobs.ended(first, job)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert all(report.failure is None for report in summary.ranks)

"""When learners rest for the owner of their machine (`owner/resting.py`), and how they do (R5, J3)."""

import asyncio
from collections import namedtuple
from datetime import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.machine_sensors import MachineSensors
from meshtraind.owner.quiet_hours import QuietHours
from meshtraind.owner.resting import RestWish
from meshtraind.owner.settings import OwnerSettings, SettingsError
from meshtraind.session.session import JobSession
from meshwire.codecs.registry import parse_codec
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.learner import LearnerApplied, LearnerBucket, LearnerSealed, RoundDone
from meshwire.messages.link import MachineState
from meshwire.model.plan import plan_buckets
from tests.daemon.session.test_session_edges import MODEL, Script, board_of_one, job_alone, may_start, prepare
from tests.daemon.waiting import until

WHY = "quiet hours until 07:00"


class Sensors(MachineSensors):
    """A machine that tells what a test says."""

    def __init__(self, *, battery: bool = False, closed: bool | None = False, heat: float | None = 50.0) -> None:
        super().__init__()
        self.battery, self.closed, self.heat = battery, closed, heat

    def on_battery(self) -> bool:
        return self.battery

    def lid_closed(self) -> bool | None:
        return self.closed

    def celsius(self) -> float | None:
        return self.heat


@pytest.mark.parametrize(
    ("hours", "quiet", "loud"),
    [
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ("8:30 - 12:00", ["08:30", "11:59"], ["08:29", "12:00", "00:00"]),
        ("off", [], ["00:00", "12:00"]),
    ],
)
def test_quiet_hours_hold_over_midnight_too(hours: str, quiet: list[str], loud: list[str]) -> None:
    settings = OwnerSettings.read({"quiet_hours": hours})
    wish = RestWish(Sensors())
    rests = [now for now in quiet + loud if wish.why(settings, time.fromisoformat(now))]
    assert rests == quiet


@pytest.mark.parametrize("text", ["", "22-7", "24:00-07:00", "22:60-07:00", "22:00-22:00", "22:00-07:00x", "on"])
def test_other_hours_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="as in 22:00-07:00, or off"):
        OwnerSettings.read({"quiet_hours": text})
    with pytest.raises(ValueError, match="22:00-07:00"):
        QuietHours.parse(text)


def test_a_battery_and_a_lid_count_where_that_is_set_and_the_reason_is_told() -> None:
    noon, away = time(12, 0), Sensors(battery=True, closed=True)
    assert RestWish(away).why(OwnerSettings(), noon) is None
    assert RestWish(Sensors()).why(OwnerSettings(pause_on_battery=True, pause_on_lid=True), noon) is None
    assert "battery" in (RestWish(away).why(OwnerSettings(pause_on_battery=True), noon) or "")
    assert "lid" in (RestWish(away).why(OwnerSettings(pause_on_lid=True), noon) or "")
    assert RestWish(Sensors()).why(OwnerSettings(quiet_hours="22:00-07:00"), time(23, 0)) == WHY


def test_who_rests_for_heat_comes_back_when_it_is_cooler_and_not_at_once() -> None:
    sensors, settings, noon = Sensors(), OwnerSettings(max_celsius=80), time(12, 0)
    wish = RestWish(sensors)
    rests = []
    for celsius in (60.0, 80.0, 81.0, 79.0, 71.0, 69.0, 75.0, None, 81.0):
        sensors.heat = celsius
        rests.append(wish.why(settings, noon) is not None)
    assert rests == [False, False, True, True, True, False, False, False, True]
    assert wish.why(settings, noon) == "this machine is hotter than 80 degrees"
    assert wish.why(OwnerSettings(), noon) is None


@pytest.mark.parametrize("text", ["49", "1", "111", "-1", "hot"])
def test_a_limit_at_which_nobody_would_ever_train_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="max_celsius = "):
        OwnerSettings.read({"max_celsius": text}, typed=True)


def test_what_a_machine_does_not_tell_is_said_and_the_rest_counts(tmp_path: Path) -> None:
    settings = LiveSettings(tmp_path, Sensors(closed=None, heat=None))
    settings.load()
    for key, value in (("pause_on_lid", "true"), ("max_celsius", "80")):
        with pytest.raises(SettingsError, match=f"{key}: this machine does not tell"):
            settings.change(key, value)
    assert settings.now == OwnerSettings()
    (tmp_path / "config.toml").write_text("pause_on_lid = true\nnice = 12\n")
    settings.look()
    assert "does not tell whether its lid is closed" in (settings.problem or "")
    assert settings.now.nice == 12
    settings.change("pause_on_lid", None)
    assert settings.problem is None


def test_where_a_machine_tells_it_is_taken(tmp_path: Path) -> None:
    settings = LiveSettings(tmp_path, Sensors())
    settings.load()
    settings.change("pause_on_lid", "true")
    settings.change("max_celsius", "85")
    assert settings.now.pause_on_lid
    assert settings.now.max_celsius == 85
    assert settings.problem is None


@pytest.mark.parametrize(
    ("states", "closed"),
    [
        ([], None),
        (["state:      open\n"], False),
        (["state:      closed\n"], True),
        (["state:      open\n", "state:      closed\n"], True),
        (["unsupported\n"], False),
    ],
)
def test_lids_as_linux_tells_of_them(states: list[str], closed: bool | None, tmp_path: Path) -> None:
    for number, state in enumerate(states):
        (tmp_path / f"LID{number}").mkdir()
        (tmp_path / f"LID{number}" / "state").write_text(state)
    assert MachineSensors(tmp_path).lid_closed() is closed
    assert MachineSensors(tmp_path / "nowhere").lid_closed() is None


@pytest.mark.parametrize(
    ("chips", "hottest"),
    [
        ({}, None),
        ({"coretemp": [("Package id 0", 61.0), ("Core 0", 58.0)], "nvme": [("Composite", 70.0)]}, 61.0),
        ({"nvme": [("Composite", 70.0)], "iwlwifi_1": [("", 55.0)]}, None),
        ({"k10temp": [("Tctl", 0.0)], "acpitz": [("", 47.0)]}, 47.0),
    ],
)
def test_the_heat_of_the_processor_alone_counts(
    chips: dict[str, list[tuple[str, float]]], hottest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        chip: [SimpleNamespace(label=label, current=celsius) for label, celsius in parts]
        for chip, parts in chips.items()
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)
    assert MachineSensors().celsius() == hottest
    monkeypatch.delattr(psutil, "sensors_temperatures")
    assert MachineSensors().celsius() is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
)
def test_a_machine_that_does_not_say_so_is_on_no_battery(
    found: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    assert MachineSensors().on_battery() is expected


def test_the_processors_load_is_what_was_used_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts a guest's time twice; waiting for a disk is no load."""
    linux = namedtuple("linux", ("user", "nice", "idle", "iowait", "guest", "guest_nice"))
    looks = iter([linux(100.0, 0.0, 50.0, 0.0, 40.0, 0.0), linux(106.0, 1.0, 52.0, 1.0, 44.0, 0.0)] * 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(looks))
    sensors = MachineSensors()
    assert sensors.load() is None
    assert sensors.load() == pytest.approx(0.7)  # of 10 s 2 idle and 1 waiting
    assert sensors.load() is None, "the clock went back"


@pytest.mark.parametrize(
    ("found", "charge"),
    [
        (None, (None, None)),
        (SimpleNamespace(percent=82.5, power_plugged=True), (0.825, True)),
        (SimpleNamespace(percent=104.0, power_plugged=False), (1.0, False)),
        (SimpleNamespace(percent=None, power_plugged=None), (None, None)),
    ],
)
def test_a_battery_is_told_as_far_as_it_is_known(
    found: Any, charge: tuple[float | None, bool | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    sensors = MachineSensors(tmp_path)
    assert sensors.charge() == charge

    def gone() -> None:
        raise FileNotFoundError("energy_now")

    assert sensors.state() == MachineState(battery=charge[0], plugged=charge[1])
    monkeypatch.setattr(psutil, "sensors_battery", gone, raising=False)
    assert sensors.charge() == (None, None), "it was taken out meanwhile"
    broken = {"coretemp": [SimpleNamespace(label="", current=65_261.9)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: broken, raising=False)
    assert sensors.state().celsius is None


async def one_step(session: JobSession) -> None:
    """What a learner says from its call until its first round is complete."""
    told = await prepare(session)
    await until(lambda: may_start(told), "the first step")
    plan = plan_buckets(MODEL, session.job.spec.bucket_bytes, parse_codec(session.job.spec.codec))
    for bucket in plan.buckets:
        session.learner.notice(LearnerBucket(step=1, bucket=bucket.index, weight=1.0))
    session.learner.notice(LearnerSealed(step=1, used=b"\x01", integers=()))
    await until(lambda: any(isinstance(body, RoundDone) for body in told), "the first round")
    session.learner.notice(LearnerApplied(round=1))


@pytest.mark.asyncio
async def test_what_would_be_lost_does_not_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """J3: a learner that alone has the state, which it leaves nowhere, goes on; and that is said once."""
    board = board_of_one(monkeypatch, tmp_path)
    session = job_alone(board, tmp_path, "fp32", 1)
    monkeypatch.setattr(session.passage, "save", nothing_is_saved)
    await one_step(session)
    first = Script.running
    for _ in range(3):
        board.registry.look_whether_to_rest(WHY)
        await until(lambda: session._learners.rests is None, "the decision")
    assert Script.running is first
    assert session.job.counted == (0,)
    assert caplog.text.count("it does not rest") == 1
    await session.close()
    await board._tasks.close()


def part(session: JobSession) -> str:
    """What the other members are told."""
    session.tell_report()
    return session.job.reports[0].part


async def nothing_is_saved() -> None:
    """As where checkpoints are off."""


@pytest.mark.asyncio
async def test_a_learner_rests_and_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R5, J3: its process ends, its rank rests in the next generation, nobody starts another one until it may; and that
    costs none of the restarts that a script has."""
    board = board_of_one(monkeypatch, tmp_path)
    session = job_alone(board, tmp_path, "fp32", 1)
    await until(lambda: session.job.state is JobState.RUNNING, "its script")
    board.registry.look_whether_to_rest(WHY)
    assert session._learners.rests is None, "not before the job has begun"
    await one_step(session)
    monkeypatch.setattr(session.maker.memory.kept, "round", lambda: 1)
    first = Script.running
    for _ in range(3):
        board.registry.look_whether_to_rest(WHY)
    assert session._learners.rests == WHY
    await until(lambda: not session.job.counted, "a generation in which its rank rests")
    assert part(session) == "rests"
    assert session.job.reports[0].failure is None
    await asyncio.sleep(0.1)
    assert Script.running is first
    assert not session.job.ending
    board.registry.look_whether_to_rest(None)
    await until(lambda: Script.running is not first, "the next process")
    assert (session._learners._kills, session._learners.restarts) == (0, 0)
    assert part(session) == "computes"
    await session.close()
    await board._tasks.close()


@pytest.mark.asyncio
async def test_a_job_that_ends_while_a_learner_rests_ends_here_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board = board_of_one(monkeypatch, tmp_path)
    session = job_alone(board, tmp_path, "fp32", 1)
    await one_step(session)
    monkeypatch.setattr(session.maker.memory.kept, "round", lambda: 1)
    board.registry.look_whether_to_rest(WHY)
    await until(lambda: not session.job.counted, "its rest")
    session.end("cancelled", "enough", now=False)
    await until(session.closed.is_set, "the end")
    assert session.job.state is JobState.CANCELLED
    await board._tasks.close()


def test_who_rests_does_not_keep_all_from_beginning_anew() -> None:
    """G9: where every base was lost all prepare again, and wait for each other."""
    session = cast(Any, JobSession.__new__(JobSession))
    session.job = SimpleNamespace(state=JobState.RUNNING, spec=SimpleNamespace(job="x", independent=False))
    session._node = SimpleNamespace(member=SimpleNamespace(hub=False))
    session.passage = SimpleNamespace(founding=True)
    session.worlds = SimpleNamespace(group=SimpleNamespace(used=False))
    session.learner = SimpleNamespace(rounds=SimpleNamespace(complete=0))
    rose: list[bool] = []
    session._learners = SimpleNamespace(rests=WHY, rise=lambda: rose.append(True))
    session._metrics = SimpleNamespace(part="rests")
    session.look_whether_to_rest(WHY)
    assert rose


@pytest.mark.parametrize("what", ["process group", "independent", "no round yet"])
def test_who_cannot_be_missed_does_not_rest(what: str) -> None:
    """P4: the loss of a process would end a group; J3: one that trains by itself leaves nothing to take over; G9:
    all would begin anew, and it with them, again and again."""
    session = cast(Any, JobSession.__new__(JobSession))
    session.job = SimpleNamespace(
        state=JobState.RUNNING, spec=SimpleNamespace(job="x", independent=what == "independent")
    )
    session._node = SimpleNamespace(member=SimpleNamespace(hub=False))
    session.passage = SimpleNamespace(founding=False)
    session.worlds = SimpleNamespace(group=SimpleNamespace(used=what == "process group"))
    session.learner = SimpleNamespace(rounds=SimpleNamespace(complete=0 if what == "no round yet" else 3))
    session._cannot_rest = None
    session._learners = SimpleNamespace(rests=None)
    session.look_whether_to_rest(WHY)
    assert session._learners.rests is None

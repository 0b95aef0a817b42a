"""What the page tells of a job besides its state: plan, prediction, overlap, bytes, staleness, links, prices."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshtraind.dashboard.codec_list import codec_list, read_prices
from meshtraind.dashboard.feed import Feed
from meshtraind.dashboard.job_facts import WatchedJob, job_facts
from meshtraind.dashboard.job_traffic import JobTraffic, edges_of
from meshtraind.dashboard.sessions import Sessions
from meshtraind.dashboard.shown_code import ShownCode
from meshwire import limits
from meshwire.codecs.registry import FAMILIES
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.course import GetCourse
from meshwire.messages.job import JobSummary, Metrics, RankReport
from meshwire.messages.local import GetMachines
from meshwire.planning.kept_prices import NAME, KeptPrice, KeptPrices
from meshwire.sync_modes.settings_changes import SettingsChange
from tests.daemon.fakedaemon import JOB
from tests.daemon.scripteddaemon import ScriptedDaemon, course

RING = {"sync": "bsp", "codec": "fp32", "topology": "ring"}
MB = 1_000_000


def job_of(sent: tuple[int, ...], round_: int = 1, waits: dict[int, int] | None = None, **changes: Any) -> JobSummary:
    """A job of so many devices, each of which has sent so much."""
    daemon = ScriptedDaemon(tuple(f"laptop{at}" for at in range(len(sent))))
    daemon.train(round_)
    waiting = waits or {}
    ranks = tuple(
        RankReport(
            job=JOB,
            rank=rank,
            state="running",
            metrics=Metrics(
                round=round_,
                sent_bytes=count,
                payload_bytes=count,
                waiting_for=f"rank {waiting[rank]}" if rank in waiting else None,
            ),
        )
        for rank, count in enumerate(sent)
    )
    return daemon.jobs[JOB].model_copy(update={"ranks": ranks, "codec": "fp32"} | changes)


def looked(*looks: tuple[JobSummary, float], settings: dict[str, str] | None = None) -> JobTraffic:
    traffic = JobTraffic()
    for job, now_s in looks:
        traffic.look(job, RING if settings is None else settings, now_s)
    return traffic


def facts(job: JobSummary, seen: JobTraffic | None = None, /, **settings: str) -> dict[str, str]:
    return dict(job_facts(job, WatchedJob(traffic=seen or JobTraffic(), settings=settings)))


def test_links_between_others_carry_what_their_ends_report() -> None:
    """On a ring each sends to the next one alone, so a rank's rate is its link's; two share one link both ways."""
    before, after = job_of((0, 0, 0)), job_of((10 * MB, 20 * MB, 40 * MB), 11)
    traffic = looked((before, 0.0), (after, 10.0))
    assert traffic.links(after, RING) == [[0, 1, 1 * MB], [0, 2, 4 * MB], [1, 2, 2 * MB]]
    two = looked((job_of((0, 0)), 0.0), (job_of((10 * MB, 30 * MB), 2), 10.0))
    assert two.links(job_of((0, 0)), RING) == [[0, 1, 4 * MB]]


def test_a_star_has_no_link_between_those_around_it() -> None:
    settings = RING | {"topology": "star:1"}
    job = job_of((10 * MB, 40 * MB, 10 * MB, 10 * MB), 5)
    traffic = looked((job_of((0,) * 4), 0.0), (job, 10.0), settings=settings)
    assert traffic.links(job, settings) == [[0, 1, pytest.approx(1e6 + 4e6 / 3)]] + [
        [1, rank, pytest.approx(1e6 + 4e6 / 3)] for rank in (2, 3)
    ]


def test_who_waits_is_owed_a_rounds_bytes_by_those_that_send_to_it() -> None:
    """Rank 2 sends to rank 0 on a ring, and to nobody else: rank 1 waits for it by way of others."""
    waits = {0: 2, 1: 2}
    job = job_of((10 * MB, 10 * MB, 30 * MB), 11, waits)
    traffic = looked((job_of((0, 0, 0)), 0.0), (job, 10.0))
    assert traffic.owed(job, RING) == [[2, 0, 3 * MB], [2, 1, None]]
    assert JobTraffic().owed(job, RING) == [[2, 0, None], [2, 1, None]], "not known yet"


def test_rates_are_of_the_newest_seconds_and_bytes_of_the_newest_rounds() -> None:
    first, second, third = job_of((0, 0)), job_of((8 * MB, 8 * MB), 3), job_of((12 * MB, 8 * MB), 3)
    traffic = looked((first, 0.0), (second, 4.0), (third, 4.5))
    assert traffic.rates == {0: 2 * MB, 1: 2 * MB}, "half a second says nothing"
    traffic.look(third, RING, 8.0)
    assert traffic.rates == {0: 1 * MB, 1: 0}
    assert traffic.round_bytes == {0: 4 * MB, 1: 4 * MB}, "no round since"


def test_counts_that_begin_anew_are_no_rates() -> None:
    """A daemon that was started again counts from 0; rounds that were given up come again."""
    traffic = looked((job_of((9 * MB, 9 * MB), 5), 0.0), (job_of((10 * MB, 1 * MB), 6), 10.0))
    assert (traffic.rates, traffic.round_bytes) == ({}, {})
    traffic = looked((job_of((1 * MB, 1 * MB), 5), 0.0), (job_of((9 * MB, 9 * MB), 3), 10.0))
    assert (traffic.rates, traffic.round_bytes) == ({}, {})


@pytest.mark.parametrize(
    ("codec", "settings", "saved"),
    [
        ("fp32", RING, 0.0),
        ("fp16", RING, 1.0),
        ("int8", RING, 3.0),
        ("fp16", RING | {"sync": "local:8"}, 15.0),
        ("fp16", RING | {"topology": "gather"}, 1.0),  # two devices: each sends one vector, as on the ring
        ("topk:0.1,gather", RING | {"topology": "gather"}, 13.3),
    ],
)
def test_what_a_codec_saves_is_counted_against_fp32_in_each_step(
    codec: str, settings: dict[str, str], saved: float
) -> None:
    job = job_of((5 * MB, 5 * MB), 3, codec=codec)
    traffic = looked((job, 0.0), settings=settings)
    assert traffic.saved_bytes == pytest.approx(10 * MB * saved, rel=0.15)
    assert traffic.since_round == 1


def test_each_codec_of_a_job_saves_by_its_own_measure() -> None:
    """What was sent before a change counts as it was sent; where nobody looked before it, it does not count."""
    begun = (SettingsChange(first=4, codec="fp16"),)
    before = job_of((5 * MB, 5 * MB), 3, changes=begun)
    after = job_of((6 * MB, 6 * MB), 9, changes=begun)
    traffic = looked((before, 0.0), (after, 1.0))
    assert traffic.saved_bytes == pytest.approx(2 * MB, rel=0.01)
    assert traffic.since_round == 1
    late = looked((after, 0.0), (job_of((7 * MB, 7 * MB), 10, changes=begun), 1.0))
    assert late.saved_bytes == pytest.approx(2 * MB, rel=0.01)
    assert late.since_round == 10
    assert "since round 10" in facts(job_of((7 * MB, 7 * MB), 10, changes=begun), late)["Bytes"]


def test_another_codec_goes_its_own_way() -> None:
    """C3: with the usual topology of the new one, where it was the usual one before."""
    begun = (SettingsChange(first=2, codec="topk:0.1,gather"),)
    job = job_of((1, 1, 1, 1), 5, changes=begun)
    assert len(edges_of(job, RING)) == 12, "from everybody to everybody"
    assert len(edges_of(job.model_copy(update={"changes": ()}), RING)) == 4


def test_a_picture_has_few_links() -> None:
    """A ring of 64 is shown, each with each is not."""
    job = job_of((MB,) * 64, 5)
    assert len(JobTraffic().links(job, RING)) == 64
    assert JobTraffic().links(job, RING | {"topology": "gather"}) == []
    waits = dict.fromkeys(range(64), 3)
    assert len(JobTraffic().owed(job_of((MB,) * 64, 5, waits), RING)) == 63 <= limits.DASHBOARD_LINKS_MAX


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sync": "warp:9", "topology": "?"},
        {"sync": "bsp", "topology": "moebius"},
        RING | {"topology": "star:64"},
    ],
)
def test_what_is_not_known_is_not_told(settings: dict[str, str]) -> None:
    """Of a job elsewhere, of another version, or that has not begun."""
    job = job_of((MB, MB), 5)
    traffic = looked((job, 0.0), (job, 10.0), settings=settings)
    assert traffic.links(job, settings) == []
    assert "Plan" in facts(job, traffic, **settings)
    assert looked((job_of((0, 0), 0), 0.0)).links(job_of((0, 0), 0), RING) == [], "no round yet"


def test_reports_of_ranks_that_are_not_there_do_no_harm() -> None:
    """A summary is what another device says."""
    job = job_of((MB, MB), 5, {0: 1})
    stray = RankReport(job=JOB, rank=60, state="running", metrics=Metrics(round=5, waiting_for="rank 61, rank 1"))
    job = job.model_copy(update={"ranks": (*job.ranks, stray), "present": (0, 1, 60), "learning": (0, 60)})
    traffic = looked((job, 0.0), (job, 10.0))
    assert traffic.owed(job, RING) == [[1, 0, None]]
    assert facts(job, traffic, **RING)["Plan"] == "--sync bsp --codec fp32 --topology ring"


def test_what_was_predicted_stands_beside_what_is_measured() -> None:
    daemon = ScriptedDaemon()
    daemon.train(12)
    told = facts(daemon.jobs[JOB], sync="bsp", topology="ring")
    assert told["Plan"] == "--sync bsp --codec int8 --topology ring"
    assert told["Predicted"] == "125 samples/s, 1.7x the fastest laptop alone, which makes 75"
    assert told["Measured"] == "120 samples/s, 1.6x one laptop; 96% of what was predicted"
    plain = facts(daemon.jobs[JOB].model_copy(update={"prediction": None}))
    assert plain["Predicted"].startswith("nothing")
    assert plain["Measured"] == "120 samples/s, 1.5x one laptop"
    changed = daemon.jobs[JOB].model_copy(update={"changes": (SettingsChange(first=9, codec="int4"),)})
    assert facts(changed, sync="bsp")["Plan"] == "--sync bsp --codec int8, from round 9 on gradients travel in int4"
    by_plan = daemon.jobs[JOB].model_copy(update={"changes": (SettingsChange(first=9, codec="int4", by="plan"),)})
    assert facts(by_plan)["Plan"].startswith(
        "--codec int8, from round 9 on gradients travel in int4 (by itself, for the network"
    )


def test_overlap_is_the_time_of_exchanges_that_nobody_waited_for() -> None:
    daemon = ScriptedDaemon()
    daemon.train(10)
    assert facts(daemon.jobs[JOB])["Overlap"] == "80% of the time of exchanges was hidden behind computing"
    assert "Overlap" not in facts(job_of((0, 0)))


@pytest.mark.parametrize(
    ("sync", "ages", "told"),
    [
        ("bsp", (9,), "none: all wait for each other after each step"),
        ("local:8", (9,), "none: all wait for each other after each 8 steps"),
        (
            "diloco:8,stream=4",
            (9,),
            "none: all wait for each other after each 2 steps, for one of 4 parts of the model in turns",
        ),
        (
            "diloco:8,stream=4,tau=1",
            (),
            "all take a round in behind step 1 of the next period, for one of 4 parts of the model in turns",
        ),
        (
            "ssp:3",
            (6, 2),
            "the bound is 3; 75% of the contributions were of the newest model, the oldest 1 behind; "
            "passed over: 2; void: 1; steps lost: 1",
        ),
        ("ssp:1", (), "the bound is 1; passed over: 2; void: 1; steps lost: 1"),
    ],
)
def test_staleness_is_the_bound_and_what_came_of_it(sync: str, ages: tuple[int, ...], told: str) -> None:
    late = sync.startswith("ssp")
    metrics = [
        Metrics(round=9, ages=ages, nulls=int(late), void_rounds=int(late), steps_lost=int(late and rank))
        for rank in (0, 1)
    ]
    ranks = tuple(RankReport(job=JOB, rank=rank, state="running", metrics=own) for rank, own in enumerate(metrics))
    assert facts(job_of((MB, MB), 9, ranks=ranks), sync=sync)["Staleness"] == told


def test_facts_of_others_are_text() -> None:
    job = job_of((MB, MB), 5, codec="int8\x1b[2J\u202e")
    assert all(char.isprintable() for text in facts(job, None, **RING).values() for char in text)


def test_the_prices_of_all_codecs_as_far_as_they_were_measured(tmp_path: Path) -> None:
    assert read_prices(tmp_path) is None
    price = KeptPrice(encode_s=2e-9, add_s=1e-9, encode_segment_s=0, add_segment_s=0, filled=1)
    kept = KeptPrices(processor="Some CPU\x1b[2J", software="x", prices={"int8": price}, rounds={})
    (tmp_path / NAME).write_text(kept.model_dump_json())
    told = codec_list(read_prices(tmp_path))
    rows = {row["name"]: row for row in told["rows"]}
    assert rows.keys() >= FAMILIES.keys()
    assert [rows["fp32"][name] for name in ("bits", "loss", "value_s")] == [32, "exact, but for rounding", None]
    assert rows["int8"]["value_s"] == pytest.approx(3e-9)
    assert rows["int4:sr"]["loss"] == "within the noise of seeds"
    assert rows["twobit"]["loss"] == "0.064 nats behind fp32"
    assert rows["topk:0.1,gather"]["exchange"] == "gather"
    assert told["processor"] == "Some CPU\\x1b[2J"
    (tmp_path / NAME).write_text("{")
    assert read_prices(tmp_path) is None
    assert codec_list(None)["processor"] is None
    json.dumps(told, allow_nan=False)


class Counting(ScriptedDaemon):
    """Keeps what the page asks for by itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Any] = []

    async def answer(self, body: Any, emit: Any) -> Any:
        self.looks.append(body)
        return await super().answer(body, emit)

    def count(self, kind: type) -> int:
        return sum(isinstance(body, kind) for body in self.looks)


@pytest.mark.asyncio
async def test_a_course_is_asked_for_once_and_the_machine_now_and_then() -> None:
    """Also where this device was not in the job: until it has ended, once in a while."""
    daemon = Counting()
    daemon.train(3)
    feed = Feed(daemon, ShownCode(daemon), Sessions())
    for _ in range(5):
        await feed._look()
    assert (daemon.count(GetCourse), daemon.count(GetMachines)) == (1, 1)
    daemon.settings = None
    daemon.jobs["1kx3000000bb"] = daemon.jobs[JOB].model_copy(update={"job": "1kx3000000bb"})
    feed.soon()
    for _ in range(5):
        await feed._look()
    assert daemon.count(GetCourse) == 2
    told = json.loads(feed._parts["jobs"].text.partition("data: ")[2])
    assert dict(told[0]["facts"])["Plan"] == "--sync bsp --codec int8 --topology ring"
    assert dict(told[1]["facts"])["Plan"] == "--codec int8"
    assert (len(told[0]["links"]), told[1]["links"]) == (3, [])
    assert told[0]["prediction"] == {"samples_s": 125.0, "alone_samples_s": 75.0}


@pytest.mark.asyncio
async def test_a_job_that_has_ended_is_drawn_from_its_course_and_offers_no_change() -> None:
    daemon = ScriptedDaemon()
    daemon.train(3)
    ended = {"state": JobState.SUCCEEDED.value, "ended_at_s": 5.0}
    daemon.jobs[JOB] = daemon.jobs[JOB].model_copy(update=ended)
    daemon.points = course(1, 2, 3)
    feed = Feed(daemon, ShownCode(daemon), Sessions())
    await feed._look()
    chart = json.loads(feed._parts[f"chart {JOB}"].text.partition("data: ")[2])
    assert [point[0] for point in chart["points"]] == [1, 2, 3]
    told = json.loads(feed._parts["jobs"].text.partition("data: ")[2])[0]
    assert (told["changes"], told["links"], told["owed"]) == (False, [], [])


@pytest.mark.asyncio
async def test_a_job_that_is_over_is_made_ready_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty jobs of 64 devices would take 0.2 s of the daemon's loop at each look."""
    made: list[str] = []

    def facts_of(job: JobSummary, _: WatchedJob) -> list[tuple[str, str]]:
        made.append(job.job)
        return []

    monkeypatch.setattr("meshtraind.dashboard.feed.job_facts", facts_of)
    daemon = ScriptedDaemon()
    daemon.settings = None
    daemon.train(3)
    over = daemon.jobs[JOB].model_copy(update={"job": "1kx3000000bb", "ended_at_s": 5.0})
    daemon.jobs[over.job] = over
    feed = Feed(daemon, ShownCode(daemon), Sessions())
    for _ in range(4):
        feed.soon()  # all of them are listed again
        await feed._look()
    assert (made.count(JOB), made.count(over.job)) == (4, 1)
    daemon.jobs[over.job] = over.model_copy(update={"expired_at_s": 9.0})
    feed.soon()
    await feed._look()
    assert made.count(over.job) == 2
    del daemon.jobs[over.job]
    feed.soon()
    await feed._look()
    assert feed._over == {}

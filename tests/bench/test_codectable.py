"""What the table of codecs is made of: which jobs, what is remembered of them, and what is printed."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwire.messages.job import JobSummary, Member, Metrics, RankReport
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings
from tests.bench.codec_table import TIMED_STEPS, WAYS, plan
from tests.bench.codecjob import RATE
from tests.bench.codecreport import SHORT_COLUMNS, short_table, tables
from tests.bench.codecruns import Outcome, ResultFile, Run, Sent, arguments, rounds
from tests.bench.kept_lines import KeptLinesError

OPTIONS = argparse.Namespace(
    codecs=["int8", "topk:0.3..0.1/50@local:8"],
    models=["cnn"],
    members=[2, 4],
    seeds=2,
    steps=None,
    times=False,
    kill=False,
    mbit=50.0,
)
JOB = "0123456789ab"


def outcome(loss: float, sent: float = 1e6) -> Outcome:
    return Outcome(None, loss, 0.5, sent / 2, sent, 0.2, True, 5, 1000)


def test_every_way_has_fp32_beside_it_and_the_first_seed_comes_first() -> None:
    runs = plan(OPTIONS)
    assert [run.way for run in runs[:3]] == ["fp32", "int8", "topk:0.3..0.1/50@local:8"]
    assert [(run.sync, run.codec) for run in runs[1:3]] == [("bsp", "int8"), ("local:8", "topk:0.3..0.1/50")]
    assert [(run.members, run.seed) for run in runs[::3]] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert len(runs) == len(set(runs)) == 12


def test_a_way_is_a_codec_a_mode_and_masks() -> None:
    run = Run("cnn", 2, "fp16@local:8%0.8,every=5", 0, 300)
    assert (run.codec, run.sync, run.masks) == ("fp16", "local:8", "0.8,every=5")
    assert Run("cnn", 2, "fp16", 0, 300).masks is None


def test_a_rate_that_falls_is_asked_for_last_and_ends_at_nothing() -> None:
    """It rises to the whole in a twentieth of the steps; without it no more is said than before."""
    run = Run("gpt", 4, "fp32@local:8", 3, 200, cosine=True)
    assert arguments(run, 50) == ("gpt", "local:8", "200", "6", "3", "0", "0", "50", "cosine")
    assert arguments(replace(run, cosine=False), 50) == arguments(run, 50)[:-1]
    scope: dict[str, Any] = {"math": math, "steps": 200, "warm": 10}
    exec(RATE, scope)
    rates = [scope["rate"](step) for step in range(201)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[105] == pytest.approx(0.5)
    assert rates[200] == pytest.approx(0.0)


def test_times_are_few_steps_of_one_seed() -> None:
    runs = plan(argparse.Namespace(**{**vars(OPTIONS), "times": True}))
    assert {(run.steps, run.seed, run.mbit) for run in runs} == {(TIMED_STEPS, 0, 50.0)}
    assert len(runs) == 6


def test_of_four_members_half_the_steps() -> None:
    assert {(run.members, run.steps) for run in plan(OPTIONS)} == {(2, 300), (4, 150)}
    given = plan(argparse.Namespace(**{**vars(OPTIONS), "steps": 200}))
    assert {run.steps for run in given} == {200}


def test_a_codec_that_takes_over_momentum_trains_where_there_is_some() -> None:
    """dgc refuses AdamW: no row may fail by plan, and its twin in fp32 has its optimizer."""
    options = {
        **vars(OPTIONS),
        "codecs": ["dgc", "@sparseloco:8"],
        "models": ["gpt", "cnn"],
        "members": [2],
        "seeds": 1,
    }
    runs = plan(argparse.Namespace(**options))
    assert [(run.model, run.way) for run in runs] == [
        *(("gpt", "fp32"), ("gpt-momentum", "fp32"), ("gpt-momentum", "dgc"), ("gpt", "@sparseloco:8")),
        *(("cnn", "fp32"), ("cnn", "dgc"), ("cnn", "@sparseloco:8")),
    ]
    assert (runs[3].codec, runs[3].sync) == (None, "sparseloco:8")


def test_kills_are_a_pass_of_their_own() -> None:
    runs = plan(argparse.Namespace(**{**vars(OPTIONS), "kill": True, "members": None}))
    assert {(run.members, run.seed, run.kill, run.mbit) for run in runs} == {(3, 0, True, None)}
    assert [(run.way, rounds(run)) for run in runs] == [("fp32", 150), ("int8", 150), ("topk:0.3..0.1/50@local:8", 18)]


def test_every_way_is_one_that_submit_takes() -> None:
    """Also those that are there by default."""
    for run in plan(argparse.Namespace(**{**vars(OPTIONS), "codecs": WAYS, "models": ["gpt", "cnn"]})):
        codec_of(sync_settings(run.sync), run.codec)


def test_a_line_of_before_there_were_kills_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run = {"model": "gpt", "members": 2, "way": "fp32", "seed": 0, "steps": 120, "mbit": None}
    path.write_text(json.dumps({"run": run, "outcome": {"error": None, "loss": 2.5}}) + "\n")
    assert [run.kill for run in ResultFile(path).outcomes] == [False]


@pytest.mark.parametrize("kind", [{}, {"times": True}, {"kill": True}])
def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, kind: dict[str, bool]) -> None:
    """What has failed is tried again."""
    path = tmp_path / "results.jsonl"
    runs = plan(argparse.Namespace(**{**vars(OPTIONS), **kind}))
    first = ResultFile(path)
    assert first.missing(runs) == runs
    first.keep(runs[0], outcome(1.5))
    first.keep(runs[1], Outcome(error="the daemon has ended"))
    again = ResultFile(path)
    assert again.outcomes == {runs[0]: outcome(1.5), runs[1]: again.outcomes[runs[1]]}
    assert again.missing(runs) == runs[1:]
    again.keep(runs[1], outcome(1.25))
    assert ResultFile(path).missing(runs) == runs[2:]


def test_a_line_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path).keep(Run("cnn", 2, "fp32", 0, 300), outcome(1.0))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(KeptLinesError, match=r"line 1: .*; remove the line"):
        ResultFile(path)


def reported(*ranks: tuple[int, int]) -> JobSummary:
    """A summary whose ranks report (round, bytes sent)."""
    members = tuple(Member(device=str(rank) * 64, incarnation=1, name=f"peer{rank}") for rank in range(len(ranks)))
    reports = tuple(
        RankReport(job=JOB, rank=rank, state="running", metrics=Metrics(round=at, sent_bytes=sent))
        for rank, (at, sent) in enumerate(ranks)
    )
    fields = {"name": "test", "state": "running", "submitter": "0" * 64, "created_at_s": 0.0, "started_at_s": 0.0}
    return JobSummary(
        job=JOB,
        members=members,
        ranks=reports,
        ended_at_s=None,
        exit_code=None,
        error=None,
        script="train.py",
        **fields,
    )


def test_the_state_that_all_start_from_does_not_count_as_sent() -> None:
    sent = Sent()
    for ranks in (((0, 900), (0, 0)), ((1, 1000), (0, 5)), ((3, 1200), (2, 60)), ((11, 2000), (12, 160))):
        sent.add(reported(*ranks))
    assert sent.bytes_a_round() == 100 + 10


def test_bytes_of_a_rank_that_was_seen_once_are_not_known() -> None:
    sent = Sent()
    sent.add(reported((4, 1000)))
    assert sent.bytes_a_round() != sent.bytes_a_round()


def test_the_table_names_the_bad_results() -> None:
    """The issue: bad results included."""
    outcomes = {
        Run("cnn", 2, "fp32", 0, 300): outcome(1.0, 8e6),
        Run("cnn", 2, "fp32", 1, 300): outcome(1.2, 8e6),
        Run("cnn", 2, "topk", 0, 300): outcome(1.5, 1e6),
        Run("cnn", 2, "topk", 1, 300): outcome(1.7, 1e6),
        Run("cnn", 2, "onebit", 0, 300): Outcome(error="a NaN in round 7"),
        Run("cnn", 2, "qsgd", 0, 300): Outcome(None, 3.0, 0.1, 5e5, 1e6, 0.2, False, 5, 1000),
        Run("cnn", 2, "fp32", 0, 30, 50.0): outcome(2.0),
        Run("cnn", 2, "topk", 0, 30, 50.0): Outcome(None, 2.0, 0.1, 5e4, 1e6, 0.05, True, 5, 1000),
        Run("cnn", 3, "fp32", 0, 150, kill=True): outcome(1.0),
        Run("cnn", 3, "topk", 0, 150, kill=True): outcome(1.25),
        Run("cnn", 3, "onebit", 0, 150, kill=True): Outcome(error="the job ended before its return"),
    }
    lines = list(tables(outcomes))
    (topk,) = [line for line in lines if line.startswith("| `topk` | 1.6")]
    assert "1.6000 (1.5000 1.7000) | +0.5000 | 0.2828 | 50.0% | 0.500 MB | 1.000 MB | 8.0 | equal (10) |" in topk
    assert any("onebit" in line and "FAILED, seed 0: a NaN in round 7" in line for line in lines)
    assert any("qsgd" in line and "DIFFER" in line for line in lines)
    assert any("`topk` | 0.050 | 4.0 |" in line for line in lines)
    assert "| `topk` | 1.2500 | +0.2500 | 50.0% | equal (5) |" in lines
    assert any("FAILED, seed 0: the job ended before its return" in line for line in lines)


ROOT = Path(__file__).parents[2]


def test_the_table_of_the_guide_follows_from_the_file() -> None:
    """`python -m tests.bench.codec_table --json tests/bench/results/codecs.jsonl --report --short` prints it."""
    lines = (ROOT / "protocol/CODECS.md").read_text("utf-8").splitlines()
    first = lines.index(f"| {' | '.join(SHORT_COLUMNS)} |")
    rows = lines[first : lines.index("", first)]
    found = list(short_table(ResultFile(ROOT / "tests/bench/results/codecs.jsonl").outcomes))
    assert set(rows) == set(found) - {""}
    assert len(rows) > 40

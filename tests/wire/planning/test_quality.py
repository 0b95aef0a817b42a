"""The table of qualities says what the result files say, and no more."""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from meshwire.codecs.registry import parse_codec
from meshwire.planning.quality import BEHIND_NATS_MAX, EVIDENCE, Quality, Tried, quality_of, recommendable
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings

RESULTS = Path(__file__).parents[2] / "bench/results"


def measured_losses() -> dict[tuple[str, Tried], list[float]]:
    """Held-out losses of two members by model and way, of all seeds."""
    found: dict[tuple[str, Tried], list[float]] = defaultdict(list)
    for line in (RESULTS / "codecs.jsonl").read_text().splitlines():
        row = json.loads(line)
        run, loss = row["run"], row["outcome"]["loss"]
        codec, _, sync = run["way"].partition("@")
        plain = run["mbit"] is None and not run["kill"] and run["members"] == 2 and "%" not in run["way"]
        if plain and run["model"] in ("gpt", "cnn") and loss is not None and "demo" not in sync:
            mode = sync_settings(sync or "bsp")
            tried = Tried(str(codec_of(mode, codec or None)), mode.text())
            found[run["model"], tried].append(loss)
    return found


LOSSES = measured_losses()


@pytest.mark.parametrize("tried", [tried for tried, found in EVIDENCE.items() if found.source == "codecs.md"])
def test_what_was_measured_with_codecs_is_what_the_table_says(tried: Tried) -> None:
    """Safe is what was within noise, two standard errors of the difference, with both models."""
    behind, within = [0.0], True
    for model in ("gpt", "cnn"):
        losses, base = LOSSES[model, tried], LOSSES[model, Tried("fp32", "bsp")]
        assert len(losses) == 3, "seeds"
        difference = statistics.mean(losses) - statistics.mean(base)
        noise = 2 * ((statistics.variance(losses) + statistics.variance(base)) / 3) ** 0.5
        behind.append(difference)
        within &= difference <= noise
    found = EVIDENCE[tried]
    assert found.behind_nats == pytest.approx(max(behind), abs=6e-5)
    assert found.quality is (Quality.SAFE if within else Quality.FAST)


def test_a_bound_was_within_noise_after_as_many_samples() -> None:
    text = (RESULTS / "staleness_seeds.md").read_text()
    table = text.partition("## After equally many samples")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| ([+-][0-9.]+) \| [0-9.]+ \|.*\| (\**\w+\**) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    assert {verdict for _, verdict in rows} == {"PASS"}
    assert EVIDENCE[Tried("fp32", "ssp:2")].behind_nats == max(float(difference) for difference, _ in rows)


def test_what_is_exact_ended_with_the_loss_of_one_process() -> None:
    text = (RESULTS / "demo_matrix.md").read_text()
    exact = [tried for tried, found in EVIDENCE.items() if found.quality is Quality.EXACT]
    assert {tried.sync for tried in exact} == {"bsp"}
    for tried in exact:
        rows = re.findall(rf"^\| \d \| {tried.codec} \|(?: [0-9.]+ \|){{4}} ([+-][0-9.e+-]+) \|", text, re.MULTILINE)
        assert len(rows) >= 3
        assert max(abs(float(difference)) for difference in rows) < 1e-5


def test_names_are_those_that_settings_have() -> None:
    """Else a row would never be found."""
    for tried, found in EVIDENCE.items():
        assert str(parse_codec(tried.codec)) == tried.codec
        assert sync_settings(tried.sync).text() == tried.sync
        assert str(codec_of(sync_settings(tried.sync), tried.codec)) == tried.codec
        assert (RESULTS / found.source).exists()


def test_what_was_not_measured_is_fast_and_is_recommended_to_nobody() -> None:
    assert quality_of("nf4", "ssp:2") is Quality.FAST
    assert not recommendable("nf4", "ssp:2")
    assert recommendable("int8", "local:8")
    assert not recommendable("onebit", "bsp"), "too far behind"
    assert all(found.behind_nats <= BEHIND_NATS_MAX for found in EVIDENCE.values() if found.quality is not Quality.FAST)


def test_a_wish_allows_what_is_at_least_as_good() -> None:
    assert [each for each in Quality if Quality.SAFE.allows(each)] == [Quality.EXACT, Quality.SAFE]
    assert list(filter(Quality.FAST.allows, Quality)) == list(Quality)
    assert list(filter(Quality.EXACT.allows, Quality)) == [Quality.EXACT]

"""The table of qualities says what the result files say, and no more."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwire.codecs.registry import parse_codec
from meshwire.planning.choose import job_settings
from meshwire.planning.quality import EVIDENCE, WORTH, Quality, Tried, quality_of, recommendable, worth_of
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings
from tests.bench.journal import Journal
from tests.bench.proof.curves import noise
from tests.bench.proof.networks import grid_page
from tests.bench.proof.networks.grid import BASE
from tests.bench.proof.networks.paced_models import text_of

RESULTS = Path(__file__).parents[2] / "bench/results"
WITH_CODECS = ("codecs.md", "target.md")  # two small models, and two of 11 M parameters
MODES = {tried.sync for tried, found in EVIDENCE.items() if found.source == "modes.md"}


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
PROOF = Journal(RESULTS / "proof.jsonl")


def behind_and_within(losses: Sequence[float], base: Sequence[float]) -> tuple[float, bool]:
    """By how much they are behind the base's of the same seeds, and whether that is within its noise."""
    assert len(base) >= len(losses) >= 3, "seeds"
    base = base[: len(losses)]
    difference, apart = statistics.mean(losses) - statistics.mean(base), noise(base)
    assert apart is not None
    return difference, difference <= apart


def losses_of_four(model: str, sync: str) -> list[float]:
    """Held-out losses of four members with the mode's own codec, of all seeds."""
    return [entry.figures["loss"][-1] for entry in PROOF.of(f"{model}, {sync}")]


def mode_of_four(sync: str) -> tuple[float, bool]:
    """The same of a mode with four members, where that was further behind; in step there is nothing to find."""
    each = [behind_and_within(losses_of_four(model, sync), losses_of_four(model, "bsp")) for model in ("gpt", "cnn")]
    return max(behind for behind, _ in each), all(within for _, within in each)


def on_small_models(tried: Tried) -> list[tuple[float, bool]]:
    """How far a way was behind with two members, and whether that was within noise, by model."""
    base = Tried("fp32", "bsp")
    return [behind_and_within(LOSSES[model, tried], LOSSES[model, base]) for model in ("gpt", "cnn")]


def of_large_models(model: str, tried: Tried) -> list[float]:
    """Held-out losses of four members, of all seeds."""
    settings = text_of(job_settings(*tried))
    way = tried.codec if tried.sync == "bsp" else settings
    return [entry.figures[settings][-1] for entry in PROOF.of(f"safe, {model}, {way}")]


def on_large_models(tried: Tried) -> list[tuple[float, bool]]:
    """The same with four members; empty for what was not safe on small models, and so was not trained there."""
    if not of_large_models("resnet", tried):
        return []
    base = Tried("fp32", "bsp")
    return [
        behind_and_within(of_large_models(model, tried), of_large_models(model, base)) for model in ("resnet", "gpt")
    ]


def after_512_steps(tried: Tried) -> str:
    """What a way is called where four members trained that long."""
    return text_of(job_settings(tried.codec, tried.sync))


def for_longer(tried: Tried) -> list[tuple[float, bool]]:
    """The same after 512 steps; empty for what has fewer than three seeds there."""
    own, base = (grid_page.losses_of(PROOF, settings) for settings in (after_512_steps(tried), BASE))
    return [behind_and_within(own, base)] if len(own) >= 3 else []


@pytest.mark.parametrize("tried", [tried for tried, found in EVIDENCE.items() if found.source in WITH_CODECS])
def test_what_was_measured_with_codecs_is_what_the_table_says(tried: Tried) -> None:
    """Safe is what was within noise with all four models, in a mode that was, with four members, too, and after 512
    steps; the row is of where it was behind most."""
    small, large, longer = on_small_models(tried), on_large_models(tried), for_longer(tried)
    within = tried.sync not in MODES or mode_of_four(tried.sync)[1]
    behind, source = max(
        (max(0.0, difference), source)
        for source, each in zip((*WITH_CODECS, grid_page.PAGE), (small, large, longer), strict=True)
        for difference, _ in each
    )
    found = EVIDENCE[tried]
    assert found.source == source
    assert found.behind_nats == pytest.approx(behind, abs=6e-5)
    assert found.quality is (
        Quality.SAFE if within and all(near for _, near in (*small, *large, *longer)) else Quality.FAST
    )


def test_a_bound_was_within_noise_with_three_members_after_as_many_samples() -> None:
    """As the guide says beside what four have found."""
    text = (RESULTS / "staleness_seeds.md").read_text()
    table = text.partition("## After equally many samples")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| ([+-][0-9.]+) \| [0-9.]+ \|.*\| (\**\w+\**) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    assert {verdict for _, verdict in rows} == {"PASS"}
    assert max(float(difference) for difference, _ in rows) == 0.0200


@pytest.mark.parametrize("tried", [tried for tried, found in EVIDENCE.items() if found.source == "modes.md"])
def test_what_was_measured_of_modes_is_what_the_table_says(tried: Tried) -> None:
    behind, within = mode_of_four(tried.sync)
    assert tried.codec == "fp32"
    assert EVIDENCE[tried].behind_nats == pytest.approx(behind, abs=6e-5)
    assert EVIDENCE[tried].quality is (Quality.SAFE if within else Quality.FAST)


@pytest.mark.parametrize("tried", [tried for tried, found in EVIDENCE.items() if found.source == grid_page.PAGE])
def test_what_was_measured_for_longer_is_what_the_table_says(tried: Tried) -> None:
    own, base = (grid_page.losses_of(PROOF, settings) for settings in (after_512_steps(tried), BASE))
    behind = statistics.mean(own) - statistics.mean(base)
    assert EVIDENCE[tried].behind_nats == pytest.approx(max(0.0, behind), abs=6e-5)
    assert EVIDENCE[tried].quality is Quality.FAST


@pytest.mark.parametrize("tried", WORTH)
def test_what_a_sample_is_worth_is_what_the_table_says(tried: Tried) -> None:
    measured = grid_page.worth(PROOF, after_512_steps(tried))
    assert measured is not None
    assert WORTH[tried] == pytest.approx(measured, abs=6e-3)
    assert quality_of(*tried) is Quality.FAST, "what is safe counts in full"


def test_all_that_may_be_chosen_and_was_trained_for_longer_has_its_worth() -> None:
    for tried, found in EVIDENCE.items():
        if found.quality is Quality.FAST and grid_page.worth(PROOF, after_512_steps(tried)) is not None:
            assert tried in WORTH, tried


def test_no_codec_is_safer_than_fp32_in_the_same_mode() -> None:
    for tried, found in EVIDENCE.items():
        mode = EVIDENCE.get(Tried("fp32", tried.sync))
        assert mode is None or found.quality.allows(mode.quality)


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
    assert not recommendable("onebit", "bsp"), "nobody knows how soon it comes to a loss"
    assert worth_of("onebit", "bsp") == 1.0
    assert worth_of("int4", "bsp") == 1.0
    assert worth_of("int8", "local:8") == WORTH[Tried("int8", "local:8")] < 1.0


def test_a_wish_allows_what_is_at_least_as_good() -> None:
    assert [each for each in Quality if Quality.SAFE.allows(each)] == [Quality.EXACT, Quality.SAFE]
    assert list(filter(Quality.FAST.allows, Quality)) == list(Quality)
    assert list(filter(Quality.EXACT.allows, Quality)) == [Quality.EXACT]

"""What the page of eight unequal peers says follows from what was measured."""

import json
from pathlib import Path

import pytest

from tests.bench.journal import Figures
from tests.bench.proof import stragglers, stragglers_page, summary_page
from tests.bench.proof.filled_journal import filled


def test_who_is_drawn_is_as_unequal_as_theirs() -> None:
    """Batches of 2 to 16 in 1 to 4.5 s, in a tenth of it; the submitter is the fastest, and draws are the same."""
    drawn = stragglers.peers()
    assert len(drawn) == 8
    assert drawn == stragglers.peers()
    assert all(2 <= peer.size <= 16 and 1 <= peer.batch_s <= 4.5 for peer in drawn)
    assert drawn[0].samples_s == max(peer.samples_s for peer in drawn) > 4 * drawn[-1].samples_s
    assert drawn[0].samples_s == pytest.approx(10 * drawn[0].size / drawn[0].batch_s)


def test_time_to_accuracy_is_from_the_first_step_of_anybody_to_the_first_base_that_has_it() -> None:
    """Samples until then are those whose steps have ended; speed is of the whole job."""
    steps = [(10.0, 12.0, 8), (12.0, 14.0, 8), (11.0, 15.0, 8)]
    found = stragglers.figures(steps, [(11.0, 0.2), (13.0, 0.9), (14.0, 0.8), (15.0, 0.95)])
    assert found["reached_s"] == [3.0]
    assert found["reached_samples"] == [8.0]
    assert found["lasted_s"] == [5.0]
    assert found["accuracy"] == [0.95]
    assert found["of the sum"] == [pytest.approx(24 / 5 / sum(peer.samples_s for peer in stragglers.peers()))]
    assert "reached_s" not in stragglers.figures(steps, [(11.0, 0.2), (15.0, 0.5)])


def test_one_alone_takes_the_batch_of_all() -> None:
    """So it learns by samples as all in step do, and what differs is time."""
    sizes = {way.name: json.loads(stragglers.script_options(0, 100, way.batch))["batch"] for way in stragglers.WAYS}
    assert sizes.pop(stragglers.ALONE.name) == stragglers.PEERS * stragglers.BATCH
    assert set(sizes.values()) == {stragglers.BATCH}


def test_a_curve_is_thinned_and_keeps_its_beginning() -> None:
    curve = [(at / 10, at / 1000) for at in range(1000)]
    found = stragglers.figures([(0.0, 100.0, 8)], curve)
    assert len(found["at_s"]) == len(found["accuracies"]) <= stragglers.POINTS
    assert found["at_s"][0] == 0.0


def reached(way: stragglers.Way, reached_s: float | None, more: Figures | None = None) -> tuple[str, Figures]:
    figures: Figures = {"lasted_s": [30.0], "of the sum": [0.5], "accuracy": [0.9]}
    figures |= {"at_s": [0.0, 30.0], "accuracies": [0.1, 0.9], **(more or {})}
    if reached_s is not None:
        figures |= {"reached_s": [reached_s], "reached_samples": [3000.0]}
    return stragglers.case_name(way), figures


def test_the_page_has_each_beside_one_peer_and_beside_the_sum_of_speeds(tmp_path: Path) -> None:
    """What never reaches the accuracy is said so."""
    alone, bsp, shares, _, periods, auto = stragglers.WAYS
    journal = filled(
        tmp_path,
        *(reached(alone, 20.0), reached(bsp, 80.0), reached(shares, None), reached(periods, 10.0)),
        reached(auto, 25.0, {"on 8, anna and others: bsp": [30.0]}),
    )
    text = stragglers_page.page(journal)
    assert "| bsp | 80.0 | 3000 | 0.25 | 0.50 | 0.900 | 1 |" in text
    assert "| bsp, shares by speed | - (not reached: 1 of 1) |" in text
    assert "| ssp:3 | not measured |" in text
    ideal_s = 3000 / sum(peer.samples_s for peer in stragglers.peers())
    assert f"| the sum of speeds, at bsp's samples | {ideal_s:.1f} | 3000 | {20 / ideal_s:.2f} | 1 |" in text
    assert "- What auto said, on 8, anna and others: bsp" in text
    does, does_not = summary_page.page(journal).split("## It does not")
    assert "local:8,ssp:1, periods by speed 2.00" in does
    assert "bsp 0.25, auto 0.80" in does_not

"""What the hub's lab claims of what it has measured."""

from pathlib import Path

import pytest

from tests.bench.hub_lab import CASES, RESULTS, HubLine, Measured, by_case, kept, page, table, verdicts

LIMITS = {case.name: Measured(case.limit_s, case.limit_s) for case in CASES}


def test_at_the_limit_of_its_links_every_claim_holds() -> None:
    found = LIMITS | {"star": Measured(LIMITS["star"].ours_s, LIMITS["ring"].ours_s)}
    judged = verdicts(found)
    assert [round(one.predicted, 2) for one in judged] == [1.5, 1.5, 1.5, 2.0]
    assert all(one.holds for one in judged), judged
    assert "DOES NOT HOLD" not in table(found, judged)


@pytest.mark.parametrize("case", ["star", "star beside", "switched ring"])
def test_what_is_slower_than_predicted_is_said(case: str) -> None:
    found = LIMITS | {"star": Measured(LIMITS["star"].ours_s, LIMITS["ring"].ours_s)}
    slow = found | {case: Measured(2.1 * found[case].ours_s, found[case].gloo_s)}
    judged = verdicts(slow)
    assert not all(one.holds for one in judged)
    assert "DOES NOT HOLD" in table(slow, judged)


def test_what_is_measured_is_read_again(tmp_path: Path) -> None:
    """A later line of a case counts."""
    for ours_s in (1.0, 2.0):
        kept(tmp_path / "hub.jsonl").add(HubLine("star", Measured(ours_s, 3.0), {"rounds": 10}))
    again = kept(tmp_path / "hub.jsonl")
    assert by_case(again) == {"star": Measured(2.0, 3.0)}
    assert again.lines[0].report["rounds"] == 10


def test_what_is_not_measured_yet_is_not_judged() -> None:
    assert verdicts({"star": LIMITS["star"]}) == ()


def test_the_page_is_what_the_file_says() -> None:
    found = by_case(kept(RESULTS / "hub.jsonl"))
    judged = verdicts(found)
    assert (RESULTS / "hub.md").read_text("utf-8") == page(found, judged)
    assert len(judged) == 4
    assert all(one.holds for one in judged)

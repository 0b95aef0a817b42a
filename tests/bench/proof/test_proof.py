"""What the proof's pages say follows from what was measured; its commands can measure what they name."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from meshwire.planning.choose import job_settings
from tests.bench.chaosjob import Record
from tests.bench.codecruns import rounds_of
from tests.bench.journal import Entry, Figures, Journal
from tests.bench.kept_lines import KeptLinesError
from tests.bench.proof import goals_page, goodput, modes_page, slow_laptop, summary_page
from tests.bench.proof.__main__ import PAGES, every_section
from tests.bench.proof.curves import mean_curve
from tests.bench.proof.filled_journal import QUIET, filled
from tests.bench.proof.modes import AFTER, BASE, MBIT, MEMBERS, MODES, SETS, case_name, steps_name
from tests.bench.proof.networks import wifi
from tests.bench.proof.places import LocalPlace, ProofError, chosen_in
from tests.bench.proof.plots import Panel, panels_svg

TEXT = SETS[0]
ALL_MINUTES_MAX = 8 * 60
MINUTES_MAX = 30.0


def losses(mode: str, end: float) -> tuple[str, Figures]:
    """A curve that falls on a straight line from 4 to there."""
    steps = [float(step) for step in range(0, TEXT.steps + 1, TEXT.every)]
    curve = [4 - (4 - end) * step / TEXT.steps for step in steps]
    return case_name(TEXT.model, mode), {"step": steps, "loss": curve, "sent_bytes": [4e6]}


def step_times(alone_all_s: float, **modes: float) -> tuple[str, Figures]:
    times = {f"{mode.replace('_', ':')} at {mbit:g}": [step_s] for mode, step_s in modes.items() for mbit in MBIT}
    return steps_name(TEXT.model), {"alone_all_s": [alone_all_s], **times}


def test_every_section_ends_within_half_an_hour() -> None:
    """Each, by what it says beforehand; all together in a working day. Each says what was expected."""
    with LocalPlace() as place:
        sections = every_section(place)
    assert [section.name for section in sections if section.minutes > MINUTES_MAX] == []
    assert sum(section.minutes for section in sections) <= ALL_MINUTES_MAX
    assert all(section.expected for section in sections if section.name not in ("steps", "rejoin"))
    names = [case.name for section in sections for case in section.cases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_one_that_submit_takes(mode: str) -> None:
    """With whole periods in both trainings, so that no step is left out of the last round."""
    settings = job_settings(None, mode)
    for one in SETS:
        assert one.every % max(1, settings.sync.period) == 0
        behind = one.steps - settings.sync.after
        assert behind % max(1, settings.sync.period) == 0
        assert one.batch % MEMBERS == 0


def test_the_page_says_where_a_mode_loses_per_sample_and_where_it_wins_in_time(tmp_path: Path) -> None:
    """A mode that is behind per sample, and ten times as fast a step, is both; and one laptop alone is beside them."""
    seeds = [losses(BASE, 2.0), losses(BASE, 2.02), losses("local:8", 2.5), losses("local:8", 2.52)]
    journal = filled(tmp_path, *seeds, step_times(0.5, bsp=1.0, local_8=0.1))
    text = modes_page.page(journal)
    assert "| `local:8` | 2.510 (2.500 2.520) | +0.500 |" in text
    assert "**Loses per sample**, by more than the seeds' noise (0.028): `local:8`." in text
    # bsp has 3.005 after half of its 120 steps, local:8 after 80.13 of them.
    assert (
        "first at the target, after 8.0 s, bsp after 60.0 s. **Slower than one laptop alone** (30.0 s): `bsp`." in text
    )


def test_what_is_within_the_noise_of_the_seeds_does_not_lose(tmp_path: Path) -> None:
    journal = filled(tmp_path, losses(BASE, 2.0), losses(BASE, 2.4), losses("ssp:2", 2.1), losses("ssp:2", 2.5))
    text = modes_page.page(journal)
    assert "by more than the seeds' noise (0.566): none." in text
    assert "Within the noise of bsp, or better: `ssp:2`." in text


def test_what_scatters_more_than_bsp_does_is_not_level_for_that(tmp_path: Path) -> None:
    journal = filled(tmp_path, losses(BASE, 2.0), losses(BASE, 2.02), losses("ssp:2", 2.0), losses("ssp:2", 3.0))
    assert "by more than the seeds' noise (0.028): `ssp:2`." in modes_page.page(journal)


def test_a_mode_that_never_gets_there_is_named(tmp_path: Path) -> None:
    journal = filled(tmp_path, losses(BASE, 2.0), losses("demo", 3.5), step_times(0.5, bsp=1.0, demo=0.01))
    text = modes_page.page(journal)
    assert "not there at all: `demo`." in text
    assert text.count("| not reached") == len(MBIT)


def test_rounds_and_bytes_of_post_local_sgd_are_those_of_both_parts(tmp_path: Path) -> None:
    """Most of its bytes are sent in the first steps: a step's mean says nothing of when."""
    mode = f"local:8,after={AFTER}"
    assert rounds_of(mode, AFTER) == AFTER
    assert rounds_of(mode, AFTER + 16) == AFTER + 2
    way = modes_page.ways(filled(tmp_path, losses(mode, 2.0)), TEXT)[mode]
    assert way.sent_bytes(TEXT.steps) == pytest.approx(4e6 / MEMBERS * TEXT.steps)
    assert way.sent_bytes(AFTER) == pytest.approx(way.sent_bytes(TEXT.steps) * AFTER / (AFTER + 10))


def test_steps_of_post_local_sgd_take_as_long_as_bsps_at_first(tmp_path: Path) -> None:
    mode = f"local:8,after={AFTER}"
    times = {f"{name} at {mbit:g}": [step_s] for name, step_s in ((BASE, 1.0), (mode, 0.1)) for mbit in MBIT}
    journal = filled(tmp_path, losses(mode, 2.0), (steps_name(TEXT.model), times))
    assert modes_page.ways(journal, TEXT)[mode].seconds(AFTER + 10, MBIT[0]) == pytest.approx(AFTER + 1)


def test_what_is_not_measured_is_called_so(tmp_path: Path) -> None:
    """All pages, of nothing and of short runs."""
    journal = Journal(tmp_path / "proof.jsonl")
    journal.add(Entry(case_name(TEXT.model, BASE), 0, True, losses(BASE, 2.0)[1], QUIET))
    for write in PAGES:
        assert all(path.exists() for path in write(journal, tmp_path))
    assert "`bsp` |" not in (tmp_path / modes_page.PAGE).read_text("utf-8")
    assert (tmp_path / goals_page.PAGE).read_text("utf-8").count("ot measured") == 8


def test_goodput_is_of_the_median_left_alone(tmp_path: Path) -> None:
    def kills(every_s: float | None, kept_s: float, computing: float) -> tuple[str, Figures]:
        figures = {"kept_s": [kept_s], "computing": [computing], "kills": [4.0], "twice": [0.0]}
        return goodput.Kills(every_s, 40).name, figures

    shorter = (goodput.Kills(None, 5).name, {"kept_s": [1000.0], "computing": [1.0]})
    journal = filled(tmp_path, shorter, kills(None, 100.0, 1.0), kills(15.0, 88.0, 0.88), kills(2.0, 40.0, 0.5))
    text = goals_page.page(journal)
    assert (
        "| a kill every 15 s, epochs of 40 rounds | 88.0 | 0.88 | 0.88 | 1.00 | 4 | 0 | at least 0.88 | **met** |"
        in text
    )
    assert (
        "| a kill every 2 s, epochs of 40 rounds | 40.0 | 0.40 | 0.50 | 0.80 | 4 | 0 | at least 0.88 | **not met** |"
        in text
    )


def test_samples_are_counted_over_the_whole_window() -> None:
    """From the last count before it to the first behind it: a stand-still at its end counts."""
    records = [Record(t_s, 0, 0, 0, 0, kept=kept) for t_s, kept in ((1.0, 10), (4.0, 40), (5.0, 50), (9.0, 60))]
    assert goodput.kept_a_second(records, 4.5, 6.0) == pytest.approx((60 - 40) / (9.0 - 4.0))
    with pytest.raises(ProofError, match="behind"):
        goodput.kept_a_second(records, 4.5, 10.0)


def test_a_slow_laptops_share_is_judged(tmp_path: Path) -> None:
    figures = {"of the sum": [0.84], "of the sum, whole job": [0.5], "on 4, anna and three others": [30.0]}
    text = goals_page.page(filled(tmp_path, (slow_laptop.NAME, figures)))
    assert "**0.84 of the sum** once batches have their sizes, goal at least 0.85:\n  **not met**" in text
    assert chosen_in("note: x\nchosen: anna, bert: fast\notherwise: y") == "anna, bert: fast"


def test_what_does_not_pay_is_said_as_loudly(tmp_path: Path) -> None:
    """A way that pays from a rate on does not below it; modes that are behind and goals that are missed do not."""
    planned = {"mbit": [20.0, 50.0], "safe, m=4": [1.0, 1.5], "fast, m=4": [2.0, 3.0], "DDP, fp32, m=4": [0.1, 0.2]}
    journal = filled(
        tmp_path,
        *(losses(BASE, 2.0), losses(BASE, 2.2), losses("ssp:2", 2.1), losses("ssp:2", 2.2), losses("demo", 3.0)),
        (wifi.planned_name(wifi.MODELS[0]), planned),
        (slow_laptop.NAME, {"of the sum": [0.9]}),
        (goodput.REJOIN, {"rate": [0.9]}),
    )
    does, does_not = summary_page.page(journal).split("## It does not")
    assert "`fast`: faster than one alone: a perceptron for MNIST, 0.2 M parameters from 20 Mbit/s, up to 3.0" in does
    assert "DDP, fp32: not faster than one alone at any rate" in does_not
    assert (
        "`safe`: one laptop alone is as fast, or faster: a perceptron for MNIST, 0.2 M parameters below 50" in does_not
    )
    assert ("`ssp:2` are within" in does, "`demo` +0.90" in does_not) == (True, True)
    assert ("0.90 of the sum" in does, "0.90 of their speed (goal 0.95)" in does_not) == (True, True)


def test_a_mean_curve_has_the_points_that_all_seeds_have() -> None:
    assert mean_curve([[(0.0, 4.0), (8.0, 2.0)], [(0.0, 2.0), (8.0, 1.0), (9.0, 0.0)]]) == [(0.0, 3.0), (8.0, 1.5)]


def test_pictures_are_whole_and_leave_out_what_cannot_be_drawn() -> None:
    panel = Panel("loss", "bytes", {"bsp": [(0.0, 4.0), (1.0, 3.0), (100.0, float("nan"))], "demo": []}, log=True)
    root = ElementTree.fromstring(panels_svg("a title", [panel, Panel("empty", "x", {})]))
    drawn = [element.get("points", "") for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(points.split()) for points in drawn] == [1, 0]


def test_a_line_that_is_not_its_own_is_named(tmp_path: Path) -> None:
    """Whatever is wrong with it."""
    for text in ("[1]", "{}", "null", '{"case": "x"'):
        (tmp_path / "proof.jsonl").write_text(text + "\n")
        with pytest.raises(KeptLinesError, match=r"line 1: .*; remove the line"):
            Journal(tmp_path / "proof.jsonl")

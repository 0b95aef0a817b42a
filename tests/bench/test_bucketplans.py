"""The plan's buckets beside all others there are, played (WFBP)."""

import pytest

from tests.bench.bucket_plans import MODELS, Lab, Setting, against_best, every_cut, merged, planned


def test_every_way_to_cut_is_there_once() -> None:
    cuts = list(every_cut(4))
    assert len(set(cuts)) == len(cuts) == 8
    assert {(4,), (1, 2, 3, 4), (2, 4)} < set(cuts)


@pytest.mark.parametrize("setting", [Setting(2, 20, 0.03, 1.0), Setting(2, 1000, 0.002, 0.3)], ids=str)
@pytest.mark.parametrize("name", ["convolutions", "transformer", "wide input"])
def test_the_plan_is_near_the_best_buckets(name: str, setting: Setting) -> None:
    """No worse than one bucket, or one for each tensor, and within a twentieth of the best of all."""
    plan, each, _, one = against_best(MODELS[name], setting)
    assert plan <= one
    assert plan <= 1.05 * each
    assert 1 <= plan <= 1.05


def test_buckets_that_do_not_wait_for_each_other_need_no_merging() -> None:
    """Why there is no MG-WFBP: where round trips are long it merges most, and loses most."""
    shape, setting = MODELS["equal layers"], Setting(2, 100, 0.03, 0.3)
    lab = Lab(shape, setting)
    cut = merged(shape, setting, lab.ready_s)
    assert len(cut) < len(planned(shape))
    assert lab.ends_s(cut) > 1.2 * lab.ends_s(planned(shape))

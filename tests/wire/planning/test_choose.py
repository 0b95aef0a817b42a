"""What stays as it was typed, and what is chosen beside it."""

import pytest

from meshwire.codecs.registry import FP32
from meshwire.model.masks import masks_of, travel_of
from meshwire.planning.choose import NO_PERIODS, Pinned, chosen, job_settings, legal_settings, preferred, wished
from meshwire.planning.price import JobSettings, Price
from meshwire.planning.quality import PERIODS_OF_SGD, WORTH, Quality, Tried
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.rate_rule import RULE_OF
from tests.wire.planning.test_mesh_plan import manifest

MODEL = manifest(1_000_000)


def texts(settings: list[JobSettings]) -> set[tuple[str, str, str]]:
    return {(str(each.codec), each.sync.text(), str(each.collective.topology)) for each in settings}


def test_nothing_pinned_is_all_that_is_legal() -> None:
    assert Pinned().settings(MODEL) == list(legal_settings(MODEL))


def test_a_pinned_mode_keeps_the_codecs_that_were_measured_with_it() -> None:
    found = texts(Pinned(sync="local:8").settings(MODEL))
    assert {codec for codec, _, _ in found} == {"fp32", "int8"}
    assert {sync for _, sync, _ in found} == {"local:8"}


def test_a_pinned_codec_keeps_the_modes_that_it_was_measured_with() -> None:
    found = texts(Pinned(codec="int8").settings(MODEL))
    assert {(codec, sync) for codec, sync, _ in found} == {
        ("int8", "bsp"),
        ("int8", "ssp:2"),
        ("int8", "local:4"),
        ("int8", "local:8"),
        ("int8", "local:8,ssp:1"),
    }


def test_what_was_never_measured_is_taken_as_typed_with_what_submit_adds() -> None:
    assert {each[:2] for each in texts(Pinned(sync="ssp:4").settings(MODEL))} == {("fp32", "ssp:4")}
    assert {each[:2] for each in texts(Pinned(codec="topk:0.3").settings(MODEL))} == {("topk:0.3", "bsp")}
    assert {each[:2] for each in texts(Pinned("ssp:2", "int8").settings(MODEL))} == {("int8", "ssp:2")}


def test_a_pinned_topology_is_the_only_one_and_drops_codecs_that_do_not_go_over_it() -> None:
    found = texts(Pinned(topology="tree").settings(MODEL))
    assert {topology for _, _, topology in found} == {"tree"}
    codecs = {codec for codec, _, _ in found}
    assert "fp32" in codecs
    assert "topk:0.1" not in codecs
    assert len(found) == len(Pinned(topology="tree").settings(MODEL)), "each once"


def test_what_goes_with_rounds_of_gradients_alone_keeps_the_modes_that_have_them() -> None:
    """As --scale-lr does (O12): who types it with --quality fast is not given a period."""
    found = texts(Pinned(periods=NO_PERIODS).settings(MODEL))
    assert {sync for _, sync, _ in found} == {"bsp", "ssp:1", "ssp:2"}
    assert found < texts(Pinned().settings(MODEL))


def test_of_other_optimizers_nobody_knows_how_long_local_steps_are_to_be() -> None:
    """O13: periods are for a person to type then."""
    for optimizer in ("Adagrad", None):
        assert {sync for _, sync, _ in texts(Pinned().suiting(optimizer).settings(MODEL))} == {"bsp", "ssp:1", "ssp:2"}
        assert Pinned(sync="local:8").suiting(optimizer).settings(MODEL)
    for optimizer in RULE_OF:
        assert Pinned(sync="local:8").suiting(optimizer) == Pinned(sync="local:8")


def test_an_optimizers_own_periods_are_chosen() -> None:
    """SGD's: those in which it was tried. At the script's rate, which was typed, an adaptive one was far behind."""
    for optimizer in ("Adam", "AdamW", "RMSprop"):
        assert Pinned().suiting(optimizer) == Pinned()
        syncs = {sync for _, sync, _ in texts(Pinned(own_rate=True).suiting(optimizer).settings(MODEL))}
        assert syncs == {"bsp", "ssp:1", "ssp:2"}
    for pinned in (Pinned(), Pinned(own_rate=True)):
        syncs = {sync for _, sync, _ in texts(pinned.suiting("SGD").settings(MODEL))}
        assert syncs == {"bsp", "ssp:1", "ssp:2", *PERIODS_OF_SGD}
    typed = Pinned(periods=NO_PERIODS)
    assert all(typed.suiting(optimizer) == typed for optimizer in (*RULE_OF, None)), "--scale-lr sqrt"


def priced_at(samples_s: float, codec: str, sync: str) -> Price:
    settings = job_settings(codec, sync)
    return Price(settings, 4, 1.0, 1.0, samples_s, 10.0, (0.0,), (0.0,), 0.0, 0.0, 0.0)


def test_a_model_that_grows_is_given_no_period() -> None:
    """It does so by rounds, and would have fewer of them; a person may type one."""
    grows = MODEL.model_copy(update={"travel": travel_of(MODEL.tensors, masks_of("0.8", sync_settings("bsp"), FP32))})
    assert {sync for _, sync, _ in texts(Pinned().settings(grows))} == {"bsp"}
    assert {sync for _, sync, _ in texts(Pinned(sync="local:8").settings(grows))} == {"local:8"}


def test_a_codec_that_nobody_measured_is_worth_no_more_than_those_of_its_mode() -> None:
    """Who types --sync local:8,ssp:1 is not given fp32 for want of figures."""
    slow, quick = priced_at(31.0, "fp32", "local:8,ssp:1"), priced_at(32.0, "int8", "local:8,ssp:1")
    assert slow.settings.worth == quick.settings.worth < 1
    assert preferred([slow, quick]) is quick


def test_what_is_soonest_at_a_loss_is_chosen_whatever_samples_it_takes_in() -> None:
    """Each counts what it was worth, and safe ones in full."""
    often, seldom = priced_at(30.0, "nf4", "local:4"), priced_at(33.0, "int8", "local:8,ssp:1")
    assert often.settings.worth > 0.9 > 0.8 > seldom.settings.worth > 0.3
    assert chosen([often, seldom], Quality.FAST) is often
    assert often.against_one == pytest.approx(3.0 * often.settings.worth)
    safe = priced_at(29.5, "nf4", "bsp")
    assert chosen([often, seldom, safe], Quality.FAST) is safe, "as soon, and nothing is given up"
    far = priced_at(29.5 / seldom.settings.worth * 1.2, "int8", "local:8,ssp:1")
    assert chosen([often, safe, far], Quality.FAST) is far


def test_what_is_not_legal_says_so() -> None:
    with pytest.raises(ValueError, match="fp8"):
        Pinned(codec="fp8").settings(MODEL)


def test_of_what_is_pinned_the_quality_is_no_question_but_of_the_rest_it_is() -> None:
    """Who types local:8 gets it, though it is only fast; who types fp32 and wants it safe does not get local:8."""
    local = Pinned(sync="local:8").settings(MODEL)
    assert wished(local, Quality.SAFE) == local
    assert {sync for _, sync, _ in texts(wished(Pinned(codec="fp32").settings(MODEL), Quality.SAFE))} == {
        "bsp",
        "local:2",
    }
    everything = Pinned().settings(MODEL)
    assert {sync for _, sync, _ in texts(wished(everything, Quality.EXACT))} == {"bsp"}
    far = Pinned(codec="onebit").settings(MODEL)
    assert wished(far, Quality.FAST) == far, "far behind, and still what was typed"
    for each in wished(everything, Quality.FAST):
        assert each.quality is not Quality.FAST or Tried(str(each.codec), each.sync.text()) in WORTH
    assert wished([], Quality.SAFE) == []

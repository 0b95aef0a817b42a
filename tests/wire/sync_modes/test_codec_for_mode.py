"""The codec of a job: a mode that is an optimizer too brings its own, and takes no other."""

import pytest

from meshwire.codecs.registry import parse_codec
from meshwire.sync_modes.codec_for_mode import codec_of, suits
from meshwire.sync_modes.mode import sync_settings


@pytest.mark.parametrize(
    ("sync", "typed", "codec"),
    [
        ("bsp", None, "fp32"),
        ("ssp:2", "topk:0.05", "topk:0.05"),
        ("demo", None, "dct:decay=0.999,gather"),
        ("demo", "dct:64,decay=0.99+fp32", "dct:64,decay=0.99+fp32"),
        ("local:8", None, "fp32"),
        ("diloco:8", "int8", "int8"),
        ("sparseloco:30", None, "topk:0.015625,chunk=4096,decay=0.95,senders+2bit"),
        ("sparseloco:30", "topk:0.03+fp16", "topk:0.03"),
        ("muloco:30", None, "twobit"),
        ("muloco:30", "fp16", "fp16"),
        ("sma:8", None, "fp32"),
        ("sma:8", "int4:sr", "int4:sr"),
        ("bsp", "powersgd:2", "powersgd:2"),
        ("bsp", "powersgd:2,half", "powersgd:2,half"),
        ("local:8", "powersgd", "powersgd"),
        ("ssp:2", "powersgd:2+fp16", "powersgd:2,half+fp16"),
        ("ssp:1", "powersgd:half", "powersgd:half"),
    ],
)
def test_what_is_not_typed_is_the_modes(sync: str, typed: str | None, codec: str) -> None:
    assert str(codec_of(sync_settings(sync), typed)) == codec


@pytest.mark.parametrize("typed", ["powersgd:full", "powersgd:2,iteration=full,warmup=0+fp16"])
def test_two_phases_that_are_asked_for_by_name_are_refused_under_a_bound(typed: str) -> None:
    """What a member adds in the second would follow from sums for which nobody waits there."""
    with pytest.raises(ValueError, match=r"powersgd:.* with --sync ssp:2: .* use half in place of full, or --sync bsp"):
        codec_of(sync_settings("ssp:2"), typed)
    assert str(codec_of(sync_settings("bsp"), typed)) == str(parse_codec(typed))
    assert suits(sync_settings("bsp"), parse_codec(typed))
    assert not suits(sync_settings("ssp:2"), parse_codec(typed))
    assert suits(sync_settings("ssp:2"), parse_codec("powersgd:half"))


def test_a_codec_without_the_modes_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--codec topk with --sync demo: .* dct with other parameters"):
        codec_of(sync_settings("demo"), "topk")
    with pytest.raises(
        ValueError, match=r"--codec fp16 with --sync sparseloco:30: .* or use topk with other parameters"
    ):
        codec_of(sync_settings("sparseloco:30"), "fp16")
    with pytest.raises(ValueError, match="there is no codec 'fp8'"):
        codec_of(sync_settings("bsp"), "fp8")


def test_sparseloco_is_smaller_than_its_paper() -> None:
    """ALGORITHMS 5: 12-bit indices and 2-bit values take 14 bits each. Here gaps take 8 or 16 bits: 12.2 bits at most,
    and 10.5 where places are random (`test_sparseloco_sends_64_of_each_4096`)."""
    codec = codec_of(sync_settings("sparseloco:30"), None)
    assert 8 * codec.segment_bytes_max(65536) <= 12.2 * 1024
    assert sync_settings("sparseloco:30") == sync_settings("local:30").model_copy(update={"sparse": True})
    assert not suits(sync_settings("sparseloco:30"), parse_codec("fp16"))
    assert suits(sync_settings("local:30"), parse_codec("fp16"))


def test_muloco_is_diloco_with_muon_and_any_codec() -> None:
    made = sync_settings("muloco:30")
    assert made == sync_settings("diloco:30").model_copy(update={"muon": True})
    assert suits(made, parse_codec("topk:0.1"))
    assert not suits(made, parse_codec("dgc"))
    with pytest.raises(
        ValueError, match=r"--codec dgc takes over the momentum of gradients, and with --sync muloco:30"
    ):
        codec_of(made, "dgc")


@pytest.mark.parametrize("typed", ["topk:0.1", "onebit", "powersgd", "dgc", "qsgd"])
def test_an_average_takes_no_codec_that_leaves_much_for_later(typed: str) -> None:
    """`tests/daemon/contributions/test_codecs_of_averages.py` shows why."""
    with pytest.raises(ValueError, match=rf"--codec {typed} .*sma:8: .* use fp32, .* or int4, or --sync local:8"):
        codec_of(sync_settings("sma:8"), typed)
    assert not suits(sync_settings("sma:8"), parse_codec(typed))
    assert suits(sync_settings("sma:8"), parse_codec("int8"))


@pytest.mark.parametrize("sync", ["ssp:1", "local:8", "muloco:8"])
def test_a_momentum_that_not_all_have_is_refused(sync: str) -> None:
    """1-bit Adam: what a member sends is made of the momentum of the newest round, which it has applied."""
    with pytest.raises(ValueError, match=f"--codec onebit:momentum,9 with --sync {sync}: .* use --sync bsp, or"):
        codec_of(sync_settings(sync), "onebit:momentum,9")
    assert not suits(sync_settings(sync), parse_codec("onebit:momentum,9"))
    assert suits(sync_settings(sync), parse_codec("onebit:warmup=9"))
    assert codec_of(sync_settings("bsp"), "onebit:warmup=9,of=momentum").of_momentum


def test_second_moments_need_a_warmup_to_be_learnt_in() -> None:
    with pytest.raises(ValueError, match=r"--codec onebit:momentum: .* there is none: .* onebit:momentum,warmup=100"):
        codec_of(sync_settings("bsp"), "onebit:momentum")
    assert not suits(sync_settings("bsp"), parse_codec("onebit:momentum"))


def test_demo_is_bsp_with_signs() -> None:
    made = sync_settings("demo")
    assert (made.staleness, made.signs, made.text()) == (0, True, "demo")
    assert made == sync_settings("bsp").model_copy(update={"signs": True})
    with pytest.raises(ValueError, match="--straggler carry needs a bound above 0, and --sync demo has none"):
        sync_settings("demo", straggler="carry")


def test_momentum_is_taken_over_of_gradients_alone() -> None:
    """DGC with local steps: what travels then are weights. With ratio 1 it takes nothing over."""
    assert codec_of(sync_settings("ssp:2"), "dgc").momentum
    assert not codec_of(sync_settings("local:8"), "dgc:1").momentum
    with pytest.raises(ValueError, match=r"--codec dgc takes over the momentum of gradients, and with --sync local:8"):
        codec_of(sync_settings("local:8"), "dgc")

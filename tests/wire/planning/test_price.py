"""What a step costs: closed forms of every mode, and the choice that follows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.codecs.registry import FP32, parse_codec
from meshwire.codecs.spec import CodecSpec
from meshwire.collectives.strategy import TOPOLOGIES, collective_for, topologies_for, topology_of
from meshwire.model.fragments import manifest_under
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.masks import masks_of, travel_of
from meshwire.model.plan import plan_buckets
from meshwire.planning.choose import EVERY, chosen, job_settings, legal_settings, priced
from meshwire.planning.network import NO_WORK, Network, cables, cell
from meshwire.planning.price import LOADS_MAX, Binds, CodecPrice, JobSettings, Price, Pricing
from meshwire.planning.quality import EVIDENCE, Quality, Tried
from meshwire.planning.step_trace import StepTrace
from meshwire.planning.what_if import WhatIf
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import sync_settings

TENSORS = 16
VALUES = TENSORS * 2**16
VECTOR_BYTES = 4 * VALUES
FREE = CodecPrice(0.0, 0.0)
PRICES = dict.fromkeys([tried.codec for tried in EVIDENCE], FREE)


def manifest(values: int = VALUES) -> ModelManifest:
    shape = (values // TENSORS // 64, 64)
    specs = (TensorSpec(name=f"t{at}", shape=shape, dtype="float32", kind="parameter") for at in range(TENSORS))
    return ModelManifest(tensors=tuple(specs), optimizer="AdamW")


def step(before_s: float = 0.1, backward_s: float = 0.2, after_s: float = 0.05, copy_s: float = 0.01) -> StepTrace:
    """Gradients come evenly, those of the last tensor first."""
    return StepTrace(
        samples=8,
        steps=5,
        threads=2,
        before_s=before_s,
        backward_s=backward_s,
        after_s=after_s,
        copy_s=copy_s,
        ready=tuple((TENSORS - at) / TENSORS for at in range(TENSORS)),
    )


def quick(network: Network) -> Network:
    """Daemons that take no time."""
    return Network(network.links, NO_WORK)


PRICING = Pricing(manifest(), PRICES)


def price(settings: JobSettings, network: Network, trace: StepTrace | None = None) -> Price:
    return PRICING.price(settings, (trace or step(),) * len(network.links), network)


def test_on_a_network_without_limits_all_laptops_add_up() -> None:
    found = price(job_settings("fp32", "bsp"), quick(cables(4, 1e15, 0.0)))
    assert found.step_s == pytest.approx(step().alone_s + step().copy_s)
    assert found.against_one == pytest.approx(4 * 0.35 / 0.36)
    assert found.processor_part == pytest.approx(0.35 / 0.36)


def test_bsp_on_a_slow_link_takes_the_exchange_and_what_cannot_overlap() -> None:
    """The first bucket is there a 16th into the backward pass, and the link is never idle behind it."""
    trace, rate = step(), VECTOR_BYTES / 10
    found = price(job_settings("fp32", "bsp"), quick(cables(2, rate, 0.0)), trace)
    first_s = trace.before_s + (trace.backward_s + trace.copy_s) / TENSORS
    assert found.step_s == pytest.approx(first_s + VECTOR_BYTES / rate + trace.after_s, rel=0.01)
    assert found.sent_bytes == pytest.approx((VECTOR_BYTES,) * 2, rel=0.001)
    assert found.link_part == pytest.approx(10 / found.step_s, rel=0.01)


@pytest.mark.parametrize(("members", "vectors"), [(2, 1), (4, 3), (8, 7)])
def test_what_comes_to_a_hub_is_sent_back_while_the_rest_still_comes(members: int, vectors: int) -> None:
    """A daemon sends a frame on as soon as its sum is there: both directions of a cable are busy together."""
    pricing = Pricing(manifest(2 * VALUES), PRICES)
    assert len(plan_buckets(pricing.manifest, codec=FP32).buckets) < LOADS_MAX
    rate = 2 * VECTOR_BYTES / 10
    found = pricing.price(
        job_settings("fp32", "local:8", "star:0"), (step(),) * members, quick(cables(members, rate, 0.0))
    )
    assert 8 * (found.step_s - step().alone_s) == pytest.approx(10 * vectors, rel=0.1)


def test_who_mixes_within_a_period_sends_whole_vectors_and_waits_for_a_step_at_most() -> None:
    """R9: three turns of eight steps, each a vector of fp32 to one neighbour, or of bf16 to two."""
    network = quick(cables(4, VECTOR_BYTES / 0.1, 0.0))
    alone = price(job_settings("fp32", "local:8"), network)
    pairs = price(job_settings("fp32", "local:8,gossip=2"), network)
    assert pairs.step_s - alone.step_s == pytest.approx(3 * 0.1 / 8, rel=0.01)
    sent = [mixed - plain for mixed, plain in zip(pairs.sent_bytes, alone.sent_bytes, strict=True)]
    assert sent == pytest.approx([3 * VECTOR_BYTES / 8] * 4, rel=0.001)
    ring, half = (
        price(job_settings("int8", sync), network) for sync in ("local:8,gossip=2,over=ring", "local:8,gossip=2")
    )
    assert ring.sent_bytes[0] - half.sent_bytes[0] == pytest.approx(3 * VECTOR_BYTES / 2 / 8, rel=0.001)
    slow = quick(cables(4, VECTOR_BYTES / 1.0, 0.0))
    alone, pairs = (price(job_settings("fp32", sync), slow) for sync in ("local:8", "local:8,gossip=2"))
    assert pairs.step_s - alone.step_s == pytest.approx(3 * step().alone_s / 8)


def test_what_is_mixed_and_not_waited_for_is_still_sent_before_the_round() -> None:
    """Three vectors and the ring's one and a half, of 10 s each, in a period that computes for 3 s."""
    slow = quick(cables(4, VECTOR_BYTES / 10, 0.0))
    found = price(job_settings("fp32", "local:8,gossip=2"), slow)
    assert found.step_s == pytest.approx(45 / 8, rel=0.01)
    assert found.link_part == pytest.approx(1.0)


def test_weights_that_are_mixed_cross_the_air_of_a_cell_twice() -> None:
    """Four stations, of which each sends one vector a turn."""
    network = quick(cell(4, VECTOR_BYTES / 0.01, 0.0))
    alone, pairs = (price(job_settings("fp32", sync), network) for sync in ("local:8", "local:8,gossip=2"))
    assert pairs.step_s - alone.step_s == pytest.approx(3 * 4 * 2 * 0.01 / 8, rel=0.01)


def test_nobody_is_proposed_to_mix() -> None:
    """It was not measured."""
    assert not any(setting.sync.gossip for setting in legal_settings(manifest()))


def test_accumulation_pays_one_round_that_its_last_step_hides_a_part_of() -> None:
    """O6: all steps but the last one compute without a network."""
    trace, network = step(), quick(cables(2, VECTOR_BYTES / 10, 0.0))
    plain = price(job_settings("fp32", "bsp"), network, trace)
    found = price(job_settings("fp32", "bsp,accumulate=4"), network, trace)
    assert found.step_s == pytest.approx((plain.step_s + 3 * (trace.alone_s + trace.copy_s)) / 4)
    assert found.sent_bytes == pytest.approx((VECTOR_BYTES / 4,) * 2, rel=0.001)
    assert found.settings.quality is plain.settings.quality


def test_a_period_pays_one_round_that_nothing_hides() -> None:
    trace, rate = step(), VECTOR_BYTES / 10
    found = price(job_settings("fp32", "local:8"), quick(cables(2, rate, 0.0)), trace)
    assert found.step_s == pytest.approx(trace.alone_s + (trace.copy_s + VECTOR_BYTES / rate) / 8, rel=0.001)
    assert found.sent_bytes == pytest.approx((VECTOR_BYTES / 8,) * 2, rel=0.001)


def test_a_bound_hides_the_round_of_a_period_behind_the_next_one() -> None:
    """R9: s=1 lets a round take the whole of the next period; beyond that the link counts, or the way and back."""
    trace, overlapped = step(), job_settings("fp32", "local:8,ssp:1")
    period_s = 8 * trace.alone_s
    hidden = price(overlapped, quick(cables(2, VECTOR_BYTES / (0.9 * period_s), 0.0)), trace)
    assert hidden.step_s == pytest.approx(trace.alone_s + 2 * trace.copy_s / 8)
    full = price(overlapped, quick(cables(2, VECTOR_BYTES / (3 * period_s), 0.0)), trace)
    assert full.step_s == pytest.approx(3 * period_s / 8, rel=0.01)
    late = price(overlapped, quick(cables(2, 1e15, rtt_s=10 * period_s)), trace)
    assert late.step_s == pytest.approx((10 * period_s + trace.copy_s) / 2 / 8, rel=0.01)
    assert hidden.sent_bytes == pytest.approx((VECTOR_BYTES / 8,) * 2, rel=0.001)


@pytest.mark.parametrize("parts", [1, 4])
def test_parts_that_take_turns_send_as_much_in_smaller_rounds(parts: int) -> None:
    """R9: of every H steps the bytes are those of one round of all; on the air at once is a part of them."""
    trace, rate = step(), VECTOR_BYTES / 10
    found = price(job_settings("fp32", f"local:8,stream={parts}"), quick(cables(2, rate, 0.0)), trace)
    assert found.sent_bytes == pytest.approx((VECTOR_BYTES / 8,) * 2, rel=0.001)
    assert found.burst_bytes == pytest.approx(VECTOR_BYTES / parts, rel=0.001)
    a_step_s = trace.alone_s + (parts * trace.copy_s + VECTOR_BYTES / rate) / 8
    assert found.step_s == pytest.approx(a_step_s, rel=0.001)
    whole = price(job_settings("fp32", "local:8"), quick(cables(2, rate, 0.0)), trace)
    assert whole.burst_bytes == pytest.approx(VECTOR_BYTES, rel=0.001)


def test_a_delay_hides_a_round_behind_so_many_steps() -> None:
    trace = step()
    settings_ = job_settings("fp32", "local:8,stream=4,tau=2")
    two_steps = 2 * trace.alone_s
    hidden = price(settings_, quick(cables(2, VECTOR_BYTES / 4 / (0.9 * two_steps), 0.0)), trace)
    assert hidden.step_s == pytest.approx(trace.alone_s + trace.copy_s / 2, rel=0.001)
    late = price(settings_, quick(cables(2, VECTOR_BYTES / 4 / (3 * two_steps), 0.0)), trace)
    assert late.step_s == pytest.approx(trace.alone_s + (trace.copy_s + 2 * two_steps) / 2, rel=0.001)


def test_a_plan_prices_other_modes_of_a_model_that_was_measured_in_parts() -> None:
    """Which parts travel belongs to the mode, not to the model."""
    in_parts = Pricing(manifest_under(manifest(), sync_settings("local:8,stream=4")), PRICES)
    network = quick(cables(2, VECTOR_BYTES / 10, 0.0))
    for sync in ("bsp", "local:8", "local:8,stream=2"):
        settings_ = job_settings("fp32", sync)
        assert in_parts.price(settings_, (step(),) * 2, network) == price(settings_, network)
    assert ("fp32", "ssp:2") in {(str(each.codec), each.sync.text()) for each in legal_settings(in_parts.manifest)}
    tried = (Tried("powersgd", "local:8,stream=4"), Tried("int8", "local:8,stream=4"))
    assert {str(each.codec) for each in legal_settings(manifest(), tried)} == {"int8"}


def test_a_bound_hides_rounds_up_to_as_many_steps_and_never_more_than_a_link_can_take() -> None:
    trace = step()
    ssp = job_settings("fp32", "ssp:2")
    free = price(ssp, quick(cables(2, 1e15, 0.0)), trace)
    assert free.step_s == pytest.approx(trace.alone_s + trace.copy_s + trace.after_s), "the optimizer's copy steps too"
    hidden = price(ssp, quick(cables(2, VECTOR_BYTES / 0.39, 0.0)), trace)
    assert hidden.step_s == pytest.approx(free.step_s)
    late = price(ssp, quick(cables(2, 1e15, rtt_s=2.0)), trace)
    assert late.step_s == pytest.approx((0.1 + 0.2 + 0.01 + 2.0 + 2 * 0.05) / 3, rel=0.01)
    full = price(ssp, quick(cables(2, VECTOR_BYTES / 10, 0.0)), trace)
    assert full.step_s == pytest.approx(10.0, rel=0.01), "a link cannot be busy for more than all the time"


def test_a_round_of_a_tiny_model_costs_what_every_round_does() -> None:
    tiny = Pricing(manifest(64 * TENSORS), PRICES)
    network = cables(2, 1e9, 0.0)
    trace = step(before_s=0.0, backward_s=1e-9, after_s=0.0, copy_s=0.0)
    found = tiny.price(job_settings("fp32", "bsp"), (trace, trace), network)
    assert network.work.round_s < found.step_s < 2 * network.work.round_s


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        (codec, f"{each.name}:2" if each.named_max else each.name)
        for codec in map(parse_codec, ("fp32", "int8", "topk:0.1,gather"))
        for each in topologies_for(codec.family, codec.reduction)
    ],
    ids=str,
)
def test_bytes_are_those_that_the_topology_says(codec: CodecSpec, name: str) -> None:
    found = price(job_settings(str(codec), "bsp", name), cables(5, 1e6, 0.0))
    expected = topology_of(name).sent_vectors(5) * PRICING.round_bytes(codec)
    assert max(found.sent_bytes) == pytest.approx(expected, rel=0.1)
    assert sum(found.sent_bytes) == pytest.approx(sum(found.received_bytes))


def test_what_a_step_waits_for_is_what_it_would_be_faster_without() -> None:
    steps = (step(),) * 2
    fp32 = job_settings("fp32", "bsp")
    for network, expected in (
        (cables(2, 1e15, 0.0), Binds.COMPUTE),
        (cables(2, VECTOR_BYTES / 10, 0.001), Binds.LINK),
        (cell(2, VECTOR_BYTES / 10, 0.001), Binds.AIR),
        (cables(2, 1e9, rtt_s=3.0), Binds.LATENCY),
    ):
        assert PRICING.waits_for(fp32, steps, network) is expected
    dear = Pricing(manifest(), {**PRICES, "int8": CodecPrice(1e-6, 1e-6)})
    assert dear.waits_for(job_settings("int8", "bsp"), steps, cables(2, 1e15, 0.0)) is Binds.PROCESSOR


def test_a_codec_that_costs_more_than_it_saves_is_not_faster() -> None:
    dear = Pricing(manifest(), {**PRICES, "int8": CodecPrice(1e-6, 1e-6)})
    steps, network = (step(),) * 2, cables(2, 1e9, 0.0)
    settings_ = [job_settings("fp32", "bsp"), job_settings("int8", "bsp")]
    assert [str(each.settings.codec) for each in priced(dear, settings_, steps, network)] == ["fp32", "int8"]


def test_short_segments_are_dear() -> None:
    """A model of a million values has them of 4096, of which each has its price, however few values are in it."""
    prices = {**PRICES, "int8": CodecPrice(0.0, 0.0, encode_segment_s=1e-3)}
    segments = VALUES // 4096
    found = Pricing(manifest(), prices).price(
        job_settings("int8", "local:1"), (step(),) * 2, quick(cables(2, 1e15, 0.0))
    )
    # All of them are encoded once, and the means of half of them by their owner.
    assert found.step_s - step().alone_s - step().copy_s == pytest.approx(1.5 * segments * 1e-3, rel=0.01)


def test_an_unequal_member_sets_the_pace() -> None:
    slow = step(before_s=0.5)
    found = PRICING.price(job_settings("fp32", "bsp"), (step(), slow, step()), quick(cables(3, 1e15, 0.0)))
    assert found.step_s == pytest.approx(slow.alone_s + slow.copy_s)
    assert found.alone_samples_s == pytest.approx(step().samples_s), "against the fastest one alone"
    assert found.against_one < 3 * 0.5


def test_many_buckets_played_as_runs_cost_the_same() -> None:
    large = Pricing(manifest(64 * VALUES), PRICES)  # 256 MB: 64 buckets at least
    trace, rate = step(), VECTOR_BYTES
    found = large.price(job_settings("fp32", "bsp"), (trace,) * 2, quick(cables(2, rate, 0.0)))
    assert found.step_s == pytest.approx(64 + 0.1 + 0.05, rel=0.01)


def test_every_settings_that_are_listed_are_legal_and_priced() -> None:
    """PowerSGD and LGC too, whose vectors are others."""
    listed = list(legal_settings(PRICING.manifest))
    assert {each.collective.topology.name for each in listed} == {
        each.name for each in TOPOLOGIES.values() if not each.named_min
    }
    found = priced(PRICING, listed, (step(),) * 2, cell(2, 1e6, 0.005))
    assert len(found) == len(listed) > 30
    assert [price.useful_samples_s for price in found] == sorted(
        (price.useful_samples_s for price in found), reverse=True
    )
    assert {str(price.settings.codec) for price in found} >= {"powersgd", "lgc", "homomorphic"}
    for price_ in found:
        assert price_.step_s >= step().alone_s * (1 - 1e-9)


def test_what_submit_refuses_is_never_listed() -> None:
    """All codecs under all modes."""
    every = list(legal_settings(PRICING.manifest, EVERY))
    pairs = {(str(each.codec), each.sync.text()) for each in every}
    assert set(EVIDENCE) < {Tried(*pair) for pair in pairs} < set(EVERY)
    assert ("int8", "ssp:2") in pairs
    assert ("powersgd", "ssp:2") not in pairs, "what a laptop adds would follow from what all have added"
    assert ("int8", "sparseloco:8") not in pairs
    for each in every:
        assert codec_of(each.sync, str(each.codec)) == each.codec
        assert collective_for(each.codec, each.collective.topology.name) == each.collective


def test_a_model_of_which_not_all_travels_is_not_offered_what_refuses_it() -> None:
    masks = masks_of("0.8", sync_settings("bsp"), FP32)
    masked = manifest()
    masked = masked.model_copy(update={"travel": travel_of(masked.tensors, masks)})
    offered = {(str(each.codec), each.sync.text()) for each in legal_settings(masked)}
    assert ("int8", "local:8") in offered
    assert not [each for each in offered if each[1].startswith("ssp") or each[0] in ("powersgd", "lgc")]


def test_the_choice_gives_up_no_more_than_it_has_to() -> None:
    """Where all are equally fast it is what submit does without flags; where the link is slow, the most that was asked
    for."""
    steps, listed = (step(),) * 2, list(legal_settings(PRICING.manifest))

    def choose(quality: Quality, network: Network) -> tuple[str, str, str]:
        settings_ = chosen(priced(PRICING, listed, steps, network), quality).settings
        return str(settings_.codec), settings_.sync.text(), settings_.collective.topology.name

    assert choose(Quality.FAST, quick(cables(2, 1e15, 0.0))) == ("fp32", "bsp", "ring")
    slow = cables(2, VECTOR_BYTES / 10, 0.0)
    assert choose(Quality.EXACT, slow)[0] in ("fp16", "bf16")
    assert choose(Quality.SAFE, slow)[:2] == ("nf4", "local:2"), "half of its rounds are as safe"
    assert choose(Quality.FAST, slow)[:2] == ("int8", "local:8,ssp:1"), "hidden behind the next period"
    assert choose(Quality.FAST, cables(2, VECTOR_BYTES / 100, 0.0))[1] == "sparseloco:8,ssp:1"


@settings(max_examples=15)
@given(
    bytes_s=st.floats(1e4, 1e9),
    factor=st.floats(1.0, 50.0),
    rtt_s=st.floats(0.0, 0.1),
    peers=st.integers(2, 4),
    codec=st.sampled_from(["fp32", "int8", "topk:0.1,gather"]),
    sync=st.sampled_from(["bsp", "ssp:2", "local:8", "local:8,ssp:1"]),
)
def test_prices_are_sane(bytes_s: float, factor: float, rtt_s: float, peers: int, codec: str, sync: str) -> None:
    """A faster network never costs more, and nothing is faster than all laptops without one."""
    settings_ = job_settings(codec, sync)
    slow, fast = (price(settings_, cell(peers, each, rtt_s)) for each in (bytes_s, bytes_s * factor))
    # A codec's work costs a little more where more of it falls into the time in which training wants the cores.
    assert fast.step_s <= slow.step_s * 1.01
    assert slow.against_one <= peers
    assert 0 <= slow.link_part <= 1
    assert 0 < slow.processor_part <= 1


def test_the_rate_that_is_needed_is_enough_and_little_less_is_not() -> None:
    trace = step()
    whatif = WhatIf(PRICING, trace, lambda count, bytes_s: cables(count, bytes_s, 0.001), Quality.EXACT)
    needed = whatif.rate_for(2.0, 4)
    assert needed is not None
    assert whatif.best(needed, 4).against_one >= 2.0 > whatif.best(needed / 1.1, 4).against_one
    default = whatif.rate_for(2.0, 4, default=True)
    assert default is not None
    assert default > 1.5 * needed, "fp32 has twice the bytes of fp16"
    assert whatif.rate_for(2.0, 2) is None, "two are never quite twice one"


def test_a_cell_of_rate_and_peers_holds_best_and_default() -> None:
    whatif = WhatIf(PRICING, step(), lambda count, bytes_s: cell(count, bytes_s, 0.005), Quality.SAFE)
    cells = list(whatif.cells([1e5, 1e8], [2, 3]))
    assert [(each.bytes_s, each.peers) for each in cells] == [(1e5, 2), (1e5, 3), (1e8, 2), (1e8, 3)]
    for each in cells:
        assert each.default.settings == job_settings("fp32", "bsp")
        assert each.best.samples_s >= 0.97 * each.default.samples_s
        assert each.best.settings.quality in (Quality.EXACT, Quality.SAFE)
    assert cells[0].waits_for is Binds.AIR


def test_who_takes_longer_to_apply_a_round_begins_the_next_step_later_and_no_more() -> None:
    """In step: one member computes long and applies quickly, 1 s in all; the other the other way round, 1.2 s."""
    steps = step(0.0, 0.9, 0.1, 0.0), step(0.0, 0.6, 0.6, 0.0)
    found = PRICING.price(job_settings("fp32", "bsp"), steps, quick(cables(2, 1e12, 0.0)))
    assert found.step_s == pytest.approx(1.2, rel=0.02)

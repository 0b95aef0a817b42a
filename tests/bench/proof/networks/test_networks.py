"""What the pages of paced models say follows from what was measured; what they plan is arithmetic."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.cli.planning.codec_prices import ProcessorPrices
from meshwire.planning.network import NO_WORK, USUAL_WORK
from meshwire.planning.price import CodecPrice
from meshwire.planning.quality import EVIDENCE, Quality
from tests.bench.goals.learnerturns import made
from tests.bench.goals.sides import Side, Work
from tests.bench.journal import Figures
from tests.bench.proof import summary_page
from tests.bench.proof.filled_journal import filled
from tests.bench.proof.networks import (
    grid,
    grid_page,
    predicted,
    predicted_page,
    target,
    target_page,
    topologies,
    topologies_page,
    wifi,
    wifi_page,
)
from tests.bench.proof.networks.paced_models import DDP_PLANNED, Net, Planner, manifest_of, text_of


def planner(name: str) -> Planner:
    """With prices that are stated."""
    codecs = [*DDP_PLANNED.values(), *(tried.codec for tried in EVIDENCE)]
    prices = {codec: CodecPrice(1e-9, 1e-9) for codec in codecs}
    return Planner(wifi.model_of(name), ProcessorPrices(prices, USUAL_WORK))


def test_the_wifi_plan_is_arithmetic() -> None:
    """fp32 over a ring of four in one cell: 12 times the model's bytes cross the air, behind all computing of a step
    but what overlaps; fp16 is half of it."""
    small = planner("mlp")
    network = Net(20.0, True).network(4)
    air_s = 12 * 4 * sum(tensor.count for tensor in manifest_of(small.model).tensors) / (20e6 / 8)
    whole, half = (small.ddp(codec, network, 4).step_s for codec in ("fp32", "fp16"))
    assert air_s < whole < air_s + small.model.step_s + 0.05
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_the_wifi_page_says_what_is_chosen_and_what_misses_its_goal(tmp_path: Path) -> None:
    first, net, members, _ = wifi.MEASURED[0]
    figures = {
        "alone": [0.5],
        "DDP, fp16 hook": [5.0],
        "DDP, PowerSGD hook": [1.0],
        "safe: bsp int4:sr": [2.5],
        "safe, planned": [2.4],
        "fast: local:8,ssp:1 int8": [0.5],
        "fast, planned": [0.5],
    }
    text = wifi_page.page(filled(tmp_path, (wifi.measured_name(first, net, members), figures)))
    assert "`bsp int4:sr` 2.50 s (2.40 s) | `local:8,ssp:1 int8` 500 ms (500 ms) | 4.00 |" in text
    assert "`safe` 2.0 and 0.40 [alone 2.5 and 0.50]: **not met**; `fast` 10.0 and 2.00" in text


def test_a_paced_step_takes_what_is_stated_and_gives_every_tensor_a_gradient() -> None:
    """What this machine computes in it is not added; the gradients come from the last tensor to the first."""
    task = made("paced:mlp:0.2", 0, None)
    seen: list[float] = []
    for parameter in task.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(time.monotonic()))
    began_s = time.monotonic()
    task.model(torch.ones(16)).sum().backward()
    assert time.monotonic() - began_s == pytest.approx(0.2, abs=0.05)
    assert len(seen) == len(list(task.model.parameters()))
    assert 0.2 / 3 < seen[0] - began_s < 0.15, "the last layer's bias, of ten values"
    assert all(parameter.grad is not None and parameter.grad.std() > 0.5 for parameter in task.model.parameters())


def test_the_model_of_the_grid_has_as_many_parameters_as_theirs() -> None:
    """30.8 M, to the digit that they say."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in made("lm", 0, None).model.parameters())
    assert round(count / 1e6, 1) == 30.8


def test_a_turn_of_the_grid_is_a_period() -> None:
    """Else a turn would have two rounds, or none; with rounds that hide, it begins where they do already."""
    for way in (*grid.WAYS, *grid.EVERY_TRAINED):
        sync = way.settings.sync
        warm_up, steps, _ = grid.turns_of(sync, short=False)
        assert steps % sync.round_steps == 0
        assert warm_up >= (sync.round_steps + sync.delay if sync.period and sync.staleness else 1)
        assert grid.STEPS % max(1, sync.period) == 0


def grid_entry(name: str, settings: str, step_s: float, of_one: float = 2.0) -> tuple[str, Figures]:
    figures = {settings: [step_s], "daemons_cpu_s": [0.1], "sent_bytes": [1e6], "planned_s": [step_s]}
    figures["of_one"] = [of_one]
    return f"grid, 50 Mbit/s, {name}", figures


def grid_losses(way: grid.Way, *ends: float) -> list[tuple[str, Figures]]:
    return [(grid.loss_name(way), {"step": [0.0, 512.0], "loss": [4.0, end], "parameters": [1e6]}) for end in ends]


def test_the_grid_takes_both_the_compute_and_the_loss(tmp_path: Path) -> None:
    """Utilisation is of a measured step without exchange; a way with the one and not the other meets nothing."""
    bsp, _, diloco, streaming, sparse = grid.WAYS
    alone = (grid.ALONE, {"step_s": [0.54, 0.54], "cpu_s": [0.1]})
    entries = [
        alone,
        grid_entry(bsp.name, text_of(bsp.settings), 30.0),
        grid_entry(diloco.name, text_of(diloco.settings), 0.8),
        grid_entry(streaming.name, text_of(streaming.settings), 0.6),
        grid_entry(sparse.name, text_of(sparse.settings), 0.55),
        *grid_losses(bsp, 2.0, 2.0),
        *grid_losses(streaming, 2.02, 2.02),
    ]
    journal = filled(tmp_path, *entries)
    text = grid_page.page(journal)
    assert "| `bsp` | **0.018**: 30.00 s, planned 30.00, daemon 0.10 | not measured |" in text
    both = "`diloco:128,stream=4,tau=20`, `sparseloco:32`"
    assert grid_page.verdict(journal) == f"**not met**. The compute alone: {both}."
    assert "| `diloco:128,stream=4,tau=20` | 2.020 (2.020 2.020) | +1.00% | 0.00% | **no** |" in text
    (tmp_path / "proof.jsonl").unlink()
    journal = filled(tmp_path, *entries[:-2], *grid_losses(streaming, 2.01, 2.008))
    assert grid_page.verdict(journal).startswith("**met** by `diloco:128,stream=4,tau=20`.")
    does, does_not = summary_page.page(journal).split("## It does not")
    assert "within 0.5% of synchronous AdamW's: `diloco:128,stream=4,tau=20`." in does
    assert "but not at a loss within 0.5%: `sparseloco:32`." in does_not


def test_the_grid_looks_for_the_loss_of_the_very_settings_that_were_chosen(tmp_path: Path) -> None:
    """And says where auto would rather train alone."""
    bsp, four_bits = grid.TRAINED[0], next(way for way in grid.TRAINED if way.codec == "int4:sr")
    safe = grid.AUTO[0]
    journal = filled(
        tmp_path,
        (grid.ALONE, {"step_s": [0.5], "cpu_s": [0.1]}),
        grid_entry(safe.name, text_of(four_bits.settings), 0.52, of_one=0.9),
        *grid_losses(bsp, 2.0, 2.1),
        *grid_losses(four_bits, 2.0, 2.11),
    )
    assert f"- auto, safe at 50 Mbit/s chose `{text_of(four_bits.settings)}`; it would rather train alone." in (
        grid_page.page(journal)
    )
    assert grid_page.verdict(journal) == "**met** by `auto, safe`."


def test_the_grid_says_what_was_the_limit_at_its_fastest_rate(tmp_path: Path) -> None:
    bsp = grid.WAYS[0]
    figures = {text_of(bsp.settings): [1.0, 2.0, 1.5], "daemons_cpu_s": [1.0], "sent_bytes": [187.5e6]}
    figures |= {"planned_s": [0.8], "of_one": [1.0]}
    journal = filled(tmp_path, (grid.measured_name(5000.0, bsp), figures), (grid.SOCKETS, {"5000": [2000.0, 2200.0]}))
    text = " ".join(grid_page.page(journal).split())
    assert "plain TCP around the ring got 2100 (2000 to 2200) Mbit/s a station" in text
    assert "`bsp` moved 1000 Mbit/s a station there" in text


def target_entries(fast: list[float], alone: list[float]) -> list[tuple[str, Figures]]:
    """ResNet-18 in the cell: DDP takes 8 s a step with fp16 and 1 s with PowerSGD; the target is 1.5."""
    trained, net = target.TRAINED[0], target.NETS[0]
    figures = {"alone": [0.5], "DDP, fp16 hook": [8.0], "DDP, PowerSGD hook": [1.0]}
    figures |= {"safe: bsp int4": [2.0], "safe, planned": [2.0], "fast: local:8 int8": [0.5], "fast, planned": [0.5]}
    curves = {
        "steps": [0.0, 32.0, 64.0],
        "DDP, fp16 hook": [3.0, 2.0, 1.0],
        "DDP, PowerSGD hook": [3.0, 2.0, 1.0],
        "bsp int4": [3.0, 2.0, 1.0],
        "local:8 int8": fast,
        target.ALONE: alone,
    }
    return [(wifi.measured_name(trained.paced, net, 4), figures), (target.case_name(trained), curves)]


def test_time_to_target_is_steps_by_samples_times_seconds_a_step(tmp_path: Path) -> None:
    """One laptop takes four steps where four take one; a choice is judged by time, speed and loss."""
    journal = filled(tmp_path, *target_entries([3.0, 1.5, 1.0], [3.0, 1.0, 0.5]))
    found = target_page.reached(journal, target.TRAINED[0], target.NETS[0])
    assert target_page.target_of(journal, target.TRAINED[0]) == pytest.approx(1.5)
    assert found["fast"].time_s == pytest.approx(32 * 0.5)
    assert found["safe"].time_s == pytest.approx(48 * 2.0)
    assert found[target.ALONE].time_s == pytest.approx(24 * 4 * 0.5)
    text = target_page.page(journal)
    assert "| fast | `local:8 int8` | 1.000 (1.000) | +0.000 |  | 500 ms | 16 s | 3.00 |" in text
    assert "| one laptop alone |  | 0.500 (0.500) | -0.500 |  | 500 ms | 48 s | 1.00 |" in text
    assert (
        "`safe` 0.50 times one laptop: **not met**; 4.0 times the fp16 hook: **not met**; "
        "0.50 times the PowerSGD hook, loss +0.000 (within the noise, or better): **not met**" in text
    )
    assert "`fast` 3.00 times one laptop: met; 16.0 times the fp16 hook: met; 2.00 times the PowerSGD hook" in text
    does, does_not = summary_page.page(journal).split("## It does not")
    assert ("`fast`: 3.00 times one laptop" in does, "`safe`: 0.50 times one laptop" in does_not) == (True, True)


def test_what_is_fast_and_learns_worse_meets_no_goal_beside_the_hook(tmp_path: Path) -> None:
    """A target that is never reached is said, and a loss that is worse than the hook's voids its speed."""
    journal = filled(tmp_path, *target_entries([3.0, 2.5, 1.8], [3.0, 1.0, 0.5]))
    text = target_page.page(journal)
    assert "`fast` the target is not reached: **not met**" in text
    assert "2.00 times the PowerSGD hook, loss +0.800: **not met**" in text
    assert "`fast`: not reached" in summary_page.page(journal).split("## It does not")[1]


def test_what_fast_comes_to_in_more_steps_is_told_beside_one_laptop(tmp_path: Path) -> None:
    resnet, fast = target.TRAINED[0], "local:8,ssp:1 int8"
    times, curves = target_entries([3.0, 2.5, 2.0], [3.0, 2.0, 1.0])
    times[1][f"fast: {fast}"] = times[1].pop("fast: local:8 int8")
    curves[1][fast] = curves[1].pop("local:8 int8")

    def longer(way: str, *losses: float) -> tuple[str, Figures]:
        return target.longer_name(resnet, way), {"steps": [0.0, 64.0, 128.0, 256.0], way: list(losses)}

    text = target_page.page(filled(tmp_path, times, curves, longer("DDP, fp16 hook", 3.0, 1.0, 0.6, 0.2)))
    assert "ResNet-18, 11.7 M: not measured." in text
    journal = filled(
        *(tmp_path, times, curves, longer("DDP, fp16 hook", 3.0, 1.0, 0.6, 0.2)),
        *(longer(fast, 3.0, 2.0, 1.0, 0.5), longer(target.ALONE, 3.0, 2.0, 1.0, 0.0)),
    )
    text = target_page.page(journal)
    assert (
        "| ResNet-18, 11.7 M |  | loss after 64 steps | loss after 128 steps | loss after 256 steps | to 1.500" in text
    )
    assert f"| `{fast}` | 2.000 | 1.000 | 0.500 | 48 s, 4.00 | not reached |" in text
    assert f"| `{target.ALONE}` | 2.000 | 1.000 | 0.000 | 192 s, 1.00 | 410 s, 1.00 |" in text
    assert "4 laptops were there 8.0 times as soon as one and 4.3 times as soon as one." in text


def codec_entries(trained: target.Trained, codec: str, *ends: float) -> list[tuple[str, Figures]]:
    """Of several seeds, which begin at 3 and end after 64 steps."""
    curve = {"steps": [0.0, 64.0]}
    return [(target.safe_name(trained, codec), curve | {f"bsp {codec}": [3.0, end]}) for end in ends]


def test_what_is_safe_is_judged_by_fp32_and_trained_in_a_section_of_its_own(tmp_path: Path) -> None:
    """Its curves stand before those that are kept of the same settings from when both were one."""
    resnet = target.TRAINED[0]
    journal = filled(
        tmp_path,
        *target_entries([3.0, 1.5, 1.0], [3.0, 1.0, 0.5]),
        *codec_entries(resnet, "fp32", 1.0, 1.02),
        *codec_entries(resnet, "int8", 1.01, 1.03),
        *codec_entries(resnet, "int4", 1.2, 1.4),
    )
    text = target_page.page(journal)
    assert "| ResNet-18, 11.7 M | `fp32` | 1.010 (1.000 1.020) |  |  |  |" in text
    assert "| ResNet-18, 11.7 M | `int8` | 1.020 (1.010 1.030) | +0.010 | 0.028 | yes |" in text
    assert "| ResNet-18, 11.7 M | `int4` | 1.300 (1.200 1.400) | +0.290 | 0.028 | **no** |" in text
    assert "| ResNet-18, 11.7 M | `nf4` | not measured |" in text
    found = target_page.reached(journal, resnet, target.NETS[0])
    assert found["safe"].losses == (1.2, 1.4)
    assert found["fast"].losses == (1.0,)


def test_all_that_is_called_safe_is_trained_with_large_models_too() -> None:
    safe = {f"{tried.sync} {tried.codec}" for tried, found in EVIDENCE.items() if found.quality is Quality.SAFE}
    assert safe <= {text_of(settings) for settings in target.SAFE_WAYS.values()}


def test_what_is_chosen_in_cells_that_were_drawn_is_beside_the_best_that_was_typed(tmp_path: Path) -> None:
    """Of four that take 1 s alone: `safe` would choose fp32, which is predicted not to pay, so one trains alone, where
    int4 is twice as fast; `fast` has chosen the best of all."""
    mesh = next(mesh for mesh in predicted.random_meshes() if mesh.members == 4)
    seconds = {"bsp fp32": 8.0, "bsp int4": 2.0, "local:2 nf4": 3.0, "local:8 int8": 2.5}
    seconds["local:8,ssp:1 int8"] = 1.25
    figures = {"alone": [1.0], "safe: bsp fp32": [1.0], "fast: local:8,ssp:1 int8": [1.0]}
    figures |= {name: [s] for name, s in seconds.items()} | {f"{name}, planned": [s] for name, s in seconds.items()}
    journal = filled(tmp_path, (predicted.random_name(mesh), figures))
    safe, fast = (predicted_page.chosen_in(journal, mesh, quality) for quality in (Quality.SAFE, Quality.FAST))
    assert safe is not None
    assert fast is not None
    assert (safe.alone, safe.of_one, safe.typed, safe.of_typed) == (True, 1.0, "bsp int4", 0.5)
    assert (fast.alone, fast.typed, fast.of_typed) == (False, "local:8,ssp:1 int8", 1.0)
    assert fast.of_one == pytest.approx(3.2 * 0.65), "what its samples are worth"
    text = predicted_page.page(journal)
    assert f"| {mesh.about} | one alone 1.00 | `bsp int4` 2.00 | 0.50 | `local:8,ssp:1 int8` 2.08 |" in text
    assert "Near enough: `safe` in 0 and `fast` in 1 of 1." in text
    assert [cell.settings for cell in predicted_page.cells(journal)] == list(seconds)


def point_of(found: tuple[topologies.SweepPoint, ...], members: int) -> topologies.SweepPoint:
    return next(point for point in found if point.members == members and not point.network.cell)


def test_what_is_planned_of_a_topology_is_what_its_links_take() -> None:
    """4 MB around a ring of four at 100 Mbit/s: 1.5 vectors a link; at a star's middle three, both ways at once;
    latencies add up."""
    prices = ProcessorPrices({"fp32": CodecPrice(0.0, 0.0)}, NO_WORK)
    point = point_of(topologies.BY_MEMBERS, 4)
    ring_s, star_s = (point.planned_s(name, prices) for name in ("ring", "star:0"))
    assert ring_s == pytest.approx(1.5 * 4e6 * 8 / 100e6, rel=0.02)
    assert star_s == pytest.approx(3 * 4e6 * 8 / 100e6, rel=0.1)
    near, far = topologies.BY_LATENCY[0], topologies.BY_LATENCY[-1]
    later_s = far.planned_s("ring", prices) - near.planned_s("ring", prices)
    assert later_s == pytest.approx(6 * 2 * (25.0 - 2.5) / 1000, rel=0.05)


def test_the_page_of_topologies_says_how_far_the_plan_is_off(tmp_path: Path) -> None:
    point = topologies.BY_MEMBERS[0]
    figures = {"ring": [1.0, 2.0, 1.5], "ring, gloo's ring": [1.6], "ring, planned": [1.2]}
    journal = filled(tmp_path, (topologies.case_name(point), figures))
    text = topologies_page.page(journal)
    assert f"| {point} | 1 | 1.50 (1.20) |  |  |  |  |  | 1.60 |" in text
    assert "Of 1 measured ways 0 are within 10% of what is planned" in text
    assert topologies_page.errors_of(journal, point) == [pytest.approx(-0.2)]
    assert topologies_page.errors_of(journal, topologies.BY_MEMBERS[1]) == []


class CountedSide(Side):
    """One whose loss is how many steps it has taken."""

    def __init__(self) -> None:
        super().__init__("counted", [], [], [])
        self.taken = 3

    def turn(self, steps: int, *, profile: bool = False, alone: bool = False) -> dict[str, Any]:
        self.taken += steps
        return {}

    def held_out_loss(self) -> float:
        return float(self.taken)


def test_one_alone_takes_four_steps_where_four_take_one() -> None:
    """Points of all curves are behind as many samples, and the first is before any step."""
    assert target.curve(CountedSide(), Work("digits", 4), 2) == [3, 3 + target.EVERY, 3 + 2 * target.EVERY]
    assert target.curve(CountedSide(), Work("digits", 1), 2) == [3, 3 + 4 * target.EVERY, 3 + 8 * target.EVERY]


def test_a_choice_that_was_not_trained_has_no_loss(tmp_path: Path) -> None:
    times, (case, curves) = target_entries([3.0, 1.5, 1.0], [3.0, 1.0, 0.5])
    del curves["local:8 int8"]
    text = target_page.page(filled(tmp_path, times, (case, curves)))
    assert "| fast | `local:8 int8` | not trained |" in text
    assert "`fast` chose `local:8 int8`, which was not trained" in text


def test_the_times_of_the_target_are_measured_by_the_wifi_section() -> None:
    """Each network and model of it is a case there, so that nothing is measured twice."""
    measured = {(name, net, members) for name, net, members, _ in wifi.MEASURED}
    assert {(one.paced, net, target.MEMBERS) for one in target.TRAINED for net in target.NETS} <= measured


def test_a_prediction_is_judged_by_what_doing_as_it_says_would_have_cost(tmp_path: Path) -> None:
    """Two laptops, a step of 1 s alone: the first job is predicted to double the speed, and is slower than one; the
    second is predicted not to pay, and is faster; a third is what it was predicted to be."""
    mesh = predicted.MESHES[0]
    named = {str(job): (1.2, 1.2) for job in mesh.jobs}
    first, second, third = list(named)[:3]
    named |= {first: (1.0, 2.5), second: (4.0, 1.0), third: (1.25, 1.25)}
    figures: Figures = {"alone": [1.0]}
    for name, (planned_s, measured_s) in named.items():
        figures |= {name: [measured_s], f"{name}, planned": [planned_s]}
    journal = filled(tmp_path, (predicted.case_name(mesh), figures))
    found = {cell.settings: cell for cell in predicted_page.cells(journal)}
    assert found[first].error == pytest.approx(-0.6)
    assert found[first].lost_by_the_word == pytest.approx(0.2)
    assert found[second].lost_by_the_word == pytest.approx(0.5)
    assert found[third].lost_by_the_word == 0.0
    assert predicted_page.regret(list(found.values())) == pytest.approx(1 - 0.8 / 2.0)
    text = predicted_page.page(journal)
    assert f"| `{first}` | 2.50 s | 1.00 s | -60.0% | 0.80 | 2.00 |" in text
    assert "| error of a step, median | 0.0% | 5% | **met** |" in text
    assert "| error of a step, nine of ten are below | 300.0% | 15% | not met |" in text
    assert f"`{second}`) | 50.0% | 5% | not met |" in text


def test_of_the_grid_each_settings_count_once(tmp_path: Path) -> None:
    """`auto` may choose what was measured under its own name already: that is one prediction, not two."""
    entries = [(grid.ALONE, {"step_s": [0.5], "cpu_s": [0.1]})]
    for way in (grid.WAYS[0], *grid.AUTO):
        figures = {"bsp fp32": [1.0], "daemons_cpu_s": [0.1], "sent_bytes": [1.0], "planned_s": [0.9], "of_one": [2.0]}
        entries.append((grid.measured_name(50.0, way), figures))
    (found,) = predicted_page.cells(filled(tmp_path, *entries))
    assert found.of_one == pytest.approx(2.0)
    assert found.error == pytest.approx(-0.1)
    assert found.cores_used == pytest.approx(4 * (0.1 + 0.1) / 2.0)
    assert not found.shows_the_machine


def test_what_the_shared_cores_decide_is_shown_and_not_judged(tmp_path: Path) -> None:
    """Four laptops that use nine tenths of the two cores would not on cores of their own."""
    figures = {"bsp fp32": [1.0], "daemons_cpu_s": [0.4], "sent_bytes": [1.0], "planned_s": [0.5], "of_one": [2.0]}
    quiet = {**figures, "bsp fp32": [2.0], "planned_s": [2.0]}
    journal = filled(
        tmp_path,
        (grid.ALONE, {"step_s": [0.5], "cpu_s": [0.05]}),
        (grid.measured_name(50.0, grid.WAYS[0]), quiet),
        (grid.measured_name(5000.0, grid.WAYS[0]), figures),
    )
    text = predicted_page.page(journal)
    assert "| `bsp fp32` (shows the machine) | 1.00 s | 500 ms | -50.0% |" in text
    assert "| of 1 cells | found | goal | |" in text
    assert "| error of a step, median | 0.0% | 5% | **met** |" in text

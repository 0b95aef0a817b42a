"""What `meshtrain bench codecs` computes, and one short run of it."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from meshtrain.cli.commands.bench import bench
from meshtraind.bench.codec_report import CodecFigures, CodecReport
from meshtraind.bench.codecs import all_codecs, gradient, measure
from meshtraind.bench.job_round import round_cost
from meshtraind.bench.settings import BenchError
from meshtraind.bench.transforms import RESNET18, resnet_shapes
from meshwire.codecs.registry import FAMILIES, parse_codec


def figures(
    codec: str = "fp32", encoded_bytes: int = 40_000_000, encode_s: float = 0.01, add_s: float = 0.01
) -> CodecFigures:
    return CodecFigures(codec, 10_000_000, encoded_bytes, encode_s, add_s, error=0.0, memory_bytes=2**20)


def silent(_: str) -> None:
    pass


def test_it_pays_below_the_speed_at_which_the_saved_bytes_take_as_long_as_the_work() -> None:
    """10 MB less, and 20 ms more: 500 MB/s."""
    fp32 = figures()
    assert figures("fp16", 30_000_000, 0.02, 0.02).pays_below_mbit(fp32) == pytest.approx(4000)
    assert figures("free", 30_000_000, 0.005, 0.01).pays_below_mbit(fp32) is None
    assert figures("vain", 40_000_000, 0.02, 0.02).pays_below_mbit(fp32) == 0
    assert fp32.pays_below_mbit(fp32) == 0


def test_speeds_are_of_the_values_in_fp32() -> None:
    found = figures("int8", 10_000_000, 0.02, 0.01)
    assert (found.bits, found.encode_gb_s, found.add_gb_s) == pytest.approx((8, 2, 4))


def test_the_report_has_a_table_for_each_size() -> None:
    fp32 = figures()
    report = CodecReport(3, {fp32.values: fp32}, [fp32, figures("free", 10_000_000, 0.005, 0.01)])
    found = json.loads(json.dumps(report.as_json()))
    assert [each["pays_below_mbit"] for each in found["codecs"]] == [0, None]
    assert "never" in report.as_text()
    assert "any speed" in report.as_text()


def test_all_families_are_measured() -> None:
    assert {parse_codec(text).name for text in all_codecs()} == set(FAMILIES)


@pytest.mark.parametrize(("codec", "factor_rows"), [("powersgd:2,warmup=5", 2), ("powersgd:2,half,warmup=5", 1)])
def test_what_takes_whole_tensors_is_measured_on_those_of_resnet18(codec: str, factor_rows: int) -> None:
    """Bytes exactly: of both rounds, on shapes whose count is torchvision's. A round has that many rows of each factor,
    on average."""
    assert sum(map(math.prod, RESNET18)) == 11_689_512
    assert resnet_shapes(1_728 * 10)[-1] == (1_728 * 10 - 64 * 3 * 49 - 64 - 64,)
    assert resnet_shapes(11_689_512 + 64 * 3 * 49) == [*RESNET18, RESNET18[0]]
    (found,) = measure([codec], [200_000], 1, silent).figures
    factors, whole = 0, 0
    for shape in resnet_shapes(200_000):
        rows, columns = shape[0], math.prod(shape[1:])
        if len(shape) > 1 and 2 * 2 * (rows + columns) < rows * columns:
            factors += rows + columns
        else:
            whole += math.prod(shape)
    assert found.encoded_bytes == pytest.approx(4 * (factor_rows * factors + whole), rel=0.02)  # and padding
    assert found.codec == codec
    assert 0 < found.error < 1
    assert found.encode_s > 0 < found.add_s
    assert 0 < found.memory_bytes < 4 * 2**20


@pytest.mark.parametrize("codec", ["lgc", "lgc:0.02,conv"])
def test_what_builds_on_what_rounds_have_announced_is_measured_too(codec: str) -> None:
    (found,) = measure([codec], [200_000], 1, silent).figures
    assert 0 < found.encoded_bytes < 200_000
    assert 0 < found.error < 1


def test_a_gradient_has_heavy_tails_and_layers_of_different_scales() -> None:
    values = gradient(700_000)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    layers = [values[start : start + 1700].astype(np.float64) for start in (0, 2000, 40_000, 190_000)]
    scales = [float(np.median(np.abs(layer))) for layer in layers]
    assert max(scales) > 2 * min(scales)
    assert max(np.abs(layer).max() / layer.std() for layer in layers) > 8
    assert (gradient(1000) == values[:1000]).all()


def test_figures_are_those_of_the_codec() -> None:
    """Bytes exactly, errors about: 5 segments, the last one short."""
    report = measure(["fp32", "int8", "onebit"], [300_000], 1, silent)
    fp32, int8, onebit = report.figures
    assert [each.encoded_bytes for each in report.figures] == [
        sum(parse_codec(each.codec).segment_bytes_max(count) for count in [65536] * 4 + [300_000 - 4 * 65536])
        for each in report.figures
    ]
    assert fp32.error == 0
    assert 0 < int8.error < 0.1 < onebit.error < 1
    assert all(each.encode_s > 0 < each.add_s for each in report.figures)
    assert all(65536 * 4 < each.memory_bytes < 4 * 2**20 for each in report.figures)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BenchError, match="--runs 0"):
        measure(["fp32"], [1000], 0, silent)
    with pytest.raises(BenchError, match="--values 0"):
        measure(["fp32"], [0], 1, silent)
    with pytest.raises(BenchError, match="--codec: there is no codec 'zip'"):
        measure(["zip"], [1000], 1, silent)


def test_a_short_run() -> None:
    """As a user runs it: figures on stdout, progress on stderr."""
    argv = [sys.executable, "-m", "meshtraind.bench", "codecs", "--values", "1e5,2e4", "--codec", "int4", "--runs", "1"]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["codecs"]
    assert [(each["codec"], each["values"]) for each in found] == [("int4", 100_000), ("int4", 20_000)]
    assert "int4 (1 of 1), 20000 values" in done.stderr


def test_the_command_passes_on_what_is_wrong() -> None:
    app = typer.Typer()
    app.add_typer(bench, name="bench")
    argv = [sys.executable, "-m", "meshtraind.bench", "codecs", "--values", "many"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr[:21]) == (1, "error: --values many:")
    assert CliRunner().invoke(app, ["bench", "codecs", "--values", "1e3", "--codec", "zip"]).exit_code == 1


def test_a_round_is_measured_of_codecs_whose_parts_meet_whole() -> None:
    """At a shard's owner or at everybody; behind the rounds that a job begins with."""
    codecs = ["fp16", "homomorphic", "powersgd", "int8", "onebit:100", "dgc", "topk:gather"]
    measured = [each.round_s is not None for each in measure(codecs, [20_000], 1, silent).figures]
    assert {each.round_s for each in measure(codecs, [20_000], 1, silent, whole_rounds=False).figures} == {None}
    assert measured == [False, False, False, True, True, True, True]
    assert round_cost(parse_codec("topk:gather"), gradient(20_000)).sums_s > 0

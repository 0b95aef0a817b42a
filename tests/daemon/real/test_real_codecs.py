"""Real daemons and learners with codecs that go to each shard's owner and back, or to everybody."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtrain.demo.localmesh import LocalMesh
from meshwire.codecs.registry import parse_codec
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import plan_buckets
from tests.daemon import realjobs as jobs
from tests.tiers import mostly_long

ADAMW = "torch.optim.AdamW(model.parameters(), lr=0.01)"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with jobs.forked_learners(), LocalMesh(("anna", "bert", "cleo"), print) as started:
        yield started


@pytest.mark.parametrize(
    ("codec", "options"),
    mostly_long(
        [
            ("powersgd:2,min_rate=1,warmup=3", {"sync": "ssp:1"}),
            (None, {"sync": "sparseloco:2", "args": ("4",)}),
            (None, {"sync": "muloco:2", "args": ("4",)}),
            ("onebit:momentum,warmup=5", {}),
            ("onebit:warmup=5", {"sync": "ssp:2", "straggler": "wait"}),
            ("powersgd:2,min_rate=1,warmup=3", {}),
        ],
        4,
    ),
)
def test_replicas_are_bit_equal(mesh: LocalMesh, tmp_path: Path, codec: str | None, options: dict[str, Any]) -> None:
    """O9, C2: everybody decodes the owner's bytes, or adds up the same parts, under every bound."""
    dgc = codec is not None and codec.startswith("dgc")
    script = jobs.TRAIN.replace("lr=0.05", "lr=0.05, momentum=0.9") if dgc else jobs.TRAIN
    if codec == "onebit:momentum,warmup=5" or str(options.get("sync")).startswith("muloco"):
        script = jobs.TRAIN.replace("torch.optim.SGD(model.parameters(), lr=0.05)", ADAMW)
        assert ADAMW in script
    summary = jobs.run(mesh.daemons[0], tmp_path, script, codec=codec, **options)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert summary.hashes_compared >= 4


def test_sums_without_decoding_take_the_bytes_of_the_formula(mesh: LocalMesh, tmp_path: Path) -> None:
    """O9, P5: 2 (m-1) encoded vectors a round on the ring, of all members together."""
    summary = jobs.run(mesh.daemons[0], tmp_path, jobs.TRAIN, codec="homomorphic:0.1")
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    shapes = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    tensors = tuple(
        TensorSpec(name=name, shape=shape, dtype="float32", kind="parameter") for name, shape in shapes.items()
    )
    encoded = EncodedLayout(
        plan_buckets(ModelManifest(tensors=tensors, optimizer="SGD")), parse_codec("homomorphic:0.1")
    )
    sent_bytes = sum(report.metrics.payload_bytes for report in summary.ranks)
    assert sent_bytes == summary.rounds * 2 * 2 * encoded.total_bytes


def test_two_runs_are_equal_bit_by_bit(mesh: LocalMesh, tmp_path: Path) -> None:
    """R8: with fixed visibility, whatever arrives when, and with a codec that draws: its seeds are the job's."""
    weights = set()
    for _ in range(2):
        fixed = {"sync": "ssp:2", "straggler": "wait", "visibility": "fixed"}
        summary = jobs.run(mesh.daemons[0], tmp_path, jobs.TRAIN, codec="int4:sr", **fixed)
        assert summary.state == "succeeded", summary.error
        weights.add(jobs.read(mesh.daemons[0], summary.job, "output", 0, "sub/weights.txt"))
    assert len(weights) == 1


def test_a_void_round_is_taken_back_everywhere(mesh: LocalMesh, tmp_path: Path) -> None:
    """V1: also what residuals owe of it; the job goes on with equal replicas and finite weights."""
    script = jobs.TRAIN.replace(
        "optimizer.zero_grad()", "optimizer.zero_grad()\n        if mt.rank() == 2 and epoch == 0: x = x * float('nan')"
    )
    summary = jobs.run(mesh.daemons[0], tmp_path, script, codec="int8", on_nan="skip")
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert "nan" not in jobs.read(mesh.daemons[0], summary.job, "output", 0, "sub/weights.txt")

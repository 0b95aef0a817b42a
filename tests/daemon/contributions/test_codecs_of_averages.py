"""Why `--sync sma` takes few codecs: own weights have gone on when what a codec has kept is sent."""

import pytest
import torch

from meshwire.codecs.registry import parse_codec
from meshwire.sync_modes.codec_for_mode import suits
from meshwire.sync_modes.mode import sync_settings
from tests.bench.simulated_rounds import SimulatedRounds

MEMBERS = 4
SIDE = 64
MOMENTUM = 0.9  # CROSSBOW's


def spread_after(codec: str, rounds: int) -> float:
    """How far own weights are from the central model, of what they were at first, without gradients."""
    exchange = SimulatedRounds(codec, [(SIDE, SIDE)], MEMBERS, None)
    generator = torch.Generator().manual_seed(0)
    own = [torch.randn(SIDE * SIDE, generator=generator) for _ in range(MEMBERS)]
    z = before = torch.zeros(SIDE * SIDE)
    for _ in range(rounds):
        mean = torch.from_numpy(exchange.mean([(z - w).numpy() for w in own]))
        own = [w.lerp(z, 1 / MEMBERS) for w in own]
        z, before = z - mean + MOMENTUM * (z - before), z
    return max(float((w - z).norm()) for w in own) / SIDE


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "int8:sr", "int4", "int4:sr"])
def test_own_weights_and_base_come_together(codec: str) -> None:
    assert suits(sync_settings("sma:1"), parse_codec(codec))
    assert spread_after(codec, 40) < 2e-3


@pytest.mark.parametrize("codec", ["topk:0.1", "onebit", "twobit", "powersgd:4", "randomk:0.1", "qsgd"])
def test_or_do_not(codec: str) -> None:
    """With most of these codecs the distance grows without end."""
    assert not suits(sync_settings("sma:1"), parse_codec(codec))
    assert spread_after(codec, 40) > 0.1

"""Rounds of far fewer samples than those before them, as at the end of an epoch, where codecs leave something out."""

import numpy as np
import pytest

from meshwire.codecs.registry import FAMILIES, parse_codec
from tests.daemon.tcpmembers import Values, manifest_of, members, placed

EPOCH, BATCH, LAST_BATCH = 12, 64.0, 2.0
BRISK = {
    "topk": "topk:0.02",
    "dgc": "dgc:0.02,ramp=0",
    "powersgd": "powersgd:1,warmup=0",
    "lgc": "lgc:0.05,refresh=1,warmup=0,train=2",
    "homomorphic": "homomorphic:0.05",
}  # that leave out much at once
MORE = ("topk:0.02,gather", "lgc:0.05,conv,latent=4,refresh=1,warmup=0,train=2")
CODECS = sorted(
    str(codec)
    for codec in map(parse_codec, {*(BRISK.get(name, name) for name in FAMILIES), *MORE})
    if codec.error_feedback
)


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", CODECS)
async def test_a_small_last_batch_moves_the_model_no_further_than_others(codec: str) -> None:
    """P4 with weights: of |w - a|^2, with steps that plain gradient descent is far from diverging with."""
    async with members(codec, manifest_of([(24, 20), (9,)])) as two:
        optimum = placed(two.plan, np.random.default_rng(4).standard_normal(two.plan.total_values).astype(np.float32))
        model: Values = np.zeros_like(optimum)
        usual, last = list[float](), list[float]()
        for turn in range(4 * EPOCH):
            weight = BATCH if (turn + 1) % EPOCH else LAST_BATCH
            gradient = np.float32(weight) * (model - optimum)
            mean = await two.round([gradient, gradient], weight)
            assert mean is not None
            step = np.float32(0.03) * placed(two.plan, mean)
            model -= step
            (usual if weight == BATCH else last).append(float(np.linalg.norm(step)))
            assert np.linalg.norm(model - optimum) < 1.5 * np.linalg.norm(optimum)
        assert max(last) < 1.5 * max(usual)

"""LGC's linear map between chosen values and latents (ALGORITHMS section 3): P2 and P3, of each round's own places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.codecs.base import Values
from meshtraind.projection.lgc.latents import AsTheyAre, Basis, Learning, smooth_rows
from tests.daemon.codectrips import heavy

VALUES = 16  # of a block
ROUNDING = 1e-5


def there_and_back(map_: Basis | AsTheyAre, values: Values, latents: int) -> Values:
    encoded: Values = np.empty(len(values) * latents, np.float32)
    map_.encode_into(values, encoded)
    decoded, scratch = np.empty_like(values), np.empty(values.size, np.float32)
    map_.decode_into(encoded, decoded, scratch)
    return decoded


@given(latents=st.integers(1, VALUES), blocks=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), learnt=st.booleans())
def test_what_was_decoded_is_encoded_as_it_was_and_nothing_grows(
    latents: int, blocks: int, seed: int, learnt: bool
) -> None:
    """P2, P3: the rows are orthonormal, also where a basis that was heard is not, or its rows depend on others."""
    values = heavy(blocks * VALUES, seed).reshape(blocks, VALUES)
    rows = smooth_rows(latents, VALUES)
    if learnt:
        learning = Learning(latents, VALUES)
        learning.begin_round()
        learning.see(values)
        rows = np.float32(3) * learning.learnt()
    basis = Basis(rows, seed)
    once = there_and_back(basis, values, latents)
    scale = float(np.linalg.norm(values))
    assert np.linalg.norm(there_and_back(basis, once, latents) - once) <= ROUNDING * scale
    assert np.linalg.norm(values - once) <= scale * (1 + ROUNDING)


@pytest.mark.parametrize("seed", range(3))
def test_learnt_rows_leave_out_no_more_than_smooth_ones(seed: int) -> None:
    """They lose the fewest squares of what was seen (PCA)."""
    values = heavy(50 * VALUES, seed).reshape(50, VALUES)
    learning = Learning(4, VALUES)
    learning.begin_round()
    learning.see(values)
    lost = [
        np.linalg.norm(values - there_and_back(Basis(rows, 0), values, 4))
        for rows in (learning.learnt(), smooth_rows(4, VALUES))
    ]
    assert lost[0] <= lost[1] * (1 + ROUNDING)


def test_as_many_latents_as_values_are_the_values() -> None:
    values = heavy(3 * VALUES, 1).reshape(3, VALUES)
    assert there_and_back(AsTheyAre(), values, VALUES).tobytes() == values.tobytes()

"""Weight quantisers: error bounds, packing, and what the runtime's operator makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.quantise import quantise_blocks, quantise_rows


@given(st.integers(0, 1000), st.sampled_from([4, 8]))
def test_block_error_is_within_the_grid(seed: int, bits: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((3, 64)).astype(np.float32)
    packed = quantise_blocks(weight, bits)
    error = np.abs(packed.dequantise() - weight).reshape(3, 2, 32).max(-1)
    assert packed.packed.shape == (3, 2, 32 * bits // 8)
    # Clipping may trade the peak for a finer grid, never more than a fifth of it.
    assert (error <= np.abs(packed.scales) / 2 + 0.2 * np.abs(weight).max() + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_weights_stay_zero(bits: int) -> None:
    assert not quantise_blocks(np.zeros((2, 32), np.float32), bits).dequantise().any()
    assert not quantise_rows(np.zeros((2, 5), np.float32))[0].any()


def test_rows_keep_their_own_scale() -> None:
    weight = np.array([[1.0, -0.5], [1000.0, 10.0]], np.float32)
    codes, scales = quantise_rows(weight)
    np.testing.assert_allclose(codes * scales[:, None], weight, rtol=0.3, atol=4)
    assert codes[0, 0] == 127 and codes[1, 0] == 127


def test_uneven_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise_blocks(np.zeros((2, 33), np.float32), 4)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        quantise_blocks(np.zeros((2, 32), np.float32), 3)

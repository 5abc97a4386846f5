"""Weight quantisers in numpy: what the ONNX graph computes with. Not for: packing weights for storage (`delta`).

Conventions: a linear layer's weight is float32[N, K] (outputs, inputs), as in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockQuantised:
    """Blockwise weight-only quantisation in the layout of the ONNX Runtime operator `MatMulNBits`.

    packed uint8[N, K/block, block*bits/8], low bits first; scales float32[N, K/block]; the zero point is 2**(bits-1).
    """

    packed: NDArray[np.uint8]
    scales: Floats
    bits: int
    block_size: int

    def dequantise(self) -> Floats:
        """float32[N, K], exactly what the operator multiplies with."""
        codes = self.packed
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], self.block_size)
        centred = codes.astype(np.float32) - np.float32(1 << (self.bits - 1))
        return (centred * self.scales[..., None]).reshape(codes.shape[0], -1)


def quantise_blocks(weight: Floats, bits: int, block_size: int = 32) -> BlockQuantised:
    """Symmetric rounding per block of `block_size` inputs, at the clipping point with the least squared error.

    Raises: ValueError when K is no multiple of the block size or bits is neither 4 nor 8.
    """
    rows, width = weight.shape
    if width % block_size or bits not in (4, 8):
        raise ValueError(f"expected a multiple of {block_size} inputs and 4 or 8 bits, got {width} and {bits}")
    blocks = weight.reshape(rows, width // block_size, block_size).astype(np.float32)
    half = 1 << (bits - 1)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    best_scale = np.where(extreme == 0, np.float32(1), extreme / np.float32(-half)).astype(np.float32)
    best_error = _error(blocks, best_scale, half)
    for shrink in (0.95, 0.9, 0.85, 0.8) if bits == 4 else ():
        scale = np.where(extreme == 0, 1, extreme * shrink / -half).astype(np.float32)
        error = _error(blocks, scale, half)
        better = error < best_error
        best_scale, best_error = np.where(better, scale, best_scale), np.where(better, error, best_error)
    codes: NDArray[np.uint8] = (_codes(blocks, best_scale, half) + half).astype(np.uint8)
    if bits == 4:
        codes = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
    return BlockQuantised(np.ascontiguousarray(codes), best_scale.astype(np.float32), bits, block_size)


def _codes(blocks: Floats, scales: Floats, half: int) -> Floats:
    codes: Floats = np.clip(np.rint(blocks / scales[..., None]), -half, half - 1)
    return codes


def _error(blocks: Floats, scales: Floats, half: int) -> Floats:
    error: Floats = np.square(_codes(blocks, scales, half) * scales[..., None] - blocks).sum(-1)
    return error


def quantise_rows(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Symmetric int8 per row: codes int8[N, K] and scales float32[N] (embeddings, and per-channel linear layers)."""
    peak = np.abs(weight).max(axis=1)
    scales = np.where(peak == 0, 1, peak / 127).astype(np.float32)
    return np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8), scales

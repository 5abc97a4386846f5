"""The shared Gumbel noise on a torch device, bit for bit that of ``paceline.shared.noise``.

Integers are int64 with masks, since torch has no full set of uint32 operations; floating-point operations stay separate
calls, so no compiler fuses a multiplication with an addition and rounds once instead of twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from paceline.shared.noise import (
    FIRST_KNOT,
    FRACTION_BITS,
    MASK_32,
    NUM_KNOTS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    WORDS_PER_BLOCK,
    gumbel_row,
    gumbel_table,
)


class Key(NamedTuple):
    """What one row of noise depends on: a generation's seed, its choice index, and the absolute position."""

    seed: int
    choice: int
    position: int


def gumbel(keys: Sequence[Key], vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32[len(keys), vocab_size] on ``device``: one row of noise for each key, equal keys computed once."""
    unique = list(dict.fromkeys(keys))
    if device.type == "cpu":
        made = [gumbel_row(key.seed, key.position, vocab_size, key.choice) for key in unique]
        rows = torch.from_numpy(made[0][None] if len(made) == 1 else np.stack(made))
    else:
        rows = gumbel_on_device(unique, vocab_size, device)
    if len(unique) == len(keys):
        return rows
    index = {key: row for row, key in enumerate(unique)}
    return rows[torch.tensor([index[key] for key in keys], device=device)]


def gumbel_on_device(keys: Sequence[Key], vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32[len(keys), vocab_size]: every row computed by torch operations on ``device``, the CPU included."""
    words = [(key.seed & MASK_32, key.seed >> 32, key.position, key.choice) for key in keys]
    k0, k1, position, choice = torch.tensor(words, dtype=torch.int64).to(device).T[:, :, None]
    num_blocks = -(-vocab_size // WORDS_PER_BLOCK)
    c0 = torch.arange(num_blocks, device=device)[None, :]
    c1, c2, c3 = position, choice, torch.zeros_like(position)
    for _ in range(PHILOX_ROUNDS):
        # The product wraps in int64; its low and high words are right all the same once masked.
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & MASK_32) ^ c1 ^ k0, ((p0 >> 32) & MASK_32) ^ c3 ^ k1
        c1, c3 = p1 & MASK_32, p0 & MASK_32
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK_32, (k1 + PHILOX_WEYL[1]) & MASK_32
    blocks = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)
    return transform(blocks.flatten(1)[:, :vocab_size])


def transform(words: torch.Tensor) -> torch.Tensor:
    """float32, shaped like words (int64 below 2^32): the piecewise linear -log(-log u) of ``shared.noise``."""
    values, slopes = _table(words.device)
    side = -(words >> 31)
    argument = ((words ^ side) & 0x7FFFFFFF).to(torch.float32) + 0.5
    bits = argument.view(torch.int32).to(torch.int64)
    index = (side & NUM_KNOTS) + (bits >> FRACTION_BITS) - FIRST_KNOT
    fraction = (bits & ((1 << FRACTION_BITS) - 1)).to(torch.float32)
    return fraction * slopes[index] + values[index]


@lru_cache(maxsize=16)
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The knots of the piecewise linear transform on ``device``."""
    table = gumbel_table()
    return torch.from_numpy(table.values.copy()).to(device), torch.from_numpy(table.slopes.copy()).to(device)

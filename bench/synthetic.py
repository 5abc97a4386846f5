"""Recordings made of dice: a drafter of known quality, for tests and for questions like "what if it covered 90 %".

Ranks of the right token are drawn independently at each position, so a chain's expected run is that of the textbook
formula. The confidence that the drafter states is informative: higher where it is right.

Not here: real pairs (``recorder``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.bench.recording import Recording, RecordingSet, Rows

DEFAULT_HIT_RATES = (0.42, 0.11, 0.06, 0.04, 0.03, 0.03, 0.02, 0.02)
"""Chance that the right token is the first, second, ... candidate: the embedded pair's first draft."""


def synthetic(
    num_prompts: int,
    output_len: int,
    *,
    hit_rates: Sequence[float] = DEFAULT_HIT_RATES,
    prompt_len: int = 32,
    vocab_size: int = 49_152,
    seed: int = 0,
) -> RecordingSet:
    """A set in which the right token has rank i with chance ``hit_rates[i]``, and is missing otherwise."""
    rng = np.random.default_rng(seed)
    rates = np.asarray(hit_rates, np.float64)
    made = tuple(_one(rng, output_len, rates, prompt_len, vocab_size) for _ in range(num_prompts))
    return RecordingSet(made, {"pair": "synthetic", "hit_rates": [float(rate) for rate in rates], "seed": seed})


def _one(
    rng: np.random.Generator, output_len: int, rates: NDArray[np.float64], prompt_len: int, vocab_size: int
) -> Recording:
    width = len(rates)
    output = rng.integers(4, vocab_size, output_len).astype(np.int32)
    ids = _distinct(rng, output_len, width, vocab_size, output)
    logprobs = np.zeros((output_len, width), np.float32)
    for position in range(output_len):
        certainty = rng.beta(2.0, 2.0)
        # Where the drafter is sure, its first candidate is right more often; the mean over positions stays `rates`.
        first = rates[0] + (1.0 - rates[0]) * rates[0] * (certainty - 0.5)
        shares = np.concatenate([[first], rates[1:] * (1.0 - first) / max(1.0 - rates[0], 1e-9)])
        rank = int(rng.choice(width + 1, p=np.append(shares, max(0.0, 1.0 - shares.sum()))))
        if rank < width:
            ids[position, rank] = output[position]
        logprobs[position] = np.log(np.maximum(np.sort(shares)[::-1], 1e-6))
    off_ids = _distinct(rng, 256, width, vocab_size, np.full(256, -1, np.int32))
    off = Rows(off_ids, logprobs[rng.integers(0, output_len, 256)])
    prompt = rng.integers(4, vocab_size, prompt_len).astype(np.int32)
    return Recording(prompt, output, Rows(ids, logprobs), off)


def _distinct(
    rng: np.random.Generator, count: int, width: int, vocab_size: int, barred: NDArray[np.int32]
) -> NDArray[np.int32]:
    """int32[count, width]: distinct ids in each row, none of them the row's barred one."""
    rows = np.zeros((count, width), np.int32)
    for row in range(count):
        ids = rng.choice(vocab_size - 4, 2 * width, replace=False) + 4
        rows[row] = ids[ids != barred[row]][:width]
    return rows

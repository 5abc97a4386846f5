"""Recordings made of dice: a drafter of known quality, for tests and for questions like "what if it covered 90 %".

The drafter is calibrated: where it states 0.9 it is right nine times in ten. How sure it is varies from place to place,
as in real text (``spread``); with a spread of 0 every place is alike and a chain's run length is the textbook's.

Not here: real pairs (``recorder``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.bench.recording import Recording, RecordingSet, Rows
from paceline.shared.errors import ParameterError

_NUM_OFF_PATH = 256


def synthetic(
    num_prompts: int,
    output_len: int,
    *,
    top1: float = 0.5,
    coverage: float = 0.8,
    spread: float = 1.0,
    width: int = 8,
    prompt_len: int = 32,
    vocab_size: int = 49_152,
    seed: int = 0,
) -> RecordingSet:
    """A set in which the right token is the first candidate with chance ``top1`` and among all with ``coverage``.

    spread: 0 for the same certainty everywhere, 1 for anything between clueless and certain.
    Raises ``ParameterError`` unless 0 <= top1 <= coverage <= 1.
    """
    if not 0.0 <= top1 <= coverage <= 1.0:
        raise ParameterError("coverage", f"expected 0 <= top1 <= coverage <= 1, got {top1} and {coverage}")
    rng = np.random.default_rng(seed)
    made = tuple(
        _one(rng, _Shape(top1, coverage, spread, width), output_len, prompt_len, vocab_size) for _ in range(num_prompts)
    )
    return RecordingSet(made, {"pair": "synthetic", "top1": top1, "coverage": coverage, "spread": spread, "seed": seed})


class _Shape:
    """Draws what the drafter believes at a place."""

    def __init__(self, top1: float, coverage: float, spread: float, width: int) -> None:
        self._top1, self._coverage, self._spread, self.width = top1, coverage, spread, width

    def beliefs(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """float64[count, width]: chances of the candidates, descending; their mean sums to the coverage."""
        first = np.full(count, self._top1)
        if self._spread and 0.0 < self._top1 < 1.0:
            weight = 1.5 / self._spread
            first = rng.beta(weight * self._top1, weight * (1.0 - self._top1), count)
        rest_share = (self._coverage - self._top1) / max(1.0 - self._top1, 1e-9)
        decay = 0.6 ** np.arange(self.width - 1)
        rest = (1.0 - first)[:, None] * rest_share * decay / decay.sum()
        return np.concatenate([first[:, None], rest], axis=1)


def _one(rng: np.random.Generator, shape: _Shape, output_len: int, prompt_len: int, vocab_size: int) -> Recording:
    output = rng.integers(4, vocab_size, output_len).astype(np.int32)
    beliefs = shape.beliefs(rng, output_len)
    ids = _distinct(rng, shape.width, vocab_size, output)
    for place in range(output_len):
        chances = np.append(beliefs[place], max(0.0, 1.0 - beliefs[place].sum()))
        rank = int(rng.choice(shape.width + 1, p=chances / chances.sum()))
        if rank < shape.width:
            ids[place, rank] = output[place]
    barred = np.full(_NUM_OFF_PATH, -1, np.int32)
    off = _rows(_distinct(rng, shape.width, vocab_size, barred), shape.beliefs(rng, _NUM_OFF_PATH))
    prompt = rng.integers(4, vocab_size, prompt_len).astype(np.int32)
    return Recording(prompt, output, _rows(ids, beliefs), off)


def _rows(ids: NDArray[np.int32], beliefs: NDArray[np.float64]) -> Rows:
    """Best first, whatever the dice made of the order; unbelievable candidates are left out."""
    order = np.argsort(-beliefs, axis=1, kind="stable")
    sorted_beliefs = np.take_along_axis(beliefs, order, axis=1)
    with np.errstate(divide="ignore"):
        logprobs = np.log(sorted_beliefs).astype(np.float32)
    return Rows(np.take_along_axis(ids, order, axis=1), logprobs)


def _distinct(rng: np.random.Generator, width: int, vocab_size: int, barred: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32[len(barred), width]: distinct ids in each row, none of them the row's barred one."""
    rows = np.zeros((len(barred), width), np.int32)
    for row, one in enumerate(barred.tolist()):
        ids = np.unique(rng.integers(4, vocab_size, 4 * width))
        rows[row] = rng.permutation(ids[ids != one])[:width]
    return rows

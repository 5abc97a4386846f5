"""How often a draft model has the target's next token among its first candidates, along text that the target wrote.

One pass of the draft graph over each text, no tree. Not here: what trees get accepted (``lockstep``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.runtime import Candidates, GraphRunner
from paceline.shared.noise import gumbel
from paceline.shared.sampling import SamplingParams

_CHUNK_LEN = 128
_SLOTS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Positions, and at how many of them the token was the first, or among the first five."""

    num_positions: int = 0
    num_first: int = 0
    num_five: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            self.num_positions + other.num_positions, self.num_first + other.num_first, self.num_five + other.num_five
        )

    @property
    def top1(self) -> float:
        """Share of positions."""
        return self.num_first / max(1, self.num_positions)

    @property
    def top5(self) -> float:
        """Share of positions."""
        return self.num_five / max(1, self.num_positions)


class CoverageMeter:
    """Runs a draft graph over texts; keeps one buffer for each size."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._runners: dict[int, GraphRunner] = {}

    def measure(self, prompt: NDArray[np.int32], output: NDArray[np.int32], sampling: SamplingParams) -> Coverage:
        """Coverage of ``output``; candidates are ranked with the shared noise where the output was sampled."""
        text = np.concatenate([prompt, output[:-1]]).astype(np.int64)
        size = next((size for size in _SLOTS if size >= len(text)), len(text))
        if size not in self._runners:
            self._runners = {size: GraphRunner(self._model, size)}
        runner = self._runners[size]
        runner.crop(0)
        parts = [runner.append(text[at : at + _CHUNK_LEN]) for at in range(0, len(text), _CHUNK_LEN)]
        first = len(prompt) - 1
        ids = np.concatenate([part.ids for part in parts])[first:]
        logprobs = np.concatenate([part.logprobs for part in parts])[first:]
        ranked = _rank(Candidates(ids, logprobs), len(prompt), sampling)
        hits = ranked[:, :5] == output[:, None]
        return Coverage(len(output), int(hits[:, 0].sum()), int(hits.any(1).sum()))


def _rank(candidates: Candidates, position: int, sampling: SamplingParams) -> NDArray[np.int32]:
    if sampling.is_greedy or sampling.seed is None:
        return candidates.ids
    scores = candidates.logprobs.astype(np.float64) / sampling.temperature
    for row, ids in enumerate(candidates.ids):
        scores[row] += gumbel(sampling.seed, position + row, ids)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(candidates.ids, order, axis=1)

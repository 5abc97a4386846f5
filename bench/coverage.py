"""How often a draft model has the target's next token among its first candidates, along text that the target wrote.

One pass of the draft graph over each text, no tree. Not here: what trees get accepted (``lockstep``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import Candidates
from paceline.client.drafting.ranking import Ranking, Situation, make_ranking
from paceline.models.runtime import GraphRunner
from paceline.shared.sampling import SamplingParams

_CHUNK_LEN = 128
_SCORED_LEN = 8
"""Positions of the output in one pass: each wants tokens of its own to be scored as well."""
_MANY = 5
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

    def __init__(self, model: bytes, vocab_size: int) -> None:
        """vocab_size: of the target."""
        self._model = model
        self._vocab_size = vocab_size
        self._runners: dict[int, GraphRunner] = {}

    def measure(self, prompt: NDArray[np.int32], output: NDArray[np.int32], sampling: SamplingParams) -> Coverage:
        """Coverage of ``output``; candidates are ranked as in a session with these parameters."""
        text = np.concatenate([prompt, output[:-1]]).astype(np.int64)
        size = next((size for size in _SLOTS if size >= len(text)), len(text))
        if size not in self._runners:
            self._runners = {size: GraphRunner(self._model, size)}
        runner = self._runners[size]
        runner.crop(0)
        first = len(prompt) - 1
        for at in range(0, first, _CHUNK_LEN):
            runner.append(text[at : min(at + _CHUNK_LEN, first)], want_all=False)
        ranking = make_ranking(sampling.default_verifier(), sampling, vocab_size=self._vocab_size)
        ranks = [
            self._ranks(runner, ranking, text[at : at + _SCORED_LEN], at, output[at - first : at - first + _SCORED_LEN])
            for at in range(first, len(text), _SCORED_LEN)
        ]
        found = np.concatenate(ranks)
        return Coverage(len(output), int((found == 0).sum()), int((found < _MANY).sum()))

    @staticmethod
    def _ranks(
        runner: GraphRunner, ranking: Ranking, ids: NDArray[np.int64], at: int, wanted: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """int64[n]: the rank of each wanted token behind each of ``ids``, which begin at position ``at``; ``_MANY`` for
        one that is not among the first."""
        positions = at + 1 + np.arange(len(ids))
        extra_ids = ranking.extra_ids(positions)
        answer = runner.append(ids, extra_ids=extra_ids.astype(np.int64))
        candidates = Candidates(answer.ids, answer.logprobs)
        if runner.takes_extra:
            candidates = candidates.with_extra(extra_ids, answer.extra)
        limits = np.full(len(ids), _MANY, np.int32)
        ranked = ranking.rank(candidates, Situation(positions, np.ones(len(ids)), limits, 0.0))
        ranks = np.full(len(ids), _MANY)
        for row in range(len(ids)):
            hits = np.flatnonzero(ranked.tokens[ranked.rows == row] == wanted[row])
            if len(hits):
                ranks[row] = hits[0]
        return ranks

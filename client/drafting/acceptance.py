"""What drafters' confidence is worth: the chance that a candidate comes true, calibrated online.

A drafter's own probability is a prior. Every commit labels the candidates along the path, sent or not: the committed
one is a hit, its siblings are misses. Counts are kept per drafter, depth and confidence bucket and shrink towards
coarser ones, so that a handful of labels already unmasks a drafter that is always wrong:

    skill of a drafter   hits / what its priors promised
    bucket               hits / trials among equally confident candidates, shrunk towards skill * prior
    cell                 the same at about equal depth, shrunk towards its bucket

Counts fade, so the estimate follows a text that changes its nature. Not here: what chances are used for (``policy``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.live_tree import Labels

MAX_DRAFTERS = 8
_EDGES = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
_CENTRES = np.array([0.005, 0.014, 0.032, 0.07, 0.14, 0.26, 0.42, 0.57, 0.72, 0.85, 0.94, 0.985])
_NUM_BUCKETS = len(_CENTRES)
_DEPTH_EDGES = np.array([2, 4])
_NUM_DEPTHS = len(_DEPTH_EDGES) + 1
_SKILL_WEIGHT = 2.0
_BUCKET_WEIGHT = 6.0
_CELL_WEIGHT = 12.0
_MAX_SKILL = 1.5
_MAX_CHANCE = 0.995


class Acceptance:
    """Counts for one verifier. Cheap to keep: it outlives a generation, so the next one starts informed."""

    def __init__(self, fade: float = 0.998) -> None:
        """fade: factor on all counts at each commit."""
        shape = (MAX_DRAFTERS, _NUM_DEPTHS, _NUM_BUCKETS)
        self._hits = np.zeros(shape)
        self._trials = np.zeros(shape)
        self._fade = fade

    def estimate(
        self, drafter: int, depths: NDArray[np.int32], priors: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Chances float64[k] and calibration cells int32[k] of candidates with these depths and priors."""
        buckets = np.searchsorted(_EDGES, priors, side="right")
        places = np.searchsorted(_DEPTH_EDGES, depths, side="left")
        hits, trials = self._hits[drafter], self._trials[drafter]
        base = np.minimum(self.skill(drafter) * priors, _MAX_CHANCE)
        pooled_hits, pooled_trials = hits.sum(0)[buckets], trials.sum(0)[buckets]
        pooled = (_BUCKET_WEIGHT * base + pooled_hits) / (_BUCKET_WEIGHT + pooled_trials)
        chances = (_CELL_WEIGHT * pooled + hits[places, buckets]) / (_CELL_WEIGHT + trials[places, buckets])
        cells = np.ravel_multi_index((np.full(len(buckets), drafter), places, buckets), self._hits.shape)
        return np.minimum(chances, _MAX_CHANCE), cells.astype(np.int32)

    def skill(self, drafter: int) -> float:
        """Hits in units of what the drafter's own probabilities promised; 1 before anything is known."""
        promised = float((self._trials[drafter].sum(0) * _CENTRES).sum())
        hits = float(self._hits[drafter].sum())
        return min(_MAX_SKILL, (_SKILL_WEIGHT + hits) / (_SKILL_WEIGHT + promised))

    def learn(self, labels: Labels) -> None:
        """Take in what one commit taught."""
        if not len(labels.cells):
            return
        self._hits *= self._fade
        self._trials *= self._fade
        np.add.at(self._trials.reshape(-1), labels.cells, 1.0)
        np.add.at(self._hits.reshape(-1), labels.cells[labels.hits], 1.0)

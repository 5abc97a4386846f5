"""From a target's input embedding to rows of a draft's head, for tokens outside the draft's vocabulary.

The head starts as the target's output rows and training moves them; where input and output rows are tied, one linear
map takes the embedding to the trained head (for the embedded draft it explains 94 % of the variance). Through that map
the draft has an opinion on every token of the target, at no training and no storage. Sampled text needs it: at
temperature 1, 12 % of the embedded target's mass lies outside the 8,192 tokens that it writes most.

Not here: asking for those tokens (``paceline.client.drafting.ranking`` does, where the noise favours them).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_RIDGE = 1e-2
_LEAST_EXPLAINED = 0.5


def fit_bridge(embedding: Floats, head: Floats, vocabulary: NDArray[np.int32]) -> Floats | None:
    """float32[d, d], M with head ~ embedding[vocabulary] @ M by ridge regression.

    embedding float32[V, d]; head float32[Vd, d]; vocabulary int32[Vd]. None if the head holds every token, or if M
    explains less than half of the head's variance (input and output rows that were never tied).
    """
    if len(vocabulary) >= len(embedding):
        return None
    rows = embedding[vocabulary].astype(np.float64)
    gram = rows.T @ rows
    gram += _RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    bridge = np.linalg.solve(gram, rows.T @ head)
    left = np.square(head - rows @ bridge).sum()
    total = np.square(head - head.mean(axis=0)).sum()
    if total <= 0.0 or 1.0 - left / total < _LEAST_EXPLAINED:
        return None
    fitted: Floats = bridge.astype(np.float32)
    return fitted

"""Sampling parameters acting on one row of log-probabilities, in numpy: a drafter's candidates, or a whole vocabulary.

A draft only has to guess what the target will choose, so a drafter applies the user's parameters to its own candidates
with the same rules. Order and ties as everywhere (DESIGN.md section 6): logit bias, penalties, temperature, top-k,
top-p, min-p, ties to the lowest id. The server's version for many rows on a device is ``paceline.server.warp``.

Not here: ``min_tokens``, which needs the model's end-of-text ids: mask them before calling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.shared.sampling import SamplingParams

_TOLERANCE = 1e-6
"""A cut that misses its bound by rounding alone counts as reaching it."""


def warp(
    token_ids: ArrayLike, logits: ArrayLike, sampling: SamplingParams, prompt: ArrayLike = (), output: ArrayLike = ()
) -> NDArray[np.float64]:
    """float64[k]: log-probabilities of the given tokens after all parameters, -inf for those that are ruled out.

    token_ids: int[k], distinct. logits: float[k], log q or logits up to a constant; NaN counts as -inf. prompt, output:
    the ids before this position; ``output`` includes the node's own path. At temperature 0 the likeliest token alone
    remains. If nothing is possible all entries are -inf.
    """
    ids = np.asarray(token_ids, np.int64)
    scores = np.array(logits, np.float64)
    scores[np.isnan(scores)] = -np.inf
    scores = _penalised(ids, scores, sampling, np.asarray(prompt, np.int64), np.asarray(output, np.int64))
    order = np.lexsort((ids, -scores))
    if not len(order) or scores[order[0]] == -np.inf:
        return np.full(len(ids), -np.inf)
    ranked = scores[order] - scores[order[0]]
    if sampling.is_greedy:
        kept = 1
    else:
        ranked = ranked / sampling.temperature
        kept = _num_kept(ranked, sampling)
    warped = np.full(len(ids), -np.inf)
    warped[order[:kept]] = ranked[:kept] - np.log(np.exp(ranked[:kept]).sum())
    return warped


def _penalised(
    ids: NDArray[np.int64],
    scores: NDArray[np.float64],
    sampling: SamplingParams,
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
) -> NDArray[np.float64]:
    for token, bias in sampling.logit_bias.items():
        scores[ids == token] += bias
    if sampling.repetition_penalty != 1.0:
        factor = sampling.repetition_penalty
        seen = np.isin(ids, prompt) | np.isin(ids, output)
        scores = np.where(seen, np.where(scores > 0, scores / factor, scores * factor), scores)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        tokens, counts = np.unique(output, return_counts=True)
        place = np.searchsorted(tokens, ids).clip(max=max(len(tokens) - 1, 0))
        times = np.where(tokens[place] == ids, counts[place], 0) if len(tokens) else np.zeros(len(ids))
        scores = scores - sampling.presence_penalty * (times > 0) - sampling.frequency_penalty * times
    return scores


def _num_kept(ranked: NDArray[np.float64], sampling: SamplingParams) -> int:
    """How many of the tokens stay; ranked: float64[k], descending, 0 first."""
    kept = min(sampling.top_k or len(ranked), len(ranked))
    mass = np.exp(ranked[:kept])
    if sampling.top_p < 1.0:
        reached = np.cumsum(mass) >= (sampling.top_p - _TOLERANCE) * mass.sum()
        kept = int(np.argmax(reached)) + 1
    if sampling.min_p > 0.0:
        kept = min(kept, int((ranked[:kept] >= np.log(sampling.min_p) - _TOLERANCE).sum()))
    return kept

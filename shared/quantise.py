"""The sparse, quantised q of multi-step speculative sampling (mss), and the draws from it.

A client in mss mode may only draw children from a distribution that the verifier knows to the bit, so q is cut to its
likeliest tokens and rounded to integer weights out of 4,096, a power of two: the float64 probabilities are exact, and
both sides hold the same ones. Children are drawn from these weights, never from the unrounded q.

Not here: the bytes (``wire``), and where log q comes from (client drafting).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.shared.errors import WireError
from paceline.shared.messages import Proposal

WEIGHT_TOTAL = 4096
"""What the weights of one proposal sum to."""
MAX_SUPPORT = 64
"""Tokens in one proposal at most."""
_ID_BYTES = 2
"""An ascending id as a varint of its difference; a third byte is rare below 2^16 ids."""
_MAX_WIDE_WEIGHTS = WEIGHT_TOTAL >> 7
"""Weights that need a second varint byte, at most: those of 128 and more."""
_NODE_BYTES = 5
_FRAME_OVERHEAD_BYTES = 48
_PROPOSAL_OVERHEAD_BYTES = 5


def quantised(token_ids: ArrayLike, logprobs: ArrayLike, k: int) -> Proposal:
    """Cut q to its k likeliest tokens (ties to the lowest id) and round it to weights out of ``WEIGHT_TOTAL``.

    token_ids: int[m], distinct. logprobs: float[m], log q up to a constant; NaN counts as impossible. 1 <= k.
    Rounds by largest remainder, so the weights sum exactly; a token whose weight rounds to 0 leaves the support.

    Raises ``ValueError`` if no token is possible.
    """
    ids = np.asarray(token_ids, np.int64)
    logits = np.nan_to_num(np.asarray(logprobs, np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    order = np.lexsort((ids, -logits))[: min(k, MAX_SUPPORT)]
    ids, logits = ids[order], logits[order]
    if not len(ids) or logits[0] == -np.inf:
        raise ValueError("expected at least one possible token in a proposal, got none")
    mass = np.exp(logits - logits[0])
    exact = mass / mass.sum() * WEIGHT_TOTAL
    weights = np.floor(exact).astype(np.int64)
    short = WEIGHT_TOTAL - int(weights.sum())
    weights[np.argsort(weights - exact, kind="stable")[:short]] += 1
    kept = weights > 0
    ids, weights = ids[kept], weights[kept]
    ascending = np.argsort(ids)
    return from_weights(ids[ascending], weights[ascending])


def from_weights(token_ids: ArrayLike, weights: ArrayLike) -> Proposal:
    """The proposal of these ids and integer weights.

    Raises ``WireError`` unless ids are strictly ascending, at least 0 and at most ``MAX_SUPPORT`` many, and weights are
    at least 1 and sum to ``WEIGHT_TOTAL``.
    """
    ids = np.asarray(token_ids, np.int64)
    integers = np.asarray(weights, np.int64)
    _check(ids, integers)
    return Proposal(ids.astype(np.int32), integers / WEIGHT_TOTAL)


def weights_of(proposal: Proposal) -> NDArray[np.int64]:
    """int64[k]: the integer weights of a quantised proposal.

    Raises ``WireError`` if the proposal is not in the form that ``from_weights`` accepts.
    """
    scaled = np.asarray(proposal.probs, np.float64) * WEIGHT_TOTAL
    weights = np.rint(scaled)
    if not np.array_equal(weights, scaled):
        raise WireError(f"expected the probabilities of a proposal to be multiples of 1/{WEIGHT_TOTAL}")
    integers = weights.astype(np.int64)
    _check(np.asarray(proposal.token_ids, np.int64), integers)
    return integers


def _check(ids: NDArray[np.int64], weights: NDArray[np.int64]) -> None:
    if ids.ndim != 1 or ids.shape != weights.shape or not 1 <= len(ids) <= MAX_SUPPORT:
        raise WireError(f"expected 1..{MAX_SUPPORT} tokens with one weight each, got {ids.shape} and {weights.shape}")
    if ids[0] < 0 or ids[-1] > np.iinfo(np.int32).max or (np.diff(ids) <= 0).any():
        raise WireError("expected the token ids of a proposal to be int32 and strictly ascending")
    if weights.min() < 1 or weights.max() > WEIGHT_TOTAL or int(weights.sum()) != WEIGHT_TOTAL:
        raise WireError(f"expected weights of at least 1 that sum to {WEIGHT_TOTAL}, got a sum of {int(weights.sum())}")


def support_size(num_parents: int, num_nodes: int = 32, frame_bytes: int = 2048) -> int:
    """How many tokens each of ``num_parents`` proposals may hold so that their grow frame keeps to ``frame_bytes``."""
    room = frame_bytes - _FRAME_OVERHEAD_BYTES - _NODE_BYTES * num_nodes
    per_parent = room // max(1, num_parents) - _PROPOSAL_OVERHEAD_BYTES
    all_wide, few_wide = per_parent // (_ID_BYTES + 2), (per_parent - _MAX_WIDE_WEIGHTS) // (_ID_BYTES + 1)
    return max(1, min(MAX_SUPPORT, max(all_wide, few_wide)))


def draw(proposal: Proposal, count: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """int32[min(count, k)]: distinct token ids in drawing order, child j from q restricted to what is left.

    Draws integers against integer weights, so the probabilities are exact. Every drawn token must become a node, in
    this order: leaving one out would bias the output (DESIGN.md section 6).
    """
    weights: list[int] = weights_of(proposal).tolist()
    left = WEIGHT_TOTAL
    drawn: list[int] = []
    for _ in range(min(count, len(weights))):
        index = bisect_right(list(accumulate(weights)), int(rng.integers(left)))
        drawn.append(int(proposal.token_ids[index]))
        left -= weights[index]
        weights[index] = 0
    return np.array(drawn, np.int32)

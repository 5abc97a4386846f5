"""From the tokens that followed a match to guesses: one rule for the present text and for earlier ones.

The more often and the more recently a token followed, the better; a longer match is trusted more. Not here: finding
matches (``ngram``, ``history_index``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Context = tuple[int, ...]
Guesses = list[tuple[int, float]]
"""(token, confidence), best first."""

CONFIDENCE = {2: 0.25, 3: 0.45, 4: 0.6, 6: 0.75, 9: 0.85}
"""By the number of tokens that match."""
MAX_GUESSES = 3
MAX_OCCURRENCES = 6
_RECENCY = 0.7


@dataclass(frozen=True, slots=True)
class Match:
    """order: how many tokens of the context's end were found, 0 for none. guesses: what may follow."""

    order: int
    guesses: Guesses


NO_MATCH = Match(0, [])


def rank_followers(followers: Iterable[int], order: int, trust: float = 1.0) -> Guesses:
    """Guesses from what followed a match of that order, the latest first. trust: factor on the confidence."""
    weights: dict[int, float] = {}
    weight, total = 1.0, 0.0
    for token in followers:
        weights[token] = weights.get(token, 0.0) + weight
        total += weight
        weight *= _RECENCY
    ranked = sorted(weights.items(), key=lambda item: -item[1])[:MAX_GUESSES]
    return [(token, trust * CONFIDENCE[order] * share / total) for token, share in ranked]

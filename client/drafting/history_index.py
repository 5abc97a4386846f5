"""What followed these tokens in earlier conversations: sorted hashes of their n-grams, looked up by bisection.

Built once from all that is kept (about 80 ms for 250,000 tokens), read-only afterwards, so threads may share it. 12
bytes per token and order. A lookup costs two bisections an order, however much is kept. Not here: the file
(``paceline.client.history``), the text of the generation itself (``ngram``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.followers import MAX_OCCURRENCES, NO_MATCH, Context, Match, rank_followers

ORDERS = (3, 4, 6, 9)
"""Two tokens recur everywhere in so much text: they say too little."""
_TRUST = 0.7
"""What a match elsewhere is worth of one in the same text; ``acceptance`` learns the rest."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class HistoryIndex:
    """See the module's text. ``num_tokens``: how many it holds."""

    def __init__(self, conversations: Sequence[NDArray[np.int32]], vocab_size: int) -> None:
        """conversations: int32 ids each, oldest first; those with ids that the target does not have are left out."""
        fitting = [tokens for tokens in conversations if len(tokens) and int(tokens.max()) < vocab_size]
        self._tokens = np.concatenate([np.zeros(0, np.int32), *fitting])
        numbers = np.repeat(np.arange(len(fitting)), [len(tokens) for tokens in fitting])
        self.num_tokens = len(self._tokens)
        self._hashes: dict[int, NDArray[np.uint64]] = {}
        self._places: dict[int, NDArray[np.uint32]] = {}
        hashes = np.zeros(self.num_tokens, np.uint64)
        for order in range(1, min(ORDERS[-1], self.num_tokens - 1) + 1):
            # hashes[i] covers the `order` tokens before place i, the nearest first.
            hashes[order:] = (
                hashes[order:] * np.uint64(_FACTOR) + self._tokens[:-order].astype(np.uint64) + np.uint64(1)
            )
            if order in ORDERS:
                places = order + np.flatnonzero(numbers[order:] == numbers[:-order])
                by_hash = np.argsort(hashes[places], kind="stable")
                self._hashes[order] = hashes[places][by_hash]
                self._places[order] = places[by_hash].astype(np.uint32)

    def find(self, context: Context, longer_than: int = 0) -> Match:
        """The longest known end of ``context``, if it is longer than that, and what followed it, latest first."""
        hashes = _hashes_of(context)
        for order in reversed(ORDERS):
            if order <= longer_than:
                break
            if order > len(context) or order not in self._hashes:
                continue
            known, wanted = self._hashes[order], np.uint64(hashes[order])
            end = int(np.searchsorted(known, wanted, side="right"))
            begin = max(int(np.searchsorted(known, wanted, side="left")), end - MAX_OCCURRENCES)
            if begin < end:
                followers = self._tokens[self._places[order][begin:end][::-1]].tolist()
                return Match(order, rank_followers(followers, order, _TRUST))
        return NO_MATCH


def _hashes_of(context: Context) -> list[int]:
    """The hash of the last k tokens at index k."""
    hashes = [0]
    for token in reversed(context[-ORDERS[-1] :]):
        hashes.append((hashes[-1] * _FACTOR + token + 1) & _MASK)
    return hashes

"""Prompt lookup: what followed the last time these words stood here?

The text so far (prompt and output) is indexed by its n-grams; the longest one that ends a node's path and occurred
before names what followed it, most recent first. Earlier conversations are looked up too, for who opted in: the longer
match wins, and the present text on a tie. Costs a few look-ups per token and node, so it runs anywhere. Its guesses are
point masses with a confidence that grows with the length of the match; ``acceptance`` learns what it is worth on the
present text.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.client.drafting.drafter import ANCHOR_KEY, NO_LOGPROB, Candidates, DraftRequest, DraftSequence
from paceline.client.drafting.followers import (
    CONFIDENCE,
    MAX_OCCURRENCES,
    NO_MATCH,
    Context,
    Guesses,
    Match,
    rank_followers,
)
from paceline.client.drafting.history_index import HistoryIndex

_ORDERS = tuple(sorted(CONFIDENCE))
_LONGEST = _ORDERS[-1]


class NGramIndex:
    """Occurrences of every n-gram of a growing text, for the orders above, as chains from the latest backwards."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[Context, int] = {}
        self._earlier: dict[int, list[int]] = {order: [] for order in _ORDERS}

    def append(self, token: int) -> None:
        """Add a token: it is what follows each n-gram that ends before it. O(1)."""
        place = len(self.tokens)
        tail = tuple(self.tokens[-_LONGEST:])
        for order in _ORDERS:
            earlier = -1
            if len(tail) >= order:
                gram = tail[len(tail) - order :]
                earlier = self._latest.get(gram, -1)
                self._latest[gram] = place
            self._earlier[order].append(earlier)
        self.tokens.append(token)

    def tail(self) -> Context:
        """The end of the text, as long as any order needs it."""
        return tuple(self.tokens[-_LONGEST:])

    def find(self, context: Context) -> Match:
        """The longest known end of ``context`` and what may follow it."""
        for order in reversed(_ORDERS):
            if len(context) < order:
                continue
            place = self._latest.get(context[len(context) - order :], -1)
            if place >= 0:
                return Match(order, rank_followers(self._followers(order, place), order))
        return NO_MATCH

    def _followers(self, order: int, place: int) -> Iterator[int]:
        for _ in range(MAX_OCCURRENCES):
            if place < 0:
                return
            yield self.tokens[place]
            place = self._earlier[order][place]


class NGramDrafter:
    """Prompt-lookup drafting. No model, no memory between generations but what ``earlier`` was given."""

    def __init__(self, *, name: str = "ngram", max_context: int = 1 << 20) -> None:
        self.name = name
        self.is_instant = True
        self.max_context = max_context
        self.chunk_len = 512
        self.earlier: HistoryIndex | None = None

    def start(self) -> DraftSequence:
        return NGramSequence(self)

    def close(self) -> None:
        self.earlier = None


class NGramSequence:
    """The index of one generation, and the end of the path of every node that was asked about."""

    def __init__(self, drafter: NGramDrafter) -> None:
        self._drafter = drafter
        self._index = NGramIndex()
        self._contexts: dict[int, Context] = {}

    def expand(self, request: DraftRequest) -> Candidates:
        for token in request.token_ids[len(self._index.tokens) - request.start :].tolist():
            self._index.append(token)
        if len(self._contexts) > 2 * len(request.alive_keys) + 64:
            alive = set(request.alive_keys.tolist())
            self._contexts = {key: context for key, context in self._contexts.items() if key in alive}
        rows = [self._guesses(self._index.tail())] if request.wants_anchor else []
        nodes = zip(request.keys.tolist(), request.tokens.tolist(), request.parent_keys.tolist(), strict=True)
        for key, token, parent_key in nodes:
            above = self._index.tail() if parent_key == ANCHOR_KEY else self._contexts[parent_key]
            context = (*above, token)[-_LONGEST:]
            self._contexts[key] = context
            rows.append(self._guesses(context))
        return _table(rows)

    def _guesses(self, context: Context) -> Guesses:
        here = self._index.find(context)
        earlier = self._drafter.earlier
        if earlier is None or here.order == _LONGEST:
            return here.guesses
        return earlier.find(context, longer_than=here.order).guesses or here.guesses

    def close(self) -> None:
        self._contexts.clear()


def _table(rows: list[Guesses]) -> Candidates:
    width = max((len(row) for row in rows), default=0)
    token_ids = np.zeros((len(rows), width), np.int32)
    logprobs = np.full((len(rows), width), NO_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        for column, (token, confidence) in enumerate(row):
            token_ids[place, column] = token
            logprobs[place, column] = np.log(confidence)
    return Candidates(token_ids, logprobs, is_point_mass=True)

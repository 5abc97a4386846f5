"""The drafter's side of the contract between session and drafters: requests in, candidates out.

A *drafter* is anything that proposes tokens: an ONNX draft model, an n-gram index, a deliberately wrong one. It holds
one ``DraftSequence`` for each generation. The session decides which nodes to expand; the sequence only answers what may
come after them. Sequences are used by one thread at a time and hold no clock.

Not here: ranking and sending (``ranking``, ``policy``), threads (the stream driver).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ANCHOR_KEY = -1
"""Stands for the anchor (last committed token) where a key is expected, and for "no node" on a committed path."""
NO_LOGPROB = np.float32(-np.inf)
"""Marks a place in ``Candidates`` that holds no candidate."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One call to one drafter: first what became final since the last call, then the nodes to expand.

    start: position of ``token_ids[0]``: the number of tokens that this sequence holds, or one less, if the anchor is
        asked for once more (the repeated token is the same).
    token_ids: int32[c], tokens committed since the last request (the prompt first, in chunks).
    path_keys: int64[c], the key of the node that each committed token was, or ``ANCHOR_KEY``: a drafter that expanded
        that node already holds its KV.
    alive_keys: int64[m], ascending, the nodes that still hang below the anchor: all others may be forgotten.
    keys, tokens, parent_keys, depths: int64[n], int32[n], int64[n], int32[n], the nodes to expand. Parents precede
        children; a parent is the anchor, was expanded before, or is in this request. Depth 1 is a child of the anchor.
    wants_anchor: whether row 0 of the answer is the anchor's (the last of ``token_ids``). Otherwise only nodes are
        answered: the anchor was expanded before, or ``token_ids`` is a chunk that does not reach it.
    width: most candidates per row that the session has use for.
    extra_ids: int32[x], distinct tokens that may well be chosen at these positions however unlikely they are. A drafter
        that can score any token adds them to the candidates of every row; others need not care.
    """

    drafter: int
    start: int
    token_ids: NDArray[np.int32]
    path_keys: NDArray[np.int64]
    alive_keys: NDArray[np.int64]
    keys: NDArray[np.int64]
    tokens: NDArray[np.int32]
    parent_keys: NDArray[np.int64]
    depths: NDArray[np.int32]
    wants_anchor: bool
    width: int
    extra_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def committed_len(self) -> int:
        """Number of committed tokens that the sequence holds after this request."""
        return self.start + len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of the answer: the anchor, if wanted, and the nodes."""
        return int(self.wants_anchor) + len(self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What may follow each row of a request.

    token_ids: int32[r, K], target token ids. logprobs: float32[r, K], natural log of the drafter's probability at
    temperature 1, ``NO_LOGPROB`` where a row has fewer than K; descending, extra tokens behind the others.
    is_point_mass: the drafter states guesses with a confidence, not a distribution that could be sampled (n-gram).
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    is_point_mass: bool = False

    @classmethod
    def empty(cls, num_rows: int, *, is_point_mass: bool = False) -> Candidates:
        """No candidate for any row."""
        return cls(np.zeros((num_rows, 0), np.int32), np.zeros((num_rows, 0), np.float32), is_point_mass)

    def with_extra(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Candidates:
        """With further tokens beside each row's own: int32[x], distinct, for all rows, and float32[r, x]. A token that
        a row has already keeps the log-probability that it had."""
        if not len(ids) or not self.token_ids.size:
            return self
        columns = np.full(int(max(self.token_ids.max(), ids.max())) + 1, -1, np.intp)
        columns[ids] = np.arange(len(ids))
        rows, places = np.nonzero(columns[self.token_ids] >= 0)
        fresh = logprobs.copy()
        fresh[rows, columns[self.token_ids[rows, places]]] = NO_LOGPROB
        token_ids = np.concatenate([self.token_ids, np.broadcast_to(ids, fresh.shape)], axis=1)
        return Candidates(token_ids, np.concatenate([self.logprobs, fresh], axis=1), self.is_point_mass)


class DraftSequence(Protocol):
    """A drafter's state for one generation."""

    def expand(self, request: DraftRequest) -> Candidates:
        """Take over the committed tokens, then answer the request's rows."""
        ...

    def close(self) -> None:
        """Give buffers back. The sequence is not used afterwards."""
        ...


class Drafter(Protocol):
    """Something that proposes tokens for any number of generations.

    name: for people and for ``--drafter``. is_instant: so fast (tens of microseconds) that it may run on an event loop.
    max_context: tokens that a sequence can hold, nodes included. chunk_len: most committed tokens in one request.
    """

    @property
    def name(self) -> str: ...
    @property
    def is_instant(self) -> bool: ...
    @property
    def max_context(self) -> int: ...
    @property
    def chunk_len(self) -> int: ...

    def start(self) -> DraftSequence:
        """A fresh sequence that holds no tokens."""
        ...

    def close(self) -> None:
        """Free everything. Sequences are closed before."""
        ...


def find_keys(keys: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each key stands in an ascending array (int64[k]), and whether it is there at all (bool[k])."""
    places = np.minimum(np.searchsorted(among, keys), max(0, len(among) - 1))
    found: NDArray[np.bool_] = among[places] == keys if len(among) else np.zeros(len(keys), np.bool_)
    return places, found

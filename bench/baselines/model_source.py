"""A draft model as a source of candidates for the baselines' trees: the real counterpart of a recording.

Nodes are known by their path, the tokens from the anchor down. What was computed below a path that is committed keeps
its KV, as in a client. A draft may also grow below a path that is only guessed to be accepted (``ahead_of``).

Not here: when trees are grown (``real_waiting``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.bench.baselines.shapes import Draft
from paceline.bench.playback import OFF_PATH
from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, Drafter, DraftRequest
from paceline.client.trace import DraftCall
from paceline.shared.tree import ANCHOR

Path = tuple[int, ...]
_LEAST_LOGPROB = -1e30


class ModelSource:
    """One generation. Implements ``Source``. Used by one thread at a time.

    calls: what was asked, with times of ``perf_counter``. truth: what was committed while a draft grows below a guessed
    path: if that is another one, the draft ends before its next call.
    """

    def __init__(self, drafter: Drafter, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.calls: list[DraftCall] = []
        self.truth: Path | None = None
        self._sequence = drafter.start()
        self._chunk_len = drafter.chunk_len
        self._keys = [ANCHOR_KEY] * len(self.tokens)
        self._num_synced = 0
        self._nodes: dict[Path, int] = {}
        self._next_key = 0
        self._base: Path = ()

    def read_prompt(self) -> None:
        """Compute the prompt's KV, all but the last token."""
        self._read(len(self.tokens) - 1)

    def _read(self, end: int) -> None:
        """Tokens up to a position, in chunks."""
        while self._num_synced < end:
            count = min(self._chunk_len, end - self._num_synced)
            self._expand(count, [], wants_anchor=False, width=1)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens became final. Nodes that hang below them live on; all others are forgotten."""
        path = tuple(tokens)
        self._keys += [self._nodes.get(path[: depth + 1], ANCHOR_KEY) for depth in range(len(path))]
        self.tokens += tokens
        self._nodes = {
            node[len(path) :]: key
            for node, key in self._nodes.items()
            if len(node) > len(path) and node[: len(path)] == path
        }
        self._base = ()
        self.truth = None

    def ahead_of(self, path: Path) -> None:
        """The next draft hangs below this path, which is not committed."""
        self._base = path

    def step(self, place: int, token: int) -> int:
        """See ``Source.step``: nobody knows what is right."""
        del place, token
        return OFF_PATH

    def below(self, draft: Draft, level: Sequence[int], width: int) -> list[list[tuple[int, float]]]:
        """See ``Source.below``."""
        if self.truth is not None and self._base not in ((), self.truth):
            return [[] for _ in level]
        paths = [self._base + path_of(draft, node) for node in level]
        scores = [0.0 if node == ANCHOR else draft.scores[node] for node in level]
        wants_anchor = paths == [()]
        nodes = [] if wants_anchor else self._with_ancestors(paths)
        self._read(len(self.tokens) - self._chunk_len)
        answer = self._expand(len(self.tokens) - self._num_synced, nodes, wants_anchor=wants_anchor, width=width)
        rows = [0] if wants_anchor else [nodes.index(path) for path in paths]
        return [_options(answer, row, score) for row, score in zip(rows, scores, strict=True)]

    def _with_ancestors(self, paths: Sequence[Path]) -> list[Path]:
        """The paths and those nodes above them that were never computed, parents first."""
        wanted = {path[:depth] for path in paths for depth in range(1, len(path))} - self._nodes.keys()
        return sorted(wanted | set(paths), key=len)

    def _expand(self, count: int, nodes: Sequence[Path], *, wants_anchor: bool, width: int) -> Candidates:
        start = self._num_synced
        if wants_anchor and not count:
            start, count = start - 1, 1
        end = start + count
        alive = np.array(sorted(self._nodes.values()), np.int64)
        fresh = range(self._next_key, self._next_key + len(nodes))
        self._next_key += len(nodes)
        self._nodes.update(zip(nodes, fresh, strict=True))
        request = DraftRequest(
            drafter=0,
            start=start,
            token_ids=np.array(self.tokens[start:end], np.int32),
            path_keys=np.array(self._keys[start:end], np.int64),
            alive_keys=alive,
            keys=np.array(fresh, np.int64),
            tokens=np.array([path[-1] for path in nodes], np.int32),
            parent_keys=np.array([self._nodes[path[:-1]] if path[1:] else ANCHOR_KEY for path in nodes], np.int64),
            depths=np.array([len(path) for path in nodes], np.int32),
            wants_anchor=wants_anchor,
            width=width,
        )
        self._num_synced = end
        asked_at = time.perf_counter()
        answer = self._sequence.expand(request)
        num_rows = int(np.count_nonzero(request.path_keys == ANCHOR_KEY)) + len(nodes)
        self.calls.append(DraftCall(0, num_rows, asked_at, time.perf_counter()))
        return answer

    def close(self) -> None:
        """Give buffers back."""
        self._sequence.close()


def path_of(draft: Draft, node: int) -> Path:
    """The tokens from the anchor down to a node."""
    tokens: list[int] = []
    while node != ANCHOR:
        tokens.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(tokens))


def _options(answer: Candidates, row: int, above: float) -> list[tuple[int, float]]:
    ids: NDArray[np.int32] = answer.token_ids[row]
    pairs = zip(ids.tolist(), answer.logprobs[row].tolist(), strict=True)
    return [(token, above + logprob) for token, logprob in pairs if logprob > _LEAST_LOGPROB]

"""Many token trees below one anchor, drafted and scored together: what the comparison of verifiers needs.

Trees of different verifiers share most of their paths. The drafter is asked once for each path, and the target scores
the union of all trees in one forward pass, so the same logits decide every verifier.

Not here: which trees to compare, and what they yield (``verifiers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.client.drafting.drafter import ANCHOR_KEY, NO_LOGPROB, Candidates, DraftRequest, DraftSequence
from paceline.client.drafting.ranking import CANDIDATE_WIDTH, Ranking, Situation
from paceline.server.batch import Batch, Segment
from paceline.server.target import Target
from paceline.shared.messages import Proposal
from paceline.shared.tree import ANCHOR, TokenTree

Path = tuple[int, ...]
WIDTH = CANDIDATE_WIDTH
"""Candidates asked for per row: as many as a session asks for."""
MAX_CHILDREN = 8
_NO_TOKENS = np.zeros(0, np.int32)
ExtraIds = Callable[[int], NDArray[np.int32]]
"""Position -> the tokens that a model should be asked about there as well (coupled)."""
_NO_KEYS = np.zeros(0, np.int64)


class DraftedText:
    """A drafter's sequence at one anchor of a text after another, answering for any path below the anchor."""

    def __init__(self, sequence: DraftSequence, chunk_len: int) -> None:
        self._sequence = sequence
        self._chunk_len = chunk_len
        self._held = 0
        self._known: dict[Path, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        self._keys: dict[Path, int] = {}
        self._extra_ids: ExtraIds = lambda position: _NO_TOKENS

    def move_to(self, token_ids: NDArray[np.int32], extra_ids: ExtraIds | None = None) -> None:
        """Make the last of ``token_ids`` the anchor; they extend what was given before."""
        self._extra_ids = extra_ids or (lambda position: _NO_TOKENS)
        while True:
            stop = min(self._held + self._chunk_len, len(token_ids))
            last = stop == len(token_ids)
            new = token_ids[self._held : stop]
            rows = self._ask(self._held, new, _NO_KEYS, [], wants_anchor=last)
            self._held = stop
            if last:
                break
        self._keys = {}
        self._known = {(): (rows.token_ids[0], rows.logprobs[0])}

    def candidates(self, paths: Sequence[Path]) -> Candidates:
        """One row for each path. Every path's parent was asked for before."""
        missing = sorted({path for path in paths if path not in self._known}, key=lambda path: (len(path), path))
        if missing:
            alive = np.sort(np.array(list(self._keys.values()), np.int64))
            rows = self._ask(self._held, _NO_TOKENS, alive, missing, wants_anchor=False)
            for path, ids, logprobs in zip(missing, rows.token_ids, rows.logprobs, strict=True):
                self._known[path] = ids, logprobs
        return _table([self._known[path] for path in paths])

    def _ask(
        self,
        start: int,
        tokens: NDArray[np.int32],
        alive: NDArray[np.int64],
        paths: Sequence[Path],
        *,
        wants_anchor: bool,
    ) -> Candidates:
        parents = np.array([self._keys[path[:-1]] if len(path) > 1 else ANCHOR_KEY for path in paths], np.int64)
        depths = np.array([len(path) for path in paths], np.int32)
        asked = {0} if wants_anchor else set(depths.tolist())
        extra = [self._extra_ids(start + len(tokens) + depth) for depth in sorted(asked)]
        first = len(self._keys)
        self._keys.update({path: first + index for index, path in enumerate(paths)})
        return self._sequence.expand(
            DraftRequest(
                drafter=0,
                start=start,
                token_ids=tokens,
                path_keys=np.full(len(tokens), ANCHOR_KEY, np.int64),
                alive_keys=alive,
                keys=np.arange(first, first + len(paths), dtype=np.int64),
                tokens=np.array([path[-1] for path in paths], np.int32),
                parent_keys=parents,
                depths=depths,
                wants_anchor=wants_anchor,
                width=WIDTH,
                extra_ids=np.unique(np.concatenate([_NO_TOKENS, *extra])),
            )
        )


def _table(rows: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> Candidates:
    """Rows of different lengths, filled up with places that hold no candidate."""
    width = max(len(ids) for ids, _ in rows)
    token_ids = np.zeros((len(rows), width), np.int32)
    logprobs = np.full((len(rows), width), NO_LOGPROB, np.float32)
    for place, (ids, values) in enumerate(rows):
        token_ids[place, : len(ids)], logprobs[place, : len(ids)] = ids, values
    return Candidates(token_ids, logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """A tree with the path and the rank among its siblings of each node, and the q of each row in mss."""

    tree: TokenTree
    paths: tuple[Path, ...]
    ranks: NDArray[np.int32]
    proposals: dict[int, dict[int, Proposal]] = field(default_factory=dict)

    def take(self, nodes: NDArray[np.int64]) -> Drafted:
        """The tree of some nodes, ascending, parents included."""
        rows = {0: 0} | {int(node) + 1: row + 1 for row, node in enumerate(nodes)}
        kept = {rows[row]: q for row, q in self.proposals.items() if row in rows}
        return Drafted(self.tree.take(nodes), tuple(self.paths[node] for node in nodes), self.ranks[nodes], kept)

    def narrowed(self, depth: int, width: int) -> Drafted:
        """Without all that hangs below siblings of rank ``width`` and later at one depth."""
        keep = np.ones(len(self.tree), np.bool_)
        for node, parent in enumerate(self.tree.parents.tolist()):
            beyond = self.tree.depths[node] == depth and self.ranks[node] >= width
            keep[node] = not beyond and (parent == ANCHOR or keep[parent])
        return self.take(np.flatnonzero(keep))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A tree to grow: at most widths[d] children for each node at depth d, chosen by ``ranking``.

    max_nodes: keep this many, the likeliest by the ranking's own priors (which in mss depend on q and rank alone, never
    on the drawn tokens), and expand nothing less likely. None keeps all.
    """

    ranking: Ranking
    widths: Sequence[int]
    max_nodes: int | None = None


def grow(text: DraftedText, plans: Sequence[Plan], position: int) -> list[Drafted]:
    """One tree for each plan below the anchor of ``text``, all drafted together: one call for each level.

    position: of the token that the anchor's children propose.
    """
    growing = [_Growing(plan, position) for plan in plans]
    while paths := [path for one in growing for path in one.wanted]:
        text.candidates(paths)
        for one in growing:
            if one.wanted:
                one.take(text.candidates(one.wanted))
    return [one.finish() for one in growing]


class _Growing:
    """One tree while it grows level by level. wanted: the paths whose candidates it needs next, none when done."""

    def __init__(self, plan: Plan, position: int) -> None:
        self._plan = plan
        self._position = position
        self._depth = 0
        self._paths: list[Path] = []
        self._parents: list[int] = []
        self._ranks: list[int] = []
        self._odds: list[float] = []
        self._proposals: dict[int, dict[int, Proposal]] = {}
        self._level = [ANCHOR]
        self.wanted: list[Path] = [()]

    def take(self, candidates: Candidates) -> None:
        """Hang the children of the level that was wanted."""
        level, plan, first = self._level, self._plan, len(self._paths)
        level_odds = np.array([self._odds[node] if node != ANCHOR else 1.0 for node in level])
        limits = np.full(len(level), plan.widths[self._depth], np.int32)
        positions = np.full(len(level), self._position + self._depth)
        ranked = plan.ranking.rank(candidates, Situation(positions, level_odds, limits, 0.0))
        self._proposals |= {level[row] + 1: {0: q} for row, q in ranked.proposals.items()}
        rank, last_row = 0, -1
        for row, token, prior in zip(ranked.rows.tolist(), ranked.tokens.tolist(), ranked.priors.tolist(), strict=True):
            rank = rank + 1 if row == last_row else 0
            last_row = row
            self._paths.append((*self.wanted[row], token))
            self._parents.append(level[row])
            self._ranks.append(rank)
            self._odds.append(float(level_odds[row]) * prior)
        self._level = list(range(first, len(self._paths)))
        if plan.max_nodes is not None and len(self._paths) > plan.max_nodes:
            floor = np.sort(self._odds)[-plan.max_nodes]
            self._level = [node for node in self._level if self._odds[node] > floor]
        self._depth += 1
        self.wanted = [self._paths[node] for node in self._level] if self._depth < len(plan.widths) else []

    def finish(self) -> Drafted:
        """The tree, cut to its budget."""
        tokens = np.array([path[-1] for path in self._paths], np.int32)
        tree = TokenTree(tokens, np.array(self._parents, np.int32))
        grown = Drafted(tree, tuple(self._paths), np.array(self._ranks, np.int32), self._proposals)
        max_nodes = self._plan.max_nodes
        if max_nodes is None or len(self._paths) <= max_nodes:
            return grown
        best = np.argsort(-np.array(self._odds), kind="stable")[:max_nodes]
        return grown.take(np.sort(best))


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The target's logits, float32[R, V], after the anchor (row 0) and every path of a forest."""

    logits: torch.Tensor
    row_of: Mapping[Path, int]

    def rows(self, drafted: Drafted) -> NDArray[np.int64]:
        """int64[n+1]: the rows of one tree, the anchor's first."""
        return np.array([0, *(self.row_of[path] for path in drafted.paths)], np.int64)


class ScoredText:
    """A target at one anchor of a text after another."""

    def __init__(self, target: Target, sequence: int = 0) -> None:
        self._target = target
        self._sequence = sequence
        self._cached = 0
        target.pool.open(sequence, np.zeros(1, np.int32))

    def close(self) -> None:
        """Give the KV back."""
        self._target.pool.free(self._sequence)

    def score(self, token_ids: NDArray[np.int32], trees: Sequence[Drafted]) -> Scored:
        """Move the anchor to the last of ``token_ids`` and run the union of the trees."""
        union: dict[Path, int] = {}
        for drafted in trees:
            for path in drafted.paths:
                union.setdefault(path, len(union))
        tokens = np.array([path[-1] for path in union], np.int32)
        parents = np.array([union[path[:-1]] if len(path) > 1 else ANCHOR for path in union], np.int32)
        tree = TokenTree(tokens, parents)
        order = tree.depth_first()
        row_of = {path: int(row) for path, row in zip(union, np.argsort(order) + 1, strict=True)}
        pending = token_ids[self._cached :]
        segment = Segment(self._sequence, self._cached, pending, tree.take(order))
        if not self._target.pool.reserve(self._sequence, self._cached + segment.num_rows):
            raise MemoryError(f"expected room for {segment.num_rows} more slots in the KV pool")
        logits = self._target.forward(Batch((segment,)))
        self._target.pool.commit(self._sequence, self._cached, range(len(pending)))
        self._cached = len(token_ids)
        return Scored(logits, row_of)

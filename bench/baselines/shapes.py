"""The trees that other systems draft, grown from a recording, with the calls of the draft model that each one costs.

    Chain       k tokens, one call each: classic speculative decoding (Leviathan et al., arXiv 2211.17192)
    Expansion   the static tree <k1,...,km>: SpecInfer section 3 (arXiv 2305.09781)
    BestFirst   level by level the likeliest nodes, within a budget: SpecEdge (arXiv 2505.17052), after SpecExec

A shape grows over a *source* of candidates: a recording (``paceline.bench.playback``) or a draft model
(``model_source``).

Not here: when trees are sent and verified (``waiting``, ``real_waiting``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.bench.costs import DraftTime
from paceline.bench.playback import OFF_PATH, Oracle
from paceline.shared.tree import ANCHOR, TokenTree


@dataclass(slots=True)
class Draft:
    """A tree below one place of the output. places[i]: the place behind node i, or ``OFF_PATH``.

    scores: summed log-probabilities from the anchor down. calls: rows of each call of the draft model, in order.
    """

    place: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, source: Source, parent: int, token: int, score: float) -> int:
        """One more node; returns its index."""
        above = self.place if parent == ANCHOR else self.places[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self.places.append(source.step(above, token))
        self.scores.append(score)
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        """1 for a child of the anchor."""
        depth = 0
        while node != ANCHOR:
            node = self.parents[node]
            depth += 1
        return depth

    @property
    def likeliest_leaf(self) -> int:
        """The leaf with the highest score, the first of equals. Raises ``ValueError`` for an empty tree."""
        leaves = sorted(set(range(len(self))) - set(self.parents))
        return max(leaves, key=lambda node: self.scores[node])

    def seconds(self, cost: DraftTime, first_rows: int = 0) -> float:
        """How long the calls take. first_rows: tokens that the draft model must read before its first answer."""
        rows = [count + (first_rows if index == 0 else 0) for index, count in enumerate(self.calls)]
        return sum(cost.at(count) for count in rows)

    def tree(self) -> TokenTree:
        """As it is sent."""
        return TokenTree(np.array(self.tokens, np.int32), np.array(self.parents, np.int32))

    def accepted(self, oracle: Oracle) -> list[int]:
        """The nodes that the target accepts, root-down."""
        path: list[int] = []
        parent, place = ANCHOR, self.place
        for node, token in enumerate(self.tokens):
            if self.parents[node] == parent and oracle.step(place, token) != OFF_PATH:
                path.append(node)
                parent, place = node, place + 1
        return path


class Source(Protocol):
    """Where candidates come from."""

    def step(self, place: int, token: int) -> int:
        """The place behind ``token`` at ``place``, ``OFF_PATH`` if it is wrong there or nobody knows."""
        ...

    def below(self, draft: Draft, level: Sequence[int], width: int) -> list[list[tuple[int, float]]]:
        """For each node of a level (or the anchor): its first candidates and their summed log-probabilities, in one
        call of the draft model.
        """
        ...


class Shape(Protocol):
    """How a tree grows below a place."""

    @property
    def name(self) -> str: ...

    def grow(self, source: Source, place: int, max_depth: int) -> Draft:
        """The whole tree. max_depth: tokens that the output may still have after the bonus token."""
        ...


@dataclass(frozen=True, slots=True)
class Chain:
    """The likeliest token again and again."""

    length: int

    @property
    def name(self) -> str:
        """For reports."""
        return f"chain-{self.length}"

    def grow(self, source: Source, place: int, max_depth: int) -> Draft:
        """See ``Shape.grow``."""
        return Expansion((1,) * self.length).grow(source, place, max_depth)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Every node at depth d-1 has k_d children."""

    widths: Sequence[int]

    @property
    def name(self) -> str:
        """For reports."""
        return f"<{','.join(str(width) for width in self.widths)}>"

    def grow(self, source: Source, place: int, max_depth: int) -> Draft:
        """See ``Shape.grow``."""
        draft = Draft(place)
        level = [ANCHOR]
        for width in list(self.widths)[:max_depth]:
            draft.calls.append(len(level))
            found = source.below(draft, level, width)
            level = [
                draft.add(source, node, token, score)
                for node, options in zip(level, found, strict=True)
                for token, score in options
            ]
        return draft


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Beams of the likeliest nodes, level by level; of all nodes the ``budget`` likeliest are kept."""

    budget: int
    depth: int
    beams: int = 8
    width: int = 8

    @property
    def name(self) -> str:
        """For reports."""
        return f"best-{self.budget}x{self.depth}"

    def grow(self, source: Source, place: int, max_depth: int) -> Draft:
        """See ``Shape.grow``."""
        draft = Draft(place)
        level = [ANCHOR]
        for _ in range(min(self.depth, max_depth)):
            if not level:
                break
            draft.calls.append(len(level))
            found = source.below(draft, level, self.width)
            fresh = [
                draft.add(source, node, token, score)
                for node, options in zip(level, found, strict=True)
                for token, score in options
            ]
            floor = self._floor(draft)
            likeliest = sorted(fresh, key=lambda node: -draft.scores[node])[: self.beams]
            level = [node for node in likeliest if draft.scores[node] >= floor]
        return self._pruned(draft, source)

    def _floor(self, draft: Draft) -> float:
        """A node below this score cannot be among the ``budget`` likeliest."""
        if len(draft) <= self.budget:
            return -np.inf
        return sorted(draft.scores, reverse=True)[self.budget - 1]

    def _pruned(self, draft: Draft, source: Source) -> Draft:
        """Scores fall along a path, so the likeliest nodes always have their parents."""
        order = sorted(range(len(draft)), key=lambda node: (-draft.scores[node], node))[: self.budget]
        kept = Draft(draft.place, calls=draft.calls)
        renumbered = {ANCHOR: ANCHOR}
        for node in sorted(order):
            parent = renumbered.get(draft.parents[node])
            if parent is not None:
                renumbered[node] = kept.add(source, parent, draft.tokens[node], draft.scores[node])
        return kept

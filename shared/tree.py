"""Token trees: what a drafter proposes and a verification step scores.

A tree hangs below an *anchor*, the last committed token, which is not a node. Nodes are numbered 0..n-1 and a parent
always precedes its children, so one forward sweep over the arrays visits parents first. Siblings stand in the order in
which their drafter ranked or drew them: the first is the most likely. Source: SpecInfer (arXiv 2305.09781), section 3.

Not here: who proposed a node and why (client drafting), and which nodes are accepted (server verification).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.shared.errors import TreeError

ANCHOR = -1
"""The parent of a node that hangs directly below the anchor."""


def _int_array(name: str, values: ArrayLike, dtype: type[np.integer]) -> NDArray[np.integer]:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TreeError(f"expected a one-dimensional array of integers for {name}, got {array.dtype}{array.shape}")
    limits = np.iinfo(dtype)
    if array.min() < limits.min or array.max() > limits.max:
        raise TreeError(f"expected {name} within {limits.min}..{limits.max}, got {array.min()}..{array.max()}")
    return array.astype(dtype)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A validated token tree.

    tokens: int32[n], the token that each node proposes, >= 0.
    parents: int32[n], the parent's index, smaller than the node's own, or -1 for the anchor.
    drafters: uint8[n], which drafter proposed the node (0 where there is one drafter).

    Raises ``TreeError`` for other shapes or types, a negative token, a parent that does not precede its child (which
    excludes self parents, forward parents and cycles) or one below -1.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    drafters: NDArray[np.uint8] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        tokens = _int_array("tokens", self.tokens, np.int32)
        parents = _int_array("parents", self.parents, np.int32)
        given = np.zeros(len(tokens), np.uint8) if self.drafters is None else self.drafters
        drafters = _int_array("drafters", given, np.uint8)
        if not len(tokens) == len(parents) == len(drafters):
            sizes = f"{len(tokens)} tokens, {len(parents)} parents, {len(drafters)} drafters"
            raise TreeError(f"expected one parent and one drafter per token, got {sizes}")
        if len(tokens):
            if tokens.min() < 0:
                raise TreeError(f"expected tokens of at least 0, got {tokens.min()}")
            wrong = np.flatnonzero((parents < ANCHOR) | (parents >= np.arange(len(parents))))
            if len(wrong):
                node = int(wrong[0])
                raise TreeError(f"expected a parent in -1..{node - 1} for node {node}, got {parents[node]}")
        for name, array in (("tokens", tokens), ("parents", parents), ("drafters", drafters)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        pairs = ((self.tokens, other.tokens), (self.parents, other.parents), (self.drafters, other.drafters))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def empty(cls) -> Self:
        """The tree without nodes: a plain decoding step."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.int32))

    @classmethod
    def chain(cls, tokens: ArrayLike) -> Self:
        """One path: node i hangs below node i-1. The shape of classic speculative decoding."""
        array = _int_array("tokens", tokens, np.int32)
        return cls(array, np.arange(-1, len(array) - 1, dtype=np.int32))  # type: ignore[arg-type]

    @classmethod
    def from_expansion(cls, widths: Sequence[int], tokens: ArrayLike | None = None) -> Self:
        """The static tree <k1,...,km> of SpecInfer section 3: every node at depth d-1 has k_d children.

        Nodes are numbered level by level, the children of one parent side by side. ``tokens`` (int[n], in that order)
        fills them in; without it node i proposes token i, which is enough to reason about shapes.
        """
        if any(width < 1 for width in widths):
            raise TreeError(f"expected expansion widths of at least 1, got {list(widths)}")
        parents: list[NDArray[np.int32]] = []
        level = np.array([ANCHOR], np.int32)
        count = 0
        for width in widths:
            parents.append(np.repeat(level, width))
            level = np.arange(count, count + len(parents[-1]), dtype=np.int32)
            count += len(level)
        all_parents = np.concatenate(parents) if parents else np.zeros(0, np.int32)
        return cls(np.arange(count, dtype=np.int32) if tokens is None else tokens, all_parents)  # type: ignore[arg-type]

    @classmethod
    def merge(cls, trees: Sequence[Self]) -> Self:
        """SpecInfer Definition 3.2: the smallest tree that contains every path of every given tree.

        A path that several trees share becomes one path; its nodes keep the drafter of the first tree that has them.
        Nodes appear in the order of the trees, so the first tree's siblings stay ahead.
        """
        index: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        drafters: list[int] = []
        for tree in trees:
            merged: list[int] = []
            rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.drafters.tolist(), strict=True)
            for token, parent, drafter in rows:
                under = ANCHOR if parent == ANCHOR else merged[parent]
                node = index.setdefault((under, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(under)
                    drafters.append(drafter)
                merged.append(node)
        return cls(tokens, parents, drafters)  # type: ignore[arg-type]

    @cached_property
    def depths(self) -> NDArray[np.int32]:
        """int32[n]: 1 for a child of the anchor, one more than its parent for every other node."""
        depths = np.zeros(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent == ANCHOR else depths[parent] + 1
        return depths

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool[n, n]: row i is True at i and at every ancestor of i (the topology-aware causal mask among nodes)."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ANCHOR:
                mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> list[int]:
        """Indices from the anchor's child down to ``node``, both included."""
        nodes = []
        while node != ANCHOR:
            nodes.append(node)
            node = int(self.parents[node])
        return nodes[::-1]

    def paths(self) -> list[list[int]]:
        """Every path from the anchor to a leaf, as node indices root-down, leaves in index order."""
        leaves = np.setdiff1d(np.arange(len(self)), self.parents)
        return [self.path(int(leaf)) for leaf in leaves]

    def children(self) -> list[list[int]]:
        """n+1 lists: row 0 the anchor's children, row i+1 those of node i, siblings in index order."""
        rows: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents.tolist()):
            rows[parent + 1].append(node)
        return rows

    def depth_first(self) -> NDArray[np.int32]:
        """int32[n]: the nodes in depth-first order, first sibling first.

        Laid out like this the path of first siblings, the likeliest, fills the first rows, so that accepting it leaves
        its KV where it already is.
        """
        children = self.children()
        order: list[int] = []
        stack = children[0][::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(children[node + 1]))
        return np.array(order, np.int32)

    def take(self, nodes: ArrayLike) -> Self:
        """The tree of the given nodes in the given order, renumbered. Every node's parent must come before it.

        Raises ``TreeError`` if a parent is missing or comes later.
        """
        order = np.asarray(nodes, np.int64)
        renumber = np.full(len(self) + 1, -2, np.int32)
        renumber[0] = ANCHOR
        renumber[order + 1] = np.arange(len(order), dtype=np.int32)
        return type(self)(self.tokens[order], renumber[self.parents[order] + 1], self.drafters[order])

    def duplicate_sibling(self) -> int | None:
        """The first node that repeats the token of an earlier sibling of the same drafter, or None.

        Two drafters may draw the same token independently (SpecInfer Algorithm 2); one drafter may not.
        """
        seen: set[tuple[int, int, int]] = set()
        rows = zip(self.parents.tolist(), self.tokens.tolist(), self.drafters.tolist(), strict=True)
        for node, key in enumerate(rows):
            if key in seen:
                return node
            seen.add(key)
        return None

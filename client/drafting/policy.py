"""Which nodes to expand next and which candidates to send.

``StaticPolicy`` grows the fixed expansion <k1,...,km> of SpecInfer section 3. ``BestFirstPolicy`` spends each drafter
call where it is expected to yield most: it expands the likeliest unexpanded nodes, as many per call as make the call
pay, and sends every candidate that is worth its row in the server's batch.

A node that reaches the server after its position was committed can only connect deeper ones. So a node shallower than
the *lateness* (in tokens) is worth what a typical continuation keeps down to it: odds * follow^(lateness - depth).
The step in flight decides the nodes that it scores and one token more, and those before the frame arrives the tokens
down to the lateness; only a node that is still alive then takes a row. So whether it pays for its row is judged by its
odds given the ancestor with which it would be alive.

Not here: where thresholds come from (``controller``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.live_tree import ANCHOR_ROW, LiveTree
from paceline.shared.errors import ParameterError

Rows = NDArray[np.int64]
_NO_ROWS: Rows = np.zeros(0, np.int64)
_LEAST_ODDS = 3e-4
"""Odds below which a row is not worth its bytes, whatever its ancestors become."""
_MAX_CALL_ROWS = 32


@dataclass(frozen=True, slots=True)
class CallCost:
    """What one drafter call costs: base_s + per_row_s * rows seconds."""

    base_s: float = 3e-3
    per_row_s: float = 3e-4


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the session knows when it decides.

    threshold: odds from which a node pays for its row in the server's batch. lateness: tokens that the server commits
    before a fresh draft can arrive. follow: chance that the likeliest candidate comes true. max_depth: deepest useful
    node. max_nodes: how many sent nodes may be live. sends: False while speculation is off (candidates are only scored
    against what gets committed). scored_id: sent nodes with lower ids are in the step in flight. in_flight: steps
    that one round trip and a step take.
    """

    threshold: float
    lateness: float
    follow: float
    max_depth: int
    max_nodes: int
    sends: bool = True
    scored_id: int = 0
    in_flight: float = 1.0

    def values(self, depths: NDArray[np.int32], odds: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[n]: what rows of these depths and odds are worth, see the module's text."""
        ahead: NDArray[np.float64] = np.maximum(self.lateness - depths, 0.0)
        return odds * self.follow**ahead

    @property
    def least_value(self) -> float:
        """The value from which a row is sent."""
        return float(max(self.threshold * self.follow**self.lateness, _LEAST_ODDS))


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Rows to expand (int64[n], parents first) and whether the anchor is among them."""

    rows: Rows
    anchor: bool

    @property
    def is_empty(self) -> bool:
        """Nothing to do."""
        return not self.anchor and not len(self.rows)


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the next call is expected to bring: accepted tokens (an upper bound), and how long it takes."""

    gain: float
    seconds: float


class Policy(Protocol):
    """A rule for growing the tree."""

    def select(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Choice:
        """What drafter number ``drafter`` should expand in its next call."""
        ...

    def prospect(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Prospect:
        """What the call that ``select`` would make is worth."""
        ...

    def max_children(self, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32[n]: how many candidates to keep below nodes of these depths (0: the anchor)."""
        ...

    def send(self, tree: LiveTree, conditions: Conditions) -> Rows:
        """Unsent rows to send now, the most useful first; parents were sent, or are among them and come first."""
        ...


def _expandable(tree: LiveTree, drafter: int, max_depth: int) -> NDArray[np.bool_]:
    fresh = (tree.expanded & np.uint8(1 << drafter)) == 0
    allowed: NDArray[np.bool_] = fresh & tree.sent & (tree.depths < max_depth)
    return allowed


def _with_ancestors(tree: LiveTree, rows: Rows, drafter: int) -> Rows:
    """The rows and those ancestors that the drafter has not expanded, ascending (so parents come first)."""
    wanted = set(rows.tolist())
    for row in rows.tolist():
        parent = int(tree.parents[row])
        while parent != ANCHOR_ROW and parent not in wanted and not tree.expanded[parent] & (1 << drafter):
            wanted.add(parent)
            parent = int(tree.parents[parent])
    return np.array(sorted(wanted), np.int64)


def _connected(tree: LiveTree, rows: Rows) -> Rows:
    """Those rows that reach the anchor through sent rows and each other."""
    ok = np.zeros(len(tree) + 1, np.bool_)
    ok[0] = True
    ok[1:] = tree.sent
    depths = tree.depths[rows]
    for depth in np.unique(depths):
        level = rows[depths == depth]
        ok[level + 1] = ok[tree.parents[level] + 1]
    kept: Rows = rows[ok[rows + 1]]
    return kept


class StaticPolicy:
    """The expansion configuration <k1,...,km>: every node at depth d-1 gets its drafter's k_d best candidates."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Raises ``ParameterError`` for no level or a width below 1."""
        if not widths or min(widths) < 1:
            raise ParameterError("expansion", f"expected at least one width of at least 1, got {list(widths)}")
        self._widths = np.array(widths, np.int32)

    def max_children(self, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        inside = np.minimum(depths, len(self._widths) - 1)
        return np.where(depths < len(self._widths), self._widths[inside], 0).astype(np.int32)

    def select(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Choice:
        del cost
        bit = 1 << drafter
        if not tree.anchor_expanded & bit:
            return Choice(_NO_ROWS, anchor=True)
        max_depth = min(len(self._widths), conditions.max_depth)
        rows = np.flatnonzero(_expandable(tree, drafter, max_depth))
        if not len(rows) or not conditions.sends or int(tree.sent.sum()) >= conditions.max_nodes:
            return Choice(_NO_ROWS, anchor=False)
        level = rows[tree.depths[rows] == tree.depths[rows].min()]
        return Choice(_with_ancestors(tree, level, drafter), anchor=False)

    def prospect(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Prospect:
        choice = self.select(tree, drafter, conditions, cost)
        count = len(choice.rows) + choice.anchor
        return Prospect(np.inf if count else 0.0, cost.base_s + cost.per_row_s * count)

    def send(self, tree: LiveTree, conditions: Conditions) -> Rows:
        if not conditions.sends:
            return _NO_ROWS
        rows = np.flatnonzero(~tree.sent & (tree.depths <= conditions.max_depth))
        return _connected(tree, rows[: max(0, conditions.max_nodes - int(tree.sent.sum()))])


class BestFirstPolicy:
    """Dynamic growth within a node budget, see the module's text."""

    def __init__(self, max_children: int = 16, max_call_rows: int = _MAX_CALL_ROWS) -> None:
        self._max_children = max_children
        self._max_call_rows = max_call_rows

    def max_children(self, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.full(len(depths), self._max_children, np.int32)

    def select(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Choice:
        anchor = not tree.anchor_expanded & (1 << drafter)
        rows, _ = self._rank(tree, drafter, conditions, cost)
        return Choice(_with_ancestors(tree, rows, drafter) if len(rows) else rows, anchor)

    def prospect(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Prospect:
        rows, gain = self._rank(tree, drafter, conditions, cost)
        if not tree.anchor_expanded & (1 << drafter):
            return Prospect(1.0, cost.base_s + cost.per_row_s)
        return Prospect(gain, cost.base_s + cost.per_row_s * len(rows))

    def _rank(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> tuple[Rows, float]:
        """The rows whose expansion yields most per second, and what they may yield together."""
        if not conditions.sends or int(tree.sent.sum()) >= conditions.max_nodes:
            return _NO_ROWS, 0.0
        rows = np.flatnonzero(_expandable(tree, drafter, conditions.max_depth))
        open_mass = np.maximum(1.0 - tree.child_mass()[rows + 1], 0.0)
        # A candidate below a row is worth at most this much; so is the call that finds it.
        gains = conditions.values(tree.depths[rows] + 1, tree.odds[rows] * open_mass)
        worth = self._worth(tree, conditions)[rows] * open_mass >= 1.0
        rows, gains = rows[worth], gains[worth]
        if not len(rows):
            return _NO_ROWS, 0.0
        order = np.argsort(-gains, kind="stable")[: self._max_call_rows]
        total_gain = np.cumsum(gains[order])
        seconds = cost.base_s + cost.per_row_s * np.arange(1, len(order) + 1)
        count = int(np.argmax(total_gain / seconds)) + 1
        return rows[order[:count]], float(total_gain[count - 1])

    def _worth(self, tree: LiveTree, conditions: Conditions) -> NDArray[np.float64]:
        """float64[n]: what each row is worth in units of what it must be, see the module's text."""
        standing = np.ones(len(tree) + 1)
        # Rows that are decided before a fresh one can be scored: those in the step in flight, and some behind them.
        left = np.full(len(tree) + 1, 1 + int(conditions.lateness))
        is_scored = tree.sent & (tree.ids < conditions.scored_id)
        for depth in range(1, int(tree.depths.max(initial=0)) + 1):
            level = np.flatnonzero((tree.depths == depth) & ~is_scored)
            above = tree.parents[level] + 1
            is_decided = left[above] > 0
            left[level + 1] = np.maximum(left[above] - 1, 0)
            standing[level + 1] = standing[above] * np.where(is_decided, 1.0, tree.chances[level])
        standing = standing[1:]
        return np.minimum(standing / conditions.threshold, tree.odds / _LEAST_ODDS)

    def send(self, tree: LiveTree, conditions: Conditions) -> Rows:
        room = conditions.max_nodes - int(tree.sent.sum())
        if not conditions.sends or room <= 0:
            return _NO_ROWS
        values = conditions.values(tree.depths, tree.odds)
        wanted = ~tree.sent & (tree.depths <= conditions.max_depth) & (self._worth(tree, conditions) >= 1.0)
        rows = _connected(tree, np.flatnonzero(wanted))
        # What is sent while this frame and the answer to it are under way grows below it, and needs room as well.
        room = math.ceil(room / (2.0 * conditions.in_flight - 1.0))
        if len(rows) > room:
            best = np.argsort(-values[rows], kind="stable")[:room]
            rows = _connected(tree, np.sort(rows[best]))
        # A server that scores some of them takes the first. Odds never rise along a path, so parents stay ahead.
        likeliest: Rows = rows[np.argsort(-tree.odds[rows], kind="stable")]
        return likeliest

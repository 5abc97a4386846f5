"""A tree policy with a fixed budget for every step: what "a tree of 32 nodes" means when pairs are compared.

The draft model is called ``num_levels`` times a step, each time for the ``width`` likeliest nodes that it has not
expanded; then the likeliest ``num_nodes`` of all candidates are sent at once. For use in lockstep, where no frame is
late. Not here: what a client does on a link (``paceline.client.drafting.policy``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.live_tree import ANCHOR_ROW, LiveTree
from paceline.client.drafting.policy import CallCost, Choice, Conditions, Prospect, Rows

_NO_ROWS: Rows = np.zeros(0, np.int64)
_LEAST_ODDS = 1e-4
_MAX_CHILDREN = 16
_LEAST_INSTANT_ODDS = 0.05
_MAX_INSTANT_CALLS = 16


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """Nodes sent a step; draft model calls a step, the anchor's included; nodes expanded in a call."""

    num_nodes: int = 32
    num_levels: int = 4
    width: int = 5


class BudgetPolicy:
    """State of one session. main: the drafter whose calls are counted; the others stand before it and are instant:
    they are asked about likely nodes as often as they have anything to say, within reason.
    """

    def __init__(self, budget: TreeBudget, main: int) -> None:
        self._budget = budget
        self._main = main
        self._num_calls = 0
        self._num_instant = 0
        self._is_sent = False

    def max_children(self, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.full(len(depths), _MAX_CHILDREN, np.int32)

    def select(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Choice:
        del cost
        if self._is_sent and not tree.sent.any():
            self._is_sent, self._num_calls, self._num_instant = False, 0, 0
        is_main = drafter == self._main
        if self._is_sent or (not is_main and self._num_instant >= _MAX_INSTANT_CALLS):
            return Choice(_NO_ROWS, anchor=False)
        anchor = not tree.anchor_expanded & (1 << drafter)
        rows = self._open_rows(tree, drafter, conditions.max_depth)
        if not is_main:
            rows = rows[tree.odds[rows] >= _LEAST_INSTANT_ODDS]
        rows = rows[np.argsort(-tree.odds[rows], kind="stable")[: self._budget.width]]
        choice = Choice(_with_ancestors(tree, rows, drafter), anchor)
        if not choice.is_empty:
            self._num_calls += is_main
            self._num_instant += not is_main
        return choice

    def prospect(self, tree: LiveTree, drafter: int, conditions: Conditions, cost: CallCost) -> Prospect:
        """Nothing: frames are never worth holding back, they leave when the tree is whole."""
        return Prospect(0.0, 1.0)

    def send(self, tree: LiveTree, conditions: Conditions) -> Rows:
        if self._is_sent or not self._num_calls:
            return _NO_ROWS
        is_whole = self._num_calls >= self._budget.num_levels
        if not is_whole and len(self._open_rows(tree, self._main, conditions.max_depth)):
            return _NO_ROWS
        # Odds fall from parents to children, so the likeliest rows are connected.
        rows = np.flatnonzero(~tree.sent & (tree.depths <= conditions.max_depth))
        room = self._budget.num_nodes - int(tree.sent.sum())
        best: Rows = np.sort(rows[np.argsort(-tree.odds[rows], kind="stable")[: max(0, room)]])
        self._is_sent = len(best) > 0
        return best

    @staticmethod
    def _open_rows(tree: LiveTree, drafter: int, max_depth: int) -> Rows:
        fresh = (tree.expanded & np.uint8(1 << drafter)) == 0
        return np.flatnonzero(fresh & (tree.depths < max_depth) & (tree.odds >= _LEAST_ODDS))


def _with_ancestors(tree: LiveTree, rows: Rows, drafter: int) -> Rows:
    """The rows and those ancestors that the drafter has not expanded, parents first."""
    wanted = set(rows.tolist())
    for row in rows.tolist():
        parent = int(tree.parents[row])
        while parent != ANCHOR_ROW and not tree.expanded[parent] & (1 << drafter):
            wanted.add(parent)
            parent = int(tree.parents[parent])
    return np.array(sorted(wanted), np.int64)

"""The client's live tree: every candidate that may still come true below the anchor, in flat arrays.

Rows stand parents first and keep that order for life, so one sweep over ascending depths visits parents first. A row
has a *key*, unique in its generation and known to drafters, and once it was sent also a wire *id*. Rows that were not
(yet) worth sending stay, because a commit that moves the anchor makes them likelier.

Not here: which rows are worth anything (``policy``) and what is known about drafters (``acceptance``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import ANCHOR_KEY, find_keys

ANCHOR_ROW = -1
UNSENT = -2
ALL_DRAFTERS = 0xFF
"""Every bit of ``expanded`` set: the row is never expanded, because its token ends the text."""

_FIELDS: tuple[tuple[str, type[np.generic]], ...] = (
    ("keys", np.int64),
    ("ids", np.int64),
    ("tokens", np.int32),
    ("parents", np.int32),
    ("depths", np.int32),
    ("chances", np.float64),
    ("odds", np.float64),
    ("expanded", np.uint8),
    ("drafters", np.uint8),
    ("cells", np.int32),
)


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """What a commit taught: calibration cells of rows whose parent is on the path, and whether each came true."""

    cells: NDArray[np.int32]
    hits: NDArray[np.bool_]
    chances: NDArray[np.float64]


class LiveTree:
    """Structure of arrays, n rows.

    keys: int64, ascending. ids: int64, ``UNSENT`` before the row was sent. tokens: int32. parents: int32 row index or
    ``ANCHOR_ROW``. depths: int32, 1 below the anchor. chances: float64, estimated probability that the row comes true
    if its parent did. odds: float64, product of the chances from the anchor down. expanded: uint8, bit i says that
    drafter i was asked for the row's children. drafters: uint8, who proposed it first. cells: int32, calibration cell.
    """

    keys: NDArray[np.int64]
    ids: NDArray[np.int64]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    chances: NDArray[np.float64]
    odds: NDArray[np.float64]
    expanded: NDArray[np.uint8]
    drafters: NDArray[np.uint8]
    cells: NDArray[np.int32]

    def __init__(self) -> None:
        self._next_key = 0
        self.anchor_expanded = 0
        self.clear()

    def __len__(self) -> int:
        return len(self.keys)

    def clear(self) -> None:
        """Drop all rows; the anchor counts as not expanded."""
        for name, dtype in _FIELDS:
            setattr(self, name, np.zeros(0, dtype))
        self.anchor_expanded = 0

    @property
    def sent(self) -> NDArray[np.bool_]:
        """bool[n]: rows that the server was told of."""
        sent: NDArray[np.bool_] = self.ids != UNSENT
        return sent

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[k]: the row of each key, ``ANCHOR_ROW`` for the anchor's, ``UNSENT`` for a key that is gone."""
        places, found = find_keys(keys, self.keys)
        rows = np.where(found, places, UNSENT)
        return np.where(keys == ANCHOR_KEY, ANCHOR_ROW, rows)

    def append(
        self,
        parents: NDArray[np.int64],
        tokens: NDArray[np.int32],
        chances: NDArray[np.float64],
        cells: NDArray[np.int32],
        drafter: int,
        *,
        is_merged: bool = True,
    ) -> int:
        """Add children; a token that its parent already has keeps its row and the higher chance (Definition 3.2).

        All arrays have one entry per child. Returns the number of new rows.
        """
        if is_merged and len(self.keys):
            mine = ((self.parents.astype(np.int64) + 1) << 32) | self.tokens
            theirs = ((parents + 1) << 32) | tokens
            order = np.argsort(mine)
            places = np.minimum(np.searchsorted(mine[order], theirs), len(mine) - 1)
            rows = order[places]
            known = mine[rows] == theirs
            if known.any():
                raised = np.maximum(self.chances[rows[known]], chances[known])
                changed = bool((raised > self.chances[rows[known]]).any())
                self.chances[rows[known]] = raised
                if changed:
                    self._refresh_odds()
                fresh = ~known
                parents, tokens, chances, cells = parents[fresh], tokens[fresh], chances[fresh], cells[fresh]
        count = len(parents)
        if not count:
            return 0
        below_anchor = parents == ANCHOR_ROW
        above = np.where(below_anchor, 0, parents)
        odds = np.ones(count) if not len(self.keys) else np.where(below_anchor, 1.0, self.odds[above])
        depths = np.zeros(count, np.int32) if not len(self.keys) else np.where(below_anchor, 0, self.depths[above])
        new = {
            "keys": np.arange(self._next_key, self._next_key + count),
            "ids": np.full(count, UNSENT),
            "tokens": tokens,
            "parents": parents,
            "depths": depths + 1,
            "chances": chances,
            "odds": odds * chances,
            "expanded": np.zeros(count),
            "drafters": np.full(count, drafter),
            "cells": cells,
        }
        self._next_key += count
        for name, dtype in _FIELDS:
            setattr(self, name, np.concatenate([getattr(self, name), new[name].astype(dtype)]))
        return count

    def _refresh_odds(self) -> None:
        for rows in self._levels():
            parents = self.parents[rows]
            self.odds[rows] = self.chances[rows] * np.where(parents == ANCHOR_ROW, 1.0, self.odds[parents])

    def _levels(self) -> list[NDArray[np.int64]]:
        depths = range(1, int(self.depths.max()) + 1 if len(self.depths) else 1)
        return [np.flatnonzero(self.depths == depth) for depth in depths]

    def child_mass(self) -> NDArray[np.float64]:
        """float64[n+1]: summed chances of the children of the anchor (entry 0) and of row i (entry i+1)."""
        mass = np.bincount(self.parents + 1, weights=self.chances, minlength=len(self) + 1)
        return mass.astype(np.float64)

    def commit(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], Labels]:
        """Make ``tokens`` (int32[c]) final: the anchor moves along them, rows off the path go.

        Returns the key of each token's row (``ANCHOR_KEY`` where there was none) and the labels of all rows beside
        and on the path.
        """
        keys = np.full(len(tokens), ANCHOR_KEY, np.int64)
        row = ANCHOR_ROW
        judged: list[NDArray[np.int64]] = []
        hits: list[NDArray[np.bool_]] = []
        for place, token in enumerate(tokens.tolist()):
            children = np.flatnonzero(self.parents == row)
            matches = self.tokens[children] == token
            judged.append(children)
            hits.append(matches)
            if not matches.any():
                row = UNSENT
                break
            row = int(children[np.argmax(matches)])
            keys[place] = self.keys[row]
        rows = np.concatenate(judged) if judged else np.zeros(0, np.int64)
        labels = Labels(
            self.cells[rows], np.concatenate(hits) if hits else np.zeros(0, np.bool_), self.chances[rows].copy()
        )
        if row == UNSENT:
            self.clear()
        elif row != ANCHOR_ROW:
            self._move_anchor(row)
        return keys, labels

    def _move_anchor(self, row: int) -> None:
        keep = np.zeros(len(self), np.bool_)
        keep[row] = True
        first = int(self.depths[row])
        for depth in range(first + 1, int(self.depths.max()) + 1):
            level = np.flatnonzero(self.depths == depth)
            parents = self.parents[level]
            keep[level] = keep[parents]
        keep[row] = False
        renumber = np.full(len(self), UNSENT, np.int64)
        rows = np.flatnonzero(keep)
        renumber[rows] = np.arange(len(rows))
        renumber[row] = ANCHOR_ROW
        self.anchor_expanded = int(self.expanded[row])
        scale = float(self.odds[row])
        for name, _ in _FIELDS:
            setattr(self, name, getattr(self, name)[rows])
        self.parents = renumber[self.parents].astype(np.int32)
        self.depths = self.depths - np.int32(first)
        if scale > 0.0:
            self.odds = self.odds / scale
        else:
            self._refresh_odds()

    def mark_expanded(self, rows: NDArray[np.int64], drafter: int, *, anchor: bool) -> None:
        """Note that a drafter is asked for the children of these rows, and of the anchor."""
        self.expanded[rows] |= np.uint8(1 << drafter)
        if anchor:
            self.anchor_expanded |= 1 << drafter

    def forget_sent(self) -> None:
        """All rows count as unsent again: another server, or a new generation number."""
        self.ids[:] = UNSENT

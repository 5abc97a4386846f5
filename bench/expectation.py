"""Expected tokens of one verification step on a given tree, exactly: no dice, so no noise of their own.

    naive   a node is reached with the product of p along its path
    mss     the children of a node are tested in turn, each with what the rejections before it left of p (Algorithm 2)

Coupled needs no expectation: its outcome is fixed by the noise that drafted the tree. ``server.verify`` is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.bench.forest import Drafted
from paceline.shared.messages import Proposal

Probs = NDArray[np.float32] | NDArray[np.float64]
_VANISHED = 1e-12


def naive_tokens(drafted: Drafted, probs: Probs) -> float:
    """Expected accepted nodes and bonus if a child is accepted when it equals a sample of p. probs: float[n+1, V]."""
    tree = drafted.tree
    return _tokens(drafted, lambda row, children: probs[row, tree.tokens[children]].astype(np.float64))


def mss_tokens(drafted: Drafted, probs: Probs) -> float:
    """Expected accepted nodes and bonus under multi-step speculative sampling. probs: float[n+1, V]."""
    tree = drafted.tree

    def chances(row: int, children: list[int]) -> NDArray[np.float64]:
        tokens = tree.tokens[children]
        proposal = drafted.proposals.get(row, {}).get(0)
        return sibling_chances(probs[row], tokens, proposal)

    return _tokens(drafted, chances)


def sibling_chances(
    p: NDArray[np.floating], tokens: NDArray[np.int32], proposal: Proposal | None
) -> NDArray[np.float64]:
    """float64[m]: the chance that each child is the accepted one. p: float[V]; tokens: int32[m], in drawing order.

    proposal: the q that they were drawn from without replacement, None for point masses.
    """
    ids = tokens if proposal is None else np.asarray(proposal.token_ids)
    weights = np.zeros(len(ids)) if proposal is None else np.array(proposal.probs, np.float64)
    here = p[ids].astype(np.float64)
    elsewhere = max(0.0, 1.0 - float(here.sum()))
    chances = np.zeros(len(tokens))
    left = 1.0
    for number, token in enumerate(tokens.tolist()):
        place = int(np.flatnonzero(ids == token)[0])
        q = (ids == token).astype(np.float64) if proposal is None else weights / weights.sum()
        rest = np.maximum(0.0, here - q)
        mass = float(rest.sum()) + elsewhere
        accepted = 1.0 if mass < _VANISHED else min(1.0, here[place] / q[place])
        chances[number] = left * accepted
        left *= 1.0 - accepted
        if left <= 0.0:
            break
        here, elsewhere = rest / mass, elsewhere / mass
        weights[place] = 0.0
    return chances


def _tokens(drafted: Drafted, chances: Callable[[int, list[int]], NDArray[np.float64]]) -> float:
    """1 for the bonus token, and each node's chance of being reached."""
    reached = np.zeros(len(drafted.tree) + 1)
    reached[0] = 1.0
    for row, children in enumerate(drafted.tree.children()):
        if children and reached[row] > 0.0:
            reached[np.array(children) + 1] = reached[row] * chances(row, list(children))
    return float(reached.sum())

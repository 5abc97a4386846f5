"""Which nodes of a token tree the target accepts, and the bonus token behind them: one walk, four choosers.

The walk starts at the anchor. At every row a chooser names either a child to go on from or the token that ends the
step, so each step commits at least one token. The choosers differ in this one decision:

    greedy    the target's argmax; the child that equals it
    coupled   argmax of log p + Gumbel noise of (seed, position); the child that equals it (arXiv 2408.07978)
    naive     a sample of p; the child that equals it (SpecInfer, arXiv 2305.09781, Table 3's baseline)
    mss       children tested one by one against p / q, p updated by every rejection (SpecInfer, Algorithm 2)

Rows: row 0 is the anchor, row i+1 is node i. p is the target's distribution after all sampling parameters, q a
drafter's. Not here: how p is made (``warp``), and how a whole engine step is decided on the device (``choose``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from paceline.server import noise as device_noise
from paceline.shared.errors import NumericsError, TreeError
from paceline.shared.messages import Proposal
from paceline.shared.noise import gumbel
from paceline.shared.tree import TokenTree

__all__ = ["Dice", "Proposal", "Verdict", "verify_coupled", "verify_greedy", "verify_mss", "verify_naive"]

Proposals = Mapping[int, Mapping[int, Proposal]]
"""row -> drafter -> the sparse q that the drafter had below that row before any draw."""
NO_CHOICE = "expected at least one possible token from the target, got none"
_VANISHED = 1e-12


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted node indices, root-down, and the token that the target puts behind them."""

    nodes: tuple[int, ...]
    bonus: int


class Decision(NamedTuple):
    """What a chooser says at one row: go on from ``node``, or end the step with ``token``."""

    node: int | None
    token: int


class Chooser(Protocol):
    """Decides at one row. children: nodes below that row, in index order, which is also their drawing order."""

    def __call__(self, row: int, children: Sequence[int]) -> Decision: ...


class Dice(Protocol):
    """The two random acts of verification. Tests put an enumerator in the place of a generator."""

    def accepts(self, probability: float) -> bool:
        """True with that probability."""

    def draws(self, weights: NDArray[np.float64]) -> int:
        """An index with a probability proportional to its weight."""


@dataclass(frozen=True, slots=True)
class RandomDice:
    """``Dice`` on a numpy generator."""

    rng: np.random.Generator

    def accepts(self, probability: float) -> bool:
        """True with that probability."""
        return self.rng.random() < probability

    def draws(self, weights: NDArray[np.float64]) -> int:
        """An index with a probability proportional to its weight, by inversion."""
        cumulative = np.cumsum(weights)
        # random() < 1, yet the product may round up to the total: stay on the last index that has weight.
        index = int(np.searchsorted(cumulative, self.rng.random() * cumulative[-1], side="right"))
        return index if index < len(weights) else int(np.flatnonzero(weights)[-1])


def walk(tree: TokenTree, chooser: Chooser) -> Verdict:
    """From the anchor down, as far as the chooser names children."""
    children = tree.children()
    nodes: list[int] = []
    row = 0
    while True:
        node, token = chooser(row, children[row])
        if node is None:
            return Verdict(tuple(nodes), token)
        nodes.append(node)
        row = node + 1


def match(tree: TokenTree, choice: Callable[[int], int]) -> Chooser:
    """The chooser of greedy, coupled and naive: ``choice(row)`` is the target's token, whether a child has it or not.

    Never drawing again after a mismatch is what makes acceptance by equality exact.
    """

    def choose(row: int, children: Sequence[int]) -> Decision:
        token = choice(row)
        if token < 0:
            raise NumericsError(NO_CHOICE)
        return Decision(next((node for node in children if tree.tokens[node] == token), None), token)

    return choose


def multi_step(
    tree: TokenTree, probs: Callable[[int], NDArray[np.float64]], proposals: Proposals, dice: Dice
) -> Chooser:
    """The chooser of mss (SpecInfer Algorithm 2), for children of one or several drafters in any interleaving.

    probs(row): float64[V], normalised. The j-th child that drafter d drew below a row is tested against d's q
    restricted to what d had not drawn yet; a drafter without a proposal there is a point mass on its child.
    """

    def choose(row: int, children: Sequence[int]) -> Decision:
        p = probs(row)
        left = {drafter: _Remaining.of(q, len(p)) for drafter, q in proposals.get(row, {}).items()}
        for node in children:
            token, drafter = int(tree.tokens[node]), int(tree.drafters[node])
            if drafter in left:
                ids, q = left[drafter].draw(token, node)
            else:
                ids, q = np.array([token]), np.ones(1)
            target = float(p[token]) if token < len(p) else 0.0
            ratio = target / float(q[ids == token][0])
            if dice.accepts(min(1.0, ratio)):
                return Decision(node, token)
            rest = _residual(p, ids, q)
            if rest is None:  # p equals q up to rounding, so a rejection is itself a rounding error
                return Decision(node, token)
            p = rest
        return Decision(None, dice.draws(p))

    return choose


def _residual(p: NDArray[np.float64], ids: NDArray[np.int64], q: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """norm(max(0, p - q)), or None where nothing is left. Only the ids of q's support lose anything."""
    known = ids < len(p)
    rest = p.copy()
    rest[ids[known]] = np.maximum(0.0, p[ids[known]] - q[known])
    mass = rest.sum()
    return rest / mass if mass > _VANISHED else None


class _Remaining:
    """One drafter's q at one row, and what is left of it as its children are seen one after another."""

    __slots__ = ("_ids", "_weights")

    def __init__(self, ids: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        self._ids = ids
        self._weights = weights

    @classmethod
    def of(cls, proposal: Proposal, vocab_size: int) -> _Remaining:
        """Check a proposal that came from a client. Raises ``TreeError`` if it is not a distribution over tokens."""
        ids = np.asarray(proposal.token_ids, np.int64)
        weights = np.array(proposal.probs, np.float64)
        if ids.ndim != 1 or ids.shape != weights.shape or not len(ids) or len(np.unique(ids)) < len(ids):
            raise TreeError(f"expected distinct token ids with one probability each, got {ids.shape}, {weights.shape}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise TreeError(f"expected token ids in 0..{vocab_size - 1} in a proposal, got {ids.min()}..{ids.max()}")
        if not np.isfinite(weights).all() or weights.min() < 0.0 or weights.sum() <= 0.0:
            raise TreeError("expected finite, non-negative probabilities with a positive sum in a proposal")
        return cls(ids, weights)

    def draw(self, token: int, node: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The q that ``token`` was drawn from, as (ids, probs); takes the token out for the draws after it.

        Raises ``TreeError`` if the token could not have been drawn.
        """
        here = self._ids == token
        if not self._weights[here].any():
            raise TreeError(f"expected node {node} to be a draw of its proposal, got token {token} without weight")
        q = self._weights / self._weights.sum()
        self._weights = np.where(here, 0.0, self._weights)
        return self._ids, q


def _check_rows(tree: TokenTree, name: str, shape: Sequence[int], ndim: int) -> None:
    if len(shape) != ndim or shape[0] != len(tree) + 1:
        raise TreeError(f"expected {name} with {len(tree) + 1} rows for {len(tree)} nodes, got shape {tuple(shape)}")


def verify_greedy(tree: TokenTree, choices: ArrayLike) -> Verdict:
    """Accept while a child equals the target's choice. choices: int[n+1], the argmax at every row.

    Raises ``TreeError`` if there are not n+1 choices.
    """
    array = np.asarray(choices)
    _check_rows(tree, "choices", array.shape, 1)
    return walk(tree, match(tree, lambda row: int(array[row])))


def verify_coupled(
    tree: TokenTree, logprobs: NDArray[np.floating[Any]] | torch.Tensor, *, seed: int, position: int, choice: int = 0
) -> Verdict:
    """Accept while a child equals argmax(log p + Gumbel noise). Ties go to the lowest token id, NaN counts as -inf.

    logprobs: float[n+1, V], log p (any constant per row may be added). position: of the token that the anchor's
    children propose. choice: index of the choice among n of one request. A tensor is decided on its own device, for all
    rows at once; an array row by row along the walk.

    Raises ``TreeError`` for a wrong number of rows, ``NumericsError`` for a row without any possible token.
    """
    _check_rows(tree, "logprobs", logprobs.shape, 2)
    depths = np.concatenate([[0], tree.depths])
    if isinstance(logprobs, torch.Tensor):
        keys = [device_noise.Key(seed, choice, position + int(depth)) for depth in depths]
        scores = logprobs + device_noise.gumbel(keys, logprobs.shape[1], logprobs.device)
        return verify_greedy(tree, argmax(scores).cpu().numpy())
    table = np.asarray(logprobs)
    ids = np.arange(table.shape[1])

    def choice_at(row: int) -> int:
        scores = table[row] + gumbel(seed, position + int(depths[row]), ids, choice)
        return first_argmax(scores)

    return walk(tree, match(tree, choice_at))


def verify_naive(tree: TokenTree, probs: ArrayLike, rng: np.random.Generator) -> Verdict:
    """Accept while a child equals a sample of p. probs: float64[n+1, V], p at every row.

    Raises ``TreeError`` for a wrong number of rows, ``NumericsError`` for a row that is not a distribution.
    """
    table = np.asarray(probs)
    _check_rows(tree, "probs", table.shape, 2)
    dice = RandomDice(rng)
    return walk(tree, match(tree, lambda row: dice.draws(distribution(table[row]))))


def verify_mss(tree: TokenTree, probs: ArrayLike, proposals: Proposals, rng: np.random.Generator) -> Verdict:
    """Multi-step speculative sampling (SpecInfer Algorithm 2).

    probs: float64[n+1, V], p at every row. proposals: row -> drafter -> sparse q before any draw;
    ``tree.drafters`` says which drafter drew each node, and siblings stand in drawing order.

    Raises ``TreeError`` for a wrong number of rows, a proposal that is no distribution, or a node that its proposal
    cannot have drawn; ``NumericsError`` for a row that is not a distribution.
    """
    table = np.asarray(probs)
    _check_rows(tree, "probs", table.shape, 2)
    return walk(tree, multi_step(tree, lambda row: distribution(table[row]), proposals, RandomDice(rng)))


def distribution(row: ArrayLike) -> NDArray[np.float64]:
    """float64[V]: the row scaled to sum 1 in float64; NaN counts as 0. Raises ``NumericsError`` if nothing is left."""
    p: NDArray[np.float64] = np.asarray(row, np.float64)
    total = p.sum()
    if np.isnan(total):
        p = np.nan_to_num(p, nan=0.0)
        total = p.sum()
    if not (np.isfinite(total) and total > 0.0 and p.min() >= 0.0):
        raise NumericsError("expected probabilities with a positive, finite sum from the target, got none")
    scaled: NDArray[np.float64] = p / total
    return scaled


def first_argmax(scores: NDArray[np.floating[Any]]) -> int:
    """Index of the largest score, the lowest of equals; NaN never wins.

    Raises ``NumericsError`` if no score is above -inf.
    """
    best = int(np.argmax(scores))
    if np.isnan(scores[best]):  # numpy ranks NaN first
        scores = np.where(np.isnan(scores), -np.inf, scores)
        best = int(np.argmax(scores))
    if scores[best] == -np.inf:
        raise NumericsError(NO_CHOICE)
    return best


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """int64[r]: for each row of float[r, V] the index of the largest score, the lowest of equals; NaN never wins.

    A row without any score above -inf gives -1, so that one bad row costs no other row anything.
    """
    best = scores.max(dim=-1)
    if not bool(torch.isfinite(best.values).all()):
        best = torch.where(scores.isnan(), -torch.inf, scores).max(dim=-1)
    return torch.where(best.values == -torch.inf, -1, best.indices)

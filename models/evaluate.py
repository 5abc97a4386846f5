"""Offline evaluation: replays text that the target wrote and counts what trees of the draft would have had accepted.

Greedy text needs no target here: it is its own answer at every node. Each step drafts a tree behind the committed text,
follows the recorded tokens down the tree, and commits one more (the bonus token). Not for: sampled text, several
drafters, or the client's policy, which need the real verifier (`paceline.bench`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.runtime import GraphRunner


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a tree is grown: levels of at most `width` forward passes, `num_nodes` proposals kept, best first."""

    num_nodes: int = 32
    num_levels: int = 6
    width: int = 8
    branching: int = 8


@dataclass(frozen=True, slots=True)
class Replay:
    """tokens_per_step counts the bonus token. top1, top5: of positions, the recorded token among the first 1, 5."""

    tokens_per_step: float
    top1: float
    top5: float
    draft_ms: float
    num_tokens: int


class TreeDrafter:
    """Grows one tree a step over a runner's text: a beam by path probability, then the best `num_nodes` of all seen."""

    def __init__(self, runner: GraphRunner, shape: TreeShape) -> None:
        self.runner, self.shape = runner, shape

    def grow(self, anchor_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Appends committed tokens whose past is missing, drafts behind them: tokens and parents (-1: anchor)."""
        runner, shape = self.runner, self.shape
        candidates = runner.append(anchor_ids, want_all=False)
        capacity, base = runner.kv.shape[3], runner.len
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        frontier = [(-1, 0.0)]
        slots: dict[int, int] = {}
        for level in range(shape.num_levels):
            grown = []
            for row, (parent, score) in enumerate(frontier):
                for rank in range(shape.branching):
                    tokens.append(int(candidates.ids[row, rank]))
                    parents.append(parent)
                    scores.append(score + float(candidates.logprobs[row, rank]))
                    grown.append(len(tokens) - 1)
            best = heapq.nlargest(shape.width, grown, key=lambda node: scores[node])
            if level + 1 == shape.num_levels:
                break
            visible = np.zeros((len(best), capacity + len(best)), bool)
            visible[:, : runner.len] = True
            for row, node in enumerate(best):
                visible[row, capacity + row] = True
                ancestor = parents[node]
                while ancestor >= 0:
                    visible[row, slots[ancestor]] = True
                    ancestor = parents[ancestor]
            ids = np.array([tokens[node] for node in best])
            candidates, new_kv = runner.forward(ids, np.full(len(best), base + level), visible, np.arange(len(best)))
            first = base + len(slots)
            runner.kv[:, :, :, first : first + len(best)] = new_kv
            slots.update({node: first + row for row, node in enumerate(best)})
            frontier = [(node, scores[node]) for node in best]
        return _keep_best(tokens, parents, scores, shape.num_nodes)


def _keep_best(
    tokens: list[int], parents: list[int], scores: list[float], num_nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The nodes of highest path probability, best first; a parent always scores at least as high, so it is ahead."""
    kept = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[:num_nodes]
    place = {node: index for index, node in enumerate(kept)}
    return (
        np.array([tokens[node] for node in kept], np.int64),
        np.array([place[parents[node]] if parents[node] >= 0 else -1 for node in kept], np.int64),
    )


def accepted_len(tokens: NDArray[np.int64], parents: NDArray[np.int64], text: Sequence[int]) -> int:
    """How many recorded tokens the tree holds on a path from the anchor."""
    node, depth = -1, 0
    while depth < len(text):
        matches = np.flatnonzero((parents == node) & (tokens == text[depth]))
        if not len(matches):
            break
        node, depth = int(matches[0]), depth + 1
    return depth


def replay(
    runner: GraphRunner,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    shape: TreeShape,
    on_text: Callable[[int, int], None] = lambda done, of: None,
) -> Replay:
    """Drafts through (prompt, greedy answer) pairs.

    draft_ms: median time of a whole tree. Raises: ValueError when a text does not fit the runner's capacity.
    """
    drafter = TreeDrafter(runner, shape)
    steps = tokens = 0
    first, five, times = [], [], []
    for index, (prompt, answer) in enumerate(texts):
        if len(prompt) + len(answer) + shape.num_levels * shape.width > runner.kv.shape[3]:
            raise ValueError(
                f"expected at most {runner.kv.shape[3]} slots, got {len(prompt)} + {len(answer)} tokens and a tree"
            )
        runner.crop(0)
        ranks = runner.append(np.array([*prompt, *answer[:-1]], np.int64)).ids[len(prompt) - 1 :]
        hits = ranks == np.array(answer)[:, None]
        first.append(hits[:, 0])
        five.append(hits[:, :5].any(1))
        runner.crop(len(prompt) - 1)
        pending, done = [prompt[-1]], 0
        while done < len(answer):
            started = time.perf_counter()
            tree = drafter.grow(np.array(pending, np.int64))
            times.append(time.perf_counter() - started)
            run = min(accepted_len(*tree, answer[done:]) + 1, len(answer) - done)
            pending = list(answer[done : done + run])
            done, steps, tokens = done + run, steps + 1, tokens + run
        on_text(index + 1, len(texts))
    return Replay(
        tokens_per_step=tokens / steps,
        top1=float(np.concatenate(first).mean()),
        top5=float(np.concatenate(five).mean()),
        draft_ms=float(np.median(times) * 1e3),
        num_tokens=tokens,
    )

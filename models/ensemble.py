"""What drafts are worth together: coverage and accepted length of one, or of several that share one budget of nodes.

SpecInfer (Miao et al. 2024, section 3) boosts drafts so that together they cover more than one with as many candidates.
Here both sides get the same number of nodes: several drafts take turns, the likeliest first, and what one has already
proposed costs nothing. Texts are the held-out documents of a corpus, so nothing was trained on them. Not for: the
client's policy, sampled text and the real verifier (`paceline.bench`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.models.conversation import KIND_GREEDY
from paceline.models.evaluate import TreeDrafter, TreeShape, accepted_len
from paceline.models.runtime import GraphRunner
from paceline.models.samples import Corpus

Ids = NDArray[np.int64]
Text = tuple[list[int], list[int]]
"""Prompt and greedy answer."""


@dataclass(frozen=True, slots=True)
class Worth:
    """At one budget. coverage: share of positions whose token is among that many candidates. tokens_per_step: with
    trees of that many nodes, bonus token included. draft_ms: median time of growing them, one draft after the other.
    """

    num_nodes: int
    coverage: float
    tokens_per_step: float
    draft_ms: float


def greedy_texts(corpus: Corpus, num_texts: int, max_len: int) -> list[Text]:
    """The first greedy answer of each held-out document, at most `max_len` tokens with its prompt."""
    texts: list[Text] = []
    for document in corpus.documents(held_out=True):
        span = corpus.span(document)
        tokens, kinds = corpus.tokens[span].tolist(), corpus.kinds[span]
        greedy = np.flatnonzero(kinds == KIND_GREEDY)
        if not len(greedy) or not greedy[0]:
            continue
        first = int(greedy[0])
        gaps = np.flatnonzero(kinds[first:] != KIND_GREEDY)
        last = first + int(gaps[0]) if len(gaps) else len(tokens)
        prompt = [*corpus.prefix, *tokens[:first]]
        answer = tokens[first : min(last, first + max_len - len(prompt))]
        if len(answer) >= 2:
            texts.append((prompt, answer))
    return texts[:num_texts]


def take_turns(rows: Sequence[Sequence[int]], count: int) -> list[int]:
    """The first `count` distinct entries, one of each row in turn."""
    taken: dict[int, None] = {}
    for rank in range(max((len(row) for row in rows), default=0)):
        for row in rows:
            if rank < len(row) and len(taken) < count:
                taken.setdefault(row[rank])
    return list(taken)


def merge_in_turns(trees: Sequence[tuple[Ids, Ids]], num_nodes: int) -> tuple[Ids, Ids]:
    """One tree of at most `num_nodes` nodes from several (tokens, parents), whose nodes stand best first.

    Each gives a node in turn; a path that is there already costs nothing (Definition 3.2).
    """
    index: dict[tuple[int, int], int] = {}
    places: list[list[int]] = [[] for _ in trees]
    for step in range(max((len(tokens) for tokens, _ in trees), default=0)):
        for (tokens, parents), place in zip(trees, places, strict=True):
            if step >= len(tokens):
                continue
            parent = int(parents[step])
            under = place[parent] if parent >= 0 else -1
            path = (under, int(tokens[step]))
            if under == -2 or (path not in index and len(index) >= num_nodes):
                place.append(-2)  # over the budget, with all that hangs below it
                continue
            place.append(index.setdefault(path, len(index)))
    nodes = np.array(list(index), np.int64).reshape(-1, 2)
    return nodes[:, 1], nodes[:, 0]


def measure_together(runners: Sequence[GraphRunner], texts: Sequence[Text], shape: TreeShape) -> Worth:
    """One or several drafts on the same budget, see the module's text. Runners need room for a text and a tree."""
    drafters = [TreeDrafter(runner, shape) for runner in runners]
    hits: list[bool] = []
    times: list[float] = []
    steps = tokens = 0
    for prompt, answer in texts:
        ranked = []
        for runner in runners:
            runner.crop(0)
            ranked.append(runner.append(np.array([*prompt, *answer[:-1]], np.int64)).ids[len(prompt) - 1 :].tolist())
            runner.crop(len(prompt) - 1)
        for place, token in enumerate(answer):
            hits.append(token in take_turns([rows[place] for rows in ranked], shape.num_nodes))
        pending, done = [prompt[-1]], 0
        while done < len(answer):
            started = time.perf_counter()
            trees = [drafter.grow(np.array(pending, np.int64)) for drafter in drafters]
            times.append(time.perf_counter() - started)
            tree = merge_in_turns(trees, shape.num_nodes)
            run = min(accepted_len(*tree, answer[done:]) + 1, len(answer) - done)
            pending = answer[done : done + run]
            done, steps, tokens = done + run, steps + 1, tokens + run
    return Worth(shape.num_nodes, float(np.mean(hits)), tokens / max(1, steps), 1e3 * float(np.median(times)))

"""Several drafts on one budget: turns, merging, and what the measure says of drafts whose worth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.conversation import KIND_FORCED, KIND_GREEDY, KIND_SAMPLED, KIND_USER
from paceline.models.draft import Draft
from paceline.models.ensemble import greedy_texts, measure_together, merge_in_turns, take_turns
from paceline.models.evaluate import TreeShape, accepted_len
from paceline.models.graph import GraphBuilder
from paceline.models.runtime import GraphRunner
from paceline.models.samples import Corpus
from paceline.models.tiny import VOCAB_SIZE, tiny_model
from paceline.shared.tree import TokenTree


def as_paths(tokens, parents):
    tree = TokenTree(tokens.astype(np.int32), parents.astype(np.int32))
    return {tuple(int(tokens[node]) for node in tree.path(leaf)) for leaf in range(len(tree))}


def random_tree(draw):
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = [draw(st.integers(0, 3)) for _ in range(size)]
    return np.array(tokens, np.int64), np.array(parents, np.int64)


TREES = st.lists(st.composite(random_tree)(), min_size=1, max_size=3)


def test_drafts_take_turns_and_repeat_nothing():
    assert take_turns([[1, 2, 3, 4], [1, 5, 2, 6]], 4) == [1, 2, 5, 3]
    assert take_turns([[7, 8, 9]], 2) == [7, 8]
    assert take_turns([], 3) == []


@given(TREES)
def test_merge_without_a_bound_has_every_path_and_no_other(trees):
    merged = merge_in_turns(trees, 1000)
    assert as_paths(*merged) == set().union(*(as_paths(*tree) for tree in trees))
    assert len(as_paths(*merged)) == len(merged[0])


@given(TREES, st.integers(0, 10))
def test_merge_keeps_its_budget_and_stays_a_tree(trees, budget):
    tokens, parents = merge_in_turns(trees, budget)
    whole = merge_in_turns(trees, 1000)
    assert len(tokens) == min(budget, len(whole[0])) or len(tokens) < budget
    assert len(tokens) <= budget
    assert as_paths(tokens, parents) <= as_paths(*whole)
    if budget >= len(whole[0]):
        assert len(tokens) == len(whole[0])


def graph(draft):
    return GraphBuilder(draft.weights(), 32, 32).build().SerializeToString()


def runners(graphs):
    return [GraphRunner(one, 160) for one in graphs]


@pytest.fixture(scope="module")
def pair():
    """A target that is its own draft, in two halves: each knows the half of the vocabulary only."""
    target = tiny_model("llama")
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        for _ in range(30):
            ids = torch.cat([ids, target(ids).logits[:, -1:, :VOCAB_SIZE].argmax(-1)], dim=1)
    text = ids[0].tolist()
    layers = range(target.config.num_hidden_layers)
    halves = [Draft.from_target(target, tuple(layers), np.arange(VOCAB_SIZE)[half::2]).eval() for half in (0, 1)]
    return text[:3], text[3:], [graph(half) for half in halves]


def test_two_halves_cover_together_what_each_misses(pair):
    prompt, answer, halves = pair
    shape = TreeShape(num_nodes=2, num_levels=1, width=1, branching=2)
    together = measure_together(runners(halves), [(prompt, answer)], shape)
    alone = [measure_together(runners([half]), [(prompt, answer)], shape) for half in halves]
    assert together.coverage == 1.0
    assert together.tokens_per_step > max(one.tokens_per_step for one in alone)
    even = sum(token % 2 == 0 for token in answer) / len(answer)
    assert alone[0].coverage == pytest.approx(even) and alone[1].coverage == pytest.approx(1 - even)


def test_the_same_draft_twice_is_worth_what_it_is_alone(pair):
    prompt, answer, halves = pair
    shape = TreeShape(num_nodes=6, num_levels=3, width=2, branching=3)
    alone = measure_together(runners(halves[:1]), [(prompt, answer)], shape)
    twice = measure_together(runners(halves[:1] * 2), [(prompt, answer)], shape)
    assert (twice.coverage, twice.tokens_per_step) == (alone.coverage, alone.tokens_per_step)


def test_texts_are_the_greedy_answers_of_held_out_documents():
    kinds = [KIND_FORCED, KIND_USER, KIND_GREEDY, KIND_GREEDY, KIND_GREEDY, KIND_FORCED, KIND_GREEDY]
    sampled = [KIND_FORCED, KIND_USER, KIND_SAMPLED, KIND_SAMPLED]
    documents = [kinds, sampled] * 8
    tokens = np.arange(sum(map(len, documents)), dtype=np.int32)
    corpus = Corpus(
        prefix=(90, 91),
        tokens=tokens,
        kinds=np.concatenate(documents).astype(np.uint8),
        offsets=np.cumsum([0, *map(len, documents)]),
        top_ids=np.zeros((len(tokens), 1), np.int32),
        top_logprobs=np.zeros((len(tokens), 1), np.float16),
    )
    assert greedy_texts(corpus, 9, 64) == [], "every held-out document is a sampled one here"
    shifted = Corpus(
        corpus.prefix, corpus.tokens, corpus.kinds, corpus.offsets[1:], corpus.top_ids, corpus.top_logprobs
    )
    first = int(shifted.offsets[3])
    assert greedy_texts(shifted, 1, 64) == [([90, 91, first, first + 1], [first + 2, first + 3, first + 4])]
    assert greedy_texts(shifted, 1, 6)[0][1] == [first + 2, first + 3]


def test_accepted_path_may_run_through_nodes_of_several_drafts():
    trees = [(np.array([5, 6]), np.array([-1, 0])), (np.array([5, 7]), np.array([-1, 0]))]
    assert accepted_len(*merge_in_turns(trees, 3), [5, 7]) == 2

"""The table of verifiers on a scripted pair: a Markov target, and a drafter that knows it with an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.bench.expectation import mss_tokens, naive_tokens
from paceline.bench.forest import DraftedText, Plan, ScoredText, grow
from paceline.bench.markov import MarkovDrafter
from paceline.bench.verifiers import METHODS, Effort, draft_forest, markdown, measure_text, shape_names, summarise
from paceline.client.drafting.ranking import make_ranking
from paceline.server.scripted import ScriptedTarget
from paceline.server.verify import verify_mss, verify_naive
from paceline.shared.sampling import SamplingParams, Verifier

VOCAB_SIZE = 48
NUM_CANDIDATES = 32


@pytest.fixture(scope="module")
def pair():
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 2.0).astype(np.float32)
    noise = rng.normal(size=table.shape).astype(np.float32)
    return (
        ScriptedTarget(lambda context: table[context[-1]], VOCAB_SIZE),
        MarkovDrafter(table + noise, width=NUM_CANDIDATES, is_instant=True, chunk_len=7),
        table,
    )


def text(table, length, temperature=1.0, seed=0):
    rng = np.random.default_rng(seed)
    tokens = [1]
    for _ in range(length):
        p = np.exp(table[tokens[-1]].astype(np.float64) / temperature)
        tokens.append(int(rng.choice(VOCAB_SIZE, p=p / p.sum())))
    return np.array(tokens[:5], np.int32), np.array(tokens[5:], np.int32)


def test_trees_have_the_shapes_of_the_table(pair):
    _, drafter, table = pair
    prompt, _ = text(table, 20)
    drafts = DraftedText(drafter.start(), drafter.chunk_len)
    forest = draft_forest(drafts, prompt, 1.0, 2, VOCAB_SIZE)
    assert {shape for shape, _ in forest} == set(shape_names())
    for (shape, kind), trees in forest.items():
        assert len(trees) == (1 if kind is Verifier.NAIVE else 2)
        for tree in trees:
            assert tree.tree.duplicate_sibling() is None
            assert [tuple(tree.tree.tokens[tree.tree.path(node)].tolist()) for node in range(len(tree.tree))] == list(
                tree.paths
            )
            if shape.startswith("width"):
                width = int(shape[-1])
                counts = np.bincount(tree.tree.depths)[1:].tolist()
                assert counts[:2] == [1, 1]
                assert min(counts[2:]) >= 1 and max(counts[2:]) <= width
            else:
                assert len(tree.tree) == 32
            parents = set((tree.tree.parents + 1).tolist())
            assert parents <= set(tree.proposals) if kind is Verifier.MSS else not tree.proposals


def test_every_path_is_drafted_once_and_scored_like_the_target(pair):
    target, drafter, table = pair
    prompt, output = text(table, 30)
    drafts, scores = DraftedText(drafter.start(), drafter.chunk_len), ScoredText(target)
    for place in (0, 3, 9):
        known = np.concatenate([prompt, output[:place]])
        drafts.move_to(known)
        ranking = make_ranking(Verifier.COUPLED, SamplingParams(temperature=1.0, seed=place))
        plans = [Plan(ranking, [3, 2, 2]), Plan(ranking, [4, 2, 2], 9)]
        calls = drafter.num_calls
        trees = grow(drafts, plans, len(known))
        assert drafter.num_calls == calls + 2  # one call for each level below the first, for both trees
        again = grow(drafts, plans, len(known))
        assert [tree.tree for tree in trees] == [tree.tree for tree in again]
        assert drafter.num_calls == calls + 2
        assert len(trees[1].tree) == 9
        scored = scores.score(known, trees)
        for tree in trees:
            expected = table[[known[-1], *tree.tree.tokens]]
            assert np.array_equal(scored.logits.numpy()[scored.rows(tree)], expected)
    scores.close()


def test_the_table_orders_the_verifiers_on_a_pair_that_agrees_half_way(pair):
    target, drafter, table = pair
    lengths = {}
    for seed in range(3):
        prompt, output = text(table, 45, seed=seed)
        measure_text(target, drafter, prompt, output, 1.0, Effort(stride=6), lengths)
    rows = summarise(1.0, lengths)
    assert [row["tree"] for row in rows] == shape_names()
    for row in rows:
        assert row["mss_over_naive_same_trees"] >= 1.0
        assert all(value > 1.05 for value in row["tokens_per_step"].values())
    page = markdown(rows)
    assert len(page.splitlines()) == 2 + len(rows)
    assert all(name in page for name in METHODS)


def test_at_temperature_zero_all_verifiers_walk_the_same_path(pair):
    target, drafter, table = pair
    lengths = {}
    prompt, output = text(table, 20, temperature=0.01)
    measure_text(target, drafter, prompt, output, 0.0, Effort(stride=3), lengths)
    for row in summarise(0.0, lengths):
        assert len(set(row["tokens_per_step"].values())) == 1


def test_expected_tokens_are_what_the_verifiers_yield_on_average(pair):
    target, drafter, table = pair
    prompt, _ = text(table, 20)
    drafts, scores = DraftedText(drafter.start(), drafter.chunk_len), ScoredText(target)
    forest = draft_forest(drafts, prompt, 1.0, 1, VOCAB_SIZE)
    drafted = forest["dynamic-32", Verifier.MSS][0]
    probs = scores.score(prompt, [drafted])
    p = torch.softmax(probs.logits.double(), -1).numpy()[probs.rows(drafted)]
    rng = np.random.default_rng(9)
    throws = {
        mss_tokens: [verify_mss(drafted.tree, p, drafted.proposals, rng) for _ in range(600)],
        naive_tokens: [verify_naive(drafted.tree, p, rng) for _ in range(600)],
    }
    for expected, verdicts in throws.items():
        lengths = np.array([len(verdict.nodes) + 1 for verdict in verdicts])
        assert abs(expected(drafted, p) - lengths.mean()) < 4 * lengths.std() / np.sqrt(len(lengths))
    point_masses = replace(drafted, proposals={})
    lengths = np.array([len(verify_mss(drafted.tree, p, {}, rng).nodes) + 1 for _ in range(600)])
    assert abs(mss_tokens(point_masses, p) - lengths.mean()) < 4 * lengths.std() / np.sqrt(len(lengths))
    assert mss_tokens(point_masses, p) == pytest.approx(naive_tokens(point_masses, p))
    scores.close()

"""The baselines' trees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.baselines.shapes import BestFirst, Chain, Expansion, Shape
from paceline.bench.costs import DraftTime
from paceline.bench.playback import Oracle
from paceline.bench.synthetic import synthetic
from paceline.server.verify import verify_greedy

ORACLES = [Oracle(recording) for recording in synthetic(3, 30, top1=0.6, coverage=0.9).recordings]
SHAPES: list[Shape] = [Chain(5), Expansion((3, 2, 1)), BestFirst(16, 4), BestFirst(8, 8)]


def test_sizes_calls_and_names() -> None:
    draft = Expansion((3, 2, 1)).grow(ORACLES[0], 0, 10)
    assert (len(draft), draft.calls) == (3 + 6 + 6, [1, 3, 6])
    assert draft.seconds(DraftTime(1.0, 0.5), first_rows=2) == pytest.approx(3 * 1.0 + (1 + 3 + 6 + 2) * 0.5)
    assert Chain(5).grow(ORACLES[0], 0, 10).calls == [1] * 5
    assert [shape.name for shape in SHAPES] == ["chain-5", "<3,2,1>", "best-16x4", "best-8x8"]


@given(st.sampled_from(SHAPES), st.sampled_from(ORACLES), st.integers(0, 28), st.integers(0, 12))
def test_trees_are_valid_and_accept_what_the_verifier_accepts(
    shape: Shape, oracle: Oracle, place: int, max_depth: int
) -> None:
    draft = shape.grow(oracle, place, max_depth)
    tree = draft.tree()
    assert not len(tree) or int(tree.depths.max()) <= max_depth
    places = [place, *draft.places]
    choices = np.array([oracle.output[p] if 0 <= p < len(oracle.output) else 0 for p in places])
    accepted = draft.accepted(oracle)
    verdict = verify_greedy(tree, choices)
    # Off the path the target may say anything, and there it says 0; on the path both must agree.
    assert list(verdict.nodes)[: len(accepted)] == accepted


def test_best_first_keeps_the_likeliest_nodes_within_its_budget() -> None:
    whole = BestFirst(10_000, 3, beams=100).grow(ORACLES[0], 0, 10)
    kept = BestFirst(12, 3, beams=100).grow(ORACLES[0], 0, 10)
    assert len(kept) == 12
    assert sorted(kept.scores, reverse=True) == pytest.approx(sorted(whole.scores, reverse=True)[:12])


def test_a_drafter_that_is_always_right_has_every_token_accepted() -> None:
    oracle = Oracle(synthetic(1, 30, top1=1.0, coverage=1.0).recordings[0])
    assert len(Chain(7).grow(oracle, 3, 20).accepted(oracle)) == 7

"""Quantised proposals: exact weights, a canonical form, and draws whose distribution is the one that travels."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.shared.errors import WireError
from paceline.shared.messages import Grow, Proposal
from paceline.shared.quantise import MAX_SUPPORT, WEIGHT_TOTAL, draw, from_weights, quantised, support_size, weights_of
from paceline.shared.wire import decode, encode


@given(
    ids=st.lists(st.integers(0, 49_151), min_size=1, max_size=80, unique=True),
    k=st.integers(1, 80),
    data=st.data(),
)
def test_weights_are_whole_sum_exactly_and_survive_the_float(ids, k, data):
    logprobs = data.draw(st.lists(st.floats(-60, 60), min_size=len(ids), max_size=len(ids)))
    proposal = quantised(ids, logprobs, k)
    weights = weights_of(proposal)
    assert weights.sum() == WEIGHT_TOTAL
    assert len(weights) <= min(k, len(ids), MAX_SUPPORT)
    assert weights.min() >= 1
    assert (np.diff(proposal.token_ids) > 0).all()
    assert proposal.probs.sum() == 1.0
    again = from_weights(proposal.token_ids, weights)
    assert np.array_equal(again.probs, proposal.probs)


def test_rounding_moves_no_probability_by_more_than_one_step():
    logprobs = np.random.default_rng(0).normal(size=30)
    proposal = quantised(np.arange(30), logprobs, 30)
    exact = np.exp(logprobs) / np.exp(logprobs).sum()
    assert np.abs(proposal.probs - exact[proposal.token_ids]).max() < 1 / WEIGHT_TOTAL


def test_cut_keeps_the_likeliest_and_ties_go_to_the_lowest_id():
    proposal = quantised([9, 4, 7, 2], [0.0, 1.0, 1.0, 1.0], 2)
    assert proposal.token_ids.tolist() == [2, 4]
    assert proposal.probs.tolist() == [0.5, 0.5]


def test_impossible_tokens_leave_the_support():
    proposal = quantised([1, 2, 3], [np.nan, 0.0, -np.inf], 3)
    assert proposal.token_ids.tolist() == [2]
    with pytest.raises(ValueError, match="at least one possible token"):
        quantised([1, 2], [np.nan, -np.inf], 2)


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ([1, 2], [4096, 0]),
        ([1, 2], [4095, 2]),
        ([2, 1], [4095, 1]),
        ([1, 1], [4095, 1]),
        ([-1, 1], [4095, 1]),
        ([], []),
        ([1, 2], [4096]),
        ([1, 2], [5000, -904]),
        (list(range(65)), [4032] + [1] * 64),
    ],
)
def test_weights_out_of_form_are_refused(ids, weights):
    with pytest.raises(WireError):
        from_weights(ids, weights)


def test_probabilities_that_are_not_quantised_are_refused():
    with pytest.raises(WireError, match="multiples"):
        weights_of(Proposal(np.array([1, 2], np.int32), np.array([0.3, 0.7])))


def test_draws_are_distinct_and_follow_the_restricted_q():
    proposal = from_weights([3, 5, 8], [2048, 1024, 1024])
    rng = np.random.default_rng(3)
    orders = list(itertools.permutations([3, 5, 8]))
    q = dict(zip([3, 5, 8], proposal.probs.tolist(), strict=True))
    expected = np.array([q[a] * q[b] / (1 - q[a]) for a, b, _ in orders])
    counts = dict.fromkeys(orders, 0)
    for _ in range(6_000):
        counts[tuple(draw(proposal, 3, rng).tolist())] += 1
    assert stats.chisquare(list(counts.values()), expected * 6_000).pvalue > 0.01


def test_draws_end_with_the_support():
    assert sorted(draw(from_weights([3, 5], [4000, 96]), 9, np.random.default_rng(0)).tolist()) == [3, 5]


@pytest.mark.parametrize("num_parents", [1, 4, 8, 16, 32])
def test_a_frame_of_32_nodes_fits_in_2_kib_whatever_its_shape(num_parents):
    rng = np.random.default_rng(num_parents)
    k = support_size(num_parents)
    proposals = {}
    for parent in range(-1, num_parents - 1):
        ids = np.sort(rng.choice(49_152, k, replace=False))
        proposals[parent, 0] = quantised(ids, rng.normal(scale=2.0, size=k), k)
    parents = np.array([-1 if i == 0 else min(i, num_parents - 1) - 1 for i in range(32)], np.int32)
    frame = Grow(1, 3000, 40_000, rng.integers(0, 49_152, 32).astype(np.int32), parents, proposals=proposals)
    # Parents are ids within the generation; shift them to this frame's first id.
    shifted = {(-1 if p == -1 else 40_000 + p, d): q for (p, d), q in proposals.items()}
    frame = Grow(
        1, 3000, 40_000, frame.tokens, np.where(parents == -1, -1, 40_000 + parents).astype(np.int32), proposals=shifted
    )
    data = encode(frame)
    assert len(data) <= 2048
    assert k >= 13
    back = decode(data)
    assert isinstance(back, Grow)
    for key, proposal in shifted.items():
        assert np.array_equal(back.proposals[key].probs, proposal.probs)
        assert np.array_equal(back.proposals[key].token_ids, proposal.token_ids)

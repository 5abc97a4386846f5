"""Single decisions of the verifiers: ties, NaN, duplicates, malformed proposals, and each chooser's rule by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.verify import (
    Proposal,
    Verdict,
    argmax,
    distribution,
    first_argmax,
    verify_coupled,
    verify_greedy,
    verify_mss,
    verify_naive,
)
from paceline.shared.errors import NumericsError, TreeError
from paceline.shared.noise import gumbel
from paceline.shared.tree import TokenTree


class ScriptedRng(np.random.Generator):
    """A generator whose uniform numbers are given."""

    def __new__(cls, *numbers):
        return super().__new__(cls, np.random.PCG64(0))

    def __init__(self, *numbers):
        super().__init__(np.random.PCG64(0))
        self.numbers = list(numbers)

    def random(self, *_args, **_kwargs):
        return self.numbers.pop(0)


def proposal(**weights):
    ids = [int(name[1:]) for name in weights]
    return Proposal(np.array(ids, np.int32), np.array(list(weights.values()), np.float64))


def one_hot(vocab_size, token):
    row = np.zeros(vocab_size)
    row[token] = 1.0
    return row


def test_greedy_follows_the_targets_choices_and_ends_with_the_bonus():
    tree = TokenTree([5, 6, 7, 8], [-1, -1, 1, 2])
    assert verify_greedy(tree, [6, 0, 7, 9, 0]) == Verdict((1, 2), 9)
    assert verify_greedy(tree, np.array([4, 0, 0, 0, 0])) == Verdict((), 4)
    assert verify_greedy(TokenTree.empty(), [3]) == Verdict((), 3)


def test_greedy_accepts_a_whole_chain():
    assert verify_greedy(TokenTree.chain([1, 2, 3]), [1, 2, 3, 4]) == Verdict((0, 1, 2), 4)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_wrong_number_of_rows_is_refused_by_every_verifier(rows):
    tree, rng = TokenTree.chain([1]), np.random.default_rng(0)
    with pytest.raises(TreeError, match="2 rows"):
        verify_greedy(tree, np.zeros(rows, np.int64))
    with pytest.raises(TreeError, match="2 rows"):
        verify_coupled(tree, np.zeros((rows, 4)), seed=0, position=0)
    with pytest.raises(TreeError, match="2 rows"):
        verify_naive(tree, np.full((rows, 4), 0.25), rng)
    with pytest.raises(TreeError, match="2 rows"):
        verify_mss(tree, np.full((rows, 4), 0.25), {}, rng)


def test_duplicate_siblings_lead_to_the_first_of_them():
    tree = TokenTree([5, 5, 6, 7], [-1, -1, 0, 1])
    logprobs = np.full((5, 8), -np.inf)
    for row, token in enumerate([5, 6, 7, 1, 1]):
        logprobs[row, token] = 0.0
    expected = Verdict((0, 2), 1)
    assert verify_greedy(tree, [5, 6, 7, 1, 1]) == expected
    assert verify_coupled(tree, logprobs, seed=1, position=3) == expected
    assert verify_coupled(tree, torch.from_numpy(logprobs), seed=1, position=3) == expected
    assert verify_naive(tree, np.exp(logprobs), np.random.default_rng(0)) == expected
    assert verify_mss(tree, np.exp(logprobs), {}, np.random.default_rng(0)) == expected


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10_000), choice=st.integers(0, 5), data=st.data())
def test_coupled_on_arrays_and_tensors_is_the_argmax_of_log_p_plus_noise(seed, position, choice, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    n, vocab_size = data.draw(st.integers(0, 6)), 5
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(n)]
    tree = TokenTree(rng.integers(0, vocab_size, n), np.array(parents, np.int32))
    logprobs = rng.normal(size=(n + 1, vocab_size)).astype(np.float32)
    depths = [0, *tree.depths.tolist()]
    noise = np.stack([gumbel(seed, position + depth, np.arange(vocab_size), choice) for depth in depths])
    expected = verify_greedy(tree, (logprobs + noise).argmax(axis=1))
    assert verify_coupled(tree, logprobs, seed=seed, position=position, choice=choice) == expected
    assert verify_coupled(tree, torch.from_numpy(logprobs), seed=seed, position=position, choice=choice) == expected


def test_coupled_output_does_not_depend_on_the_tree():
    rng = np.random.default_rng(7)
    table = rng.normal(size=(4, 4, 4))  # log p by the last two tokens
    seed, start = 123, 10

    def decode(shape_rng, length):
        output = [0, 0]
        while len(output) < length + 2:
            n = int(shape_rng.integers(0, 7))
            parents = [int(shape_rng.integers(-1, node)) if node else -1 for node in range(n)]
            tree = TokenTree(shape_rng.integers(0, 4, n), np.array(parents, np.int32))
            rows = []
            for row in range(n + 1):
                context = output + [int(tree.tokens[node]) for node in (tree.path(row - 1) if row else [])]
                rows.append(table[context[-2], context[-1]])
            verdict = verify_coupled(tree, np.stack(rows), seed=seed, position=start + len(output))
            output += [*(int(tree.tokens[node]) for node in verdict.nodes), verdict.bonus]
        return output[: length + 2]

    plain = decode(np.random.default_rng(0), 40)
    assert len(set(plain)) > 2
    assert all(decode(np.random.default_rng(shape), 40) == plain for shape in range(1, 12))


def test_naive_keeps_the_mismatching_sample_and_never_draws_again():
    probs = np.array([[0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
    assert verify_naive(TokenTree.chain([1]), probs, ScriptedRng(0.6)) == Verdict((), 2)
    assert verify_naive(TokenTree.chain([1]), probs, ScriptedRng(0.3, 0.9)) == Verdict((0,), 2)


def test_mss_at_temperature_zero_emits_the_argmax_although_the_draft_prefers_another():
    # jaymody/speculative-sampling issue 9: a at 0.3 under the target and liked by the draft, b at 0.5
    greedy = np.stack([one_hot(3, 1), one_hot(3, 1)])
    for seed in range(50):
        q = {0: {0: proposal(t0=0.6, t1=0.2, t2=0.2)}}
        assert verify_mss(TokenTree.chain([0]), greedy, q, np.random.default_rng(seed)) == Verdict((), 1)


def test_mss_accepts_with_p_over_q_of_what_is_left():
    p = np.tile([0.1, 0.2, 0.3, 0.4], (3, 1))
    q = {0: {0: proposal(t0=0.5, t1=0.25, t2=0.25)}}
    one, two = TokenTree([0], [-1]), TokenTree([0, 1], [-1, -1])
    # Child 0 has ratio 0.1 / 0.5. Rejecting it leaves (0, 0, 0.05, 0.4) / 0.45.
    assert verify_mss(one, p[:2], q, ScriptedRng(0.199, 0.0)) == Verdict((0,), 0)
    assert verify_mss(one, p[:2], q, ScriptedRng(0.2, 0.111)) == Verdict((), 2)
    assert verify_mss(one, p[:2], q, ScriptedRng(0.2, 0.112)) == Verdict((), 3)
    # Child 1 comes from (0, 1/2, 1/2) and has no chance left; rejecting it also takes what token 2 had.
    assert verify_mss(two, p, q, ScriptedRng(0.2, 0.0, 0.0)) == Verdict((), 3)


def test_mss_removes_only_that_drafters_own_draws_from_its_q():
    p = np.tile([0.4, 0.3, 0.2, 0.1], (4, 1))
    even = proposal(t0=0.25, t1=0.25, t2=0.25, t3=0.25)
    tree = TokenTree([3, 3, 2], [-1, -1, -1], np.array([0, 1, 0], np.uint8))
    # Rejecting 3 leaves (0.15, 0.05, 0, 0) / 0.2; drafter 1's own 3 then has ratio 0 and q 1/4 leaves (1, 0, 0, 0);
    # drafter 0's second draw has q 1/3 each over 0, 1, 2, so its ratio is 0 too and the residual stays on 0.
    assert verify_mss(tree, p, {0: {0: even, 1: even}}, ScriptedRng(0.5, 0.5, 0.5, 0.3)) == Verdict((), 0)


def test_mss_point_mass_is_accepted_with_its_own_probability_and_then_loses_it():
    p = np.tile([0.25, 0.5, 0.25], (3, 1))
    tree = TokenTree([1, 0], [-1, -1])
    assert verify_mss(tree, p, {}, ScriptedRng(0.49, 0.99)) == Verdict((0,), 2)
    assert verify_mss(tree, p, {}, ScriptedRng(0.5, 0.49, 0.0)) == Verdict((1,), 0)
    assert verify_mss(tree, p, {}, ScriptedRng(0.5, 0.5, 0.0)) == Verdict((), 2)


def test_mss_point_masses_beyond_the_vocabulary_or_repeated_are_only_rejected():
    p = np.tile([0.5, 0.5], (4, 1))
    assert verify_mss(TokenTree([9, 1, 1], [-1, -1, -1]), p, {}, ScriptedRng(0.0, 0.9, 0.0, 0.7)) == Verdict((), 0)


def test_mss_residual_that_vanishes_by_rounding_accepts_instead_of_dividing_by_nothing():
    p = np.array([[0.1 + 0.2, 0.7], [0.5, 0.5]])
    q = {0: {0: proposal(t0=0.3 * (1 + 3e-16), t1=0.7 * (1 - 1e-16))}}
    assert verify_mss(TokenTree.chain([0]), p, q, ScriptedRng(1.0, 0.9)) == Verdict((0,), 1)


@pytest.mark.parametrize(
    ("tokens", "weights", "message"),
    [
        ([0], proposal(t1=1.0), "node 0 to be a draw"),
        ([0], proposal(t0=0.0, t1=1.0), "node 0 to be a draw"),
        ([1, 1], proposal(t0=0.5, t1=0.5), "node 1 to be a draw"),
        ([0], proposal(t0=0.5, t9=0.5), "token ids in 0..2"),
        ([0], proposal(t0=np.nan), "finite"),
        ([0], proposal(t0=-0.5, t1=1.5), "non-negative"),
        ([0], proposal(t0=0.0), "positive sum"),
        ([0], Proposal(np.array([0, 0], np.int32), np.array([0.5, 0.5])), "distinct"),
        ([0], Proposal(np.array([0], np.int32), np.array([0.5, 0.5])), "distinct"),
        ([0], Proposal(np.array([], np.int32), np.array([])), "distinct"),
    ],
)
def test_proposals_that_cannot_have_made_the_tree_are_a_typed_error(tokens, weights, message):
    p = np.full((len(tokens) + 1, 3), [0.0, 0.0, 1.0])
    with pytest.raises(TreeError, match=message):
        verify_mss(TokenTree(tokens, [-1] * len(tokens)), p, {0: {0: weights}}, np.random.default_rng(0))


def test_proposals_need_not_be_normalised():
    p = np.tile([0.5, 0.5], (2, 1))
    q = {0: {0: proposal(t0=3.0, t1=1.0)}}
    assert verify_mss(TokenTree.chain([0]), p, q, ScriptedRng(0.66, 0.0)) == Verdict((0,), 0)
    assert verify_mss(TokenTree.chain([0]), p, q, ScriptedRng(0.67, 0.0)) == Verdict((), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_argmax_takes_the_lowest_of_equals_and_never_nan(dtype):
    nan = np.nan
    rows = [
        ([1.0, 1.0], 0),
        ([0.0, 3.0, 3.0, 1.0], 1),
        ([nan, 1.0, 1.0], 1),
        ([2.0, nan, 2.0], 0),
        ([-np.inf, -np.inf, -5.0], 2),
        ([np.inf, nan, np.inf], 0),
        ([0.0, -0.0], 0),
        ([-0.0, 0.0], 0),
    ]
    for values, expected in rows:
        array = np.array(values, dtype)
        assert first_argmax(array) == expected
        assert argmax(torch.from_numpy(array)[None]).tolist() == [expected]
        assert argmax(torch.from_numpy(array)[None].to(torch.bfloat16)).tolist() == [expected]
    wide = np.zeros((3, 5000), dtype)
    wide[:, [7, 9]] = 1.0
    assert argmax(torch.from_numpy(wide)).tolist() == [7, 7, 7]


def test_a_row_without_any_possible_token_is_a_numerics_error_and_spares_other_rows():
    bad = np.full((2, 3), np.nan)
    bad[1] = 0.0
    assert argmax(torch.from_numpy(bad)).tolist() == [-1, 0]
    for row in ([np.nan, np.nan], [-np.inf, np.nan]):
        with pytest.raises(NumericsError):
            first_argmax(np.array(row))
        for table in (np.array([row]), torch.tensor([row])):
            with pytest.raises(NumericsError):
                verify_coupled(TokenTree.empty(), table, seed=0, position=0)
    for row in ([np.nan, np.nan], [0.0, 0.0], [np.inf, 1.0], [-1.0, 2.0]):
        with pytest.raises(NumericsError):
            distribution(row)


def test_nan_counts_as_zero_probability():
    assert distribution([np.nan, 1.0, 3.0]).tolist() == [0.0, 0.25, 0.75]
    logprobs = np.array([[np.nan, 0.0, np.nan]])
    assert verify_coupled(TokenTree.empty(), logprobs, seed=0, position=0) == Verdict((), 1)


def test_sampling_by_inversion_never_returns_a_token_without_probability():
    probs = np.array([[0.0, 0.5, 0.5, 0.0]])
    assert verify_naive(TokenTree.empty(), probs, ScriptedRng(0.0)).bonus == 1
    assert verify_naive(TokenTree.empty(), probs, ScriptedRng(np.nextafter(1.0, 0.0))).bonus == 2
    assert verify_naive(TokenTree.empty(), probs, ScriptedRng(1.0)).bonus == 2

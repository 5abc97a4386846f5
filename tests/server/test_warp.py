"""Warping against its oracle, the float64 row-by-row version in ``paceline.shared.warp``, and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.shortlist import shortlist
from paceline.server.warp import Rows, warp
from paceline.shared.sampling import SamplingParams
from paceline.shared.warp import warp as warp_row

EMPTY = np.zeros(0, np.int64)


def rows(sampling, count=1, paths=None, prompt=(), output=(), barred=()):
    """Rows of one generation; ``paths`` lists the tokens of each row's path."""
    paths = paths or [()] * count
    return Rows(
        count=len(paths),
        sampling=sampling,
        path_rows=np.repeat(np.arange(len(paths)), [len(path) for path in paths]),
        path_tokens=np.array([token for path in paths for token in path], np.int64),
        prompt=np.array(prompt, np.int32),
        output=np.array(output, np.int32),
        barred=tuple(barred),
    )


def probs_of(scores):
    return torch.softmax(scores.double(), dim=-1).numpy()


def kept(logits, **params):
    scores = warp(torch.tensor([logits], dtype=torch.float32), [rows(SamplingParams(**params))])
    return torch.isfinite(scores[0]).nonzero()[:, 0].tolist()


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 300, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
)


@settings(max_examples=40)
@given(
    groups=st.lists(st.tuples(sampling_params, st.integers(1, 4)), min_size=1, max_size=5),
    vocab_size=st.sampled_from([20, 400]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_mixed_batch_equals_each_row_alone_under_the_oracle(groups, vocab_size, seed):
    rng = np.random.default_rng(seed)
    batch, expected = [], []
    logits = []
    for sampling, count in groups:
        prompt, output = rng.integers(0, 20, 6), rng.integers(0, 20, int(rng.integers(0, 6)))
        paths = [tuple(rng.integers(0, 20, int(rng.integers(0, 4))).tolist()) for _ in range(count)]
        batch.append(rows(sampling, paths=paths, prompt=prompt, output=output))
        for path in paths:
            row = (rng.normal(size=vocab_size) * 3).astype(np.float32)
            logits.append(row)
            seen = [*output.tolist(), *path]
            expected.append(np.exp(warp_row(np.arange(vocab_size), row, sampling, prompt, seen)))
    actual = probs_of(warp(torch.from_numpy(np.stack(logits)), batch))
    assert np.abs(actual - np.stack(expected)).max() < 2e-6
    alone = []
    start = 0
    for group in batch:
        alone.append(warp(torch.from_numpy(np.stack(logits[start : start + group.count])), [group]))
        start += group.count
    assert torch.equal(torch.cat(alone), warp(torch.from_numpy(np.stack(logits)), batch))


@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0])
@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 2000}, {"min_p": 0.9}, {"top_k": 1500, "top_p": 0.99, "min_p": 0.01}]
)
def test_cuts_beyond_the_first_candidates_are_exact(params, spread):
    logits = (np.random.default_rng(1).normal(size=(3, 5000)) * spread).astype(np.float32)
    sampling = SamplingParams(temperature=1.0, **params)
    actual = torch.isfinite(warp(torch.from_numpy(logits.copy()), [rows(sampling, 3)])).numpy()
    expected = np.stack([np.isfinite(warp_row(np.arange(5000), row, sampling)) for row in logits])
    assert np.abs(actual.sum(axis=1) - expected.sum(axis=1)).max() <= 1  # the sum at the cut, rounded
    assert (actual != expected).sum() <= 3


def test_ties_at_a_cut_stay_by_lowest_id():
    assert kept([1.0, 2.0, 1.0, 1.0], temperature=1.0, top_k=2) == [0, 1]
    assert kept([0.0] * 10, temperature=1.0, top_k=3) == [0, 1, 2]
    assert kept([0.0] * 10, temperature=0.5, top_p=0.35) == [0, 1, 2, 3]
    assert kept([0.0] * 600, temperature=1.0, top_p=0.75) == list(range(450))
    assert kept([0.0] * 600, temperature=1.0, top_k=400) == list(range(400))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.5, 0.3, 0.2]).tolist()
    assert kept(logits, temperature=1.0, top_p=0.49) == [0]
    assert kept(logits, temperature=1.0, top_p=0.5) == [0]
    assert kept(logits, temperature=1.0, top_p=0.51) == [0, 1]
    assert kept(logits, temperature=1.0, top_p=0.8) == [0, 1]
    assert kept(logits, temperature=1.0, top_p=0.81) == [0, 1, 2]


def test_top_p_counts_the_mass_that_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, temperature=1.0, top_p=0.57) == [0, 1]
    assert kept(logits, temperature=1.0, top_k=2, top_p=0.57) == [0]


def test_min_p_is_relative_to_the_likeliest():
    assert kept(np.log([0.5, 0.25, 0.24, 0.01]).tolist(), temperature=1.0, min_p=0.5) == [0, 1]


def test_penalties_count_the_own_path_and_not_the_siblings():
    sampling = SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5)
    paths = [(), (3,), (4,), (3, 3), (3, 4)]
    scores = warp(torch.zeros(5, 6), [rows(sampling, paths=paths, prompt=[5, 5], output=[3])])
    expected = np.zeros((5, 6))
    expected[:, 3] = -1.5
    expected[1, 3] = -2.0
    expected[3, 3] = -2.5
    expected[4, 3] = -2.0
    expected[2, 4] = expected[4, 4] = -1.5
    assert np.array_equal(scores.numpy(), expected)


def test_a_token_weighs_the_same_whether_committed_or_on_the_path():
    """Bit for bit: else drafted and undrafted decoding would part at a tie."""
    sampling = SamplingParams(temperature=0.7, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.1)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    committed = [7, 7, 9, 7, 11, 9]
    whole = warp(logits.clone(), [rows(sampling, output=committed)])
    for cut in range(len(committed)):
        split = rows(sampling, paths=[tuple(committed[cut:])], output=committed[:cut])
        assert torch.equal(warp(logits.clone(), [split]), whole)


def test_repetition_penalty_shrinks_towards_zero_from_both_sides_and_counts_the_prompt_once():
    sampling = SamplingParams(repetition_penalty=2.0)
    scores = warp(torch.tensor([[4.0, -4.0, 4.0, 4.0]]), [rows(sampling, paths=[(2,)], prompt=[0, 0, 1], output=[0])])
    assert scores.tolist() == [[2.0, -8.0, 2.0, 4.0]]


def test_min_tokens_bars_the_ends_until_enough_tokens_precede_on_the_path():
    sampling = SamplingParams(min_tokens=3)
    scores = warp(torch.zeros(3, 4), [rows(sampling, paths=[(), (0,), (0, 0)], output=[1], barred=[2, 3, 2])])
    assert torch.isfinite(scores).tolist() == [[True, True, False, False]] * 2 + [[True] * 4]


def test_logit_bias_can_force_and_forbid():
    sampling = SamplingParams(temperature=1.0, logit_bias={1: 100.0, 0: -100.0})
    assert probs_of(warp(torch.zeros(2, 3), [rows(sampling, 2)]))[:, 1].min() > 1 - 1e-9


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-40, 1e-300])
def test_tiny_temperatures_tend_to_greedy_without_nan(temperature):
    scores = warp(torch.tensor([[3.0, 5.0, -torch.inf, 4.9]]), [rows(SamplingParams(temperature=temperature))])
    assert not scores.isnan().any()
    assert probs_of(scores).argmax() == 1
    assert probs_of(scores)[0, 1] == pytest.approx(1.0)


def test_nan_becomes_impossible_and_other_rows_keep_their_values():
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [1.0, 2.0, 3.0]])
    scores = warp(
        logits.clone(), [rows(SamplingParams(temperature=1.0, top_k=1), 1), rows(SamplingParams(temperature=1.0), 1)]
    )
    assert scores.tolist() == [[-float("inf"), -float("inf"), 2.0], [1.0, 2.0, 3.0]]


def test_the_oracle_itself_by_hand():
    p = np.exp(warp_row([5, 6, 7], np.log([0.5, 0.3, 0.2]), SamplingParams(temperature=0.5, top_k=2)))
    assert p == pytest.approx([25 / 34, 9 / 34, 0.0])
    assert np.exp(warp_row([5, 6, 7], [1.0, np.nan, 1.0], SamplingParams())).tolist() == [1.0, 0.0, 0.0]
    assert (warp_row([1, 2], [np.nan, -np.inf], SamplingParams(temperature=1.0)) == -np.inf).all()
    assert len(warp_row([], [], SamplingParams(temperature=1.0))) == 0


FILTERS = [
    {"top_p": 0.9},
    {"top_k": 40},
    {"top_k": 1500, "top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1e-4},
    {"top_p": 0.999, "min_p": 0.01},
    {"top_k": 7, "min_p": 0.3, "top_p": 0.5},
]


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0, 60.0])
@pytest.mark.parametrize("params", FILTERS)
def test_a_short_list_holds_the_same_tokens_with_the_same_bits(params, spread):
    logits = torch.randn(9000, generator=torch.Generator().manual_seed(3)) * spread
    logits[::7] = logits[0]  # ties
    sampling = SamplingParams(temperature=0.7, **params)
    whole = warp(logits[None].clone(), [rows(sampling)])[0]
    few = shortlist(logits.numpy(), sampling)
    kept_ids = torch.isfinite(whole).nonzero()[:, 0].numpy()
    if few is None:
        assert len(kept_ids) >= 1000 or spread in (0.5, 60.0)
    else:
        assert np.array_equal(few[0], kept_ids)
        assert np.array_equal(few[1], whole.numpy()[kept_ids])


def test_a_short_list_keeps_the_lowest_of_equals_and_leaves_odd_rows_to_the_whole_row():
    zeros = np.zeros(600, np.float32)
    few = shortlist(zeros, SamplingParams(temperature=1.0, top_k=5))
    assert few is not None and few[0].tolist() == [0, 1, 2, 3, 4]
    assert shortlist(zeros, SamplingParams(temperature=1.0)) is None
    assert shortlist(zeros, SamplingParams(top_k=5)) is None
    assert shortlist(zeros - np.inf, SamplingParams(temperature=1.0, top_k=5)) is None
    assert shortlist(np.zeros(9000, np.float32), SamplingParams(temperature=1.0, top_k=5)) is None

"""A whole step at once: generations with different parameters side by side, on scripted logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.choose import Choice, Request, choices_on_device, choose, likeliest
from paceline.server.verify import verify_coupled, verify_greedy
from paceline.shared.errors import NumericsError, PacelineError, TreeError
from paceline.shared.messages import Proposal
from paceline.shared.quantise import draw, quantised
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.tree import TokenTree
from paceline.shared.warp import warp as warp_row

VOCAB_SIZE = 32
NONE = np.zeros(0, np.int32)


def ids(*tokens):
    return np.array(tokens, np.int32)


def request(
    tree=None,
    *,
    verifier=Verifier.GREEDY,
    seed=5,
    prompt=(1, 2, 3),
    output=(),
    eos_ids=(),
    proposals=None,
    choice=0,
    **params,
):
    return Request(
        tree=TokenTree.empty() if tree is None else tree,
        sampling=SamplingParams(**params),
        verifier=verifier,
        seed=seed,
        prompt=ids(*prompt),
        output=ids(*output),
        choice=choice,
        eos_ids=tuple(eos_ids),
        proposals=proposals or {},
    )


def random_tree(rng, num_nodes, vocab_size=VOCAB_SIZE):
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    return TokenTree(rng.integers(0, vocab_size, num_nodes), np.array(parents, np.int32))


class Script:
    """A toy target: logits are a table indexed by the last token; ``shift`` makes several of them differ."""

    def __init__(self, seed=0, spread=2.0, vocab_size=VOCAB_SIZE):
        rng = np.random.default_rng(seed)
        self.table = torch.from_numpy((rng.normal(size=(vocab_size, vocab_size)) * spread).astype(np.float32))

    def logits(self, requests):
        rows = []
        for one in requests:
            last = [*one.prompt.tolist(), *one.output.tolist()][-1]
            rows += [last, *one.tree.tokens.tolist()]
        return self.table[torch.tensor(rows)]


def decode(script, start, length, trees, neighbours=()):
    """Decode ``length`` tokens step by step; ``trees(request)`` drafts, neighbours share every batch."""
    current = start
    rng = np.random.default_rng(99)
    steps = 0
    while len(current.output) < length:
        drafted = replace(current, tree=trees(current))
        batch = [*neighbours, drafted] if rng.random() < 0.5 else [drafted, *neighbours]
        outcome = choose(script.logits(batch), batch)[batch.index(drafted)]
        assert isinstance(outcome, Choice)
        run = [*(int(drafted.tree.tokens[node]) for node in outcome.nodes), outcome.bonus]
        current = replace(current, output=np.concatenate([current.output, ids(*run)]))
        steps += 1
    return current.output[:length].tolist(), steps


def no_draft(_request):
    return TokenTree.empty()


def random_drafts(seed):
    rng = np.random.default_rng(seed)
    return lambda _request: random_tree(rng, int(rng.integers(0, 9)))


def oracle(tokens):
    return lambda current: TokenTree.chain(tokens[len(current.output) :][:5])


SETTINGS = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1.0, "verifier": Verifier.COUPLED},
    {"temperature": 0.7, "top_p": 0.9, "verifier": Verifier.COUPLED},
    {"temperature": 1.3, "top_k": 5, "frequency_penalty": 0.8, "verifier": Verifier.COUPLED},
    {
        "temperature": 1.0,
        "min_p": 0.1,
        "logit_bias": {4: 3.0},
        "min_tokens": 30,
        "eos_ids": (2, 9),
        "verifier": Verifier.COUPLED,
    },
]


@pytest.mark.parametrize("params", SETTINGS)
def test_tokens_are_the_same_with_any_draft_and_any_neighbours(params):
    script = Script()
    start = request(**params)
    reference, steps = decode(script, start, 32, no_draft)
    assert steps == 32
    for seed in range(4):
        assert decode(script, start, 32, random_drafts(seed))[0] == reference
    drafted, steps = decode(script, start, 32, oracle(reference))
    assert drafted == reference
    assert steps <= 7
    neighbours = [
        request(random_tree(np.random.default_rng(index), 3), seed=index, **other)
        for index, other in enumerate(SETTINGS)
    ]
    assert decode(script, start, 32, random_drafts(7), neighbours)[0] == reference


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), picks=st.lists(st.sampled_from(range(len(SETTINGS))), min_size=1, max_size=5))
def test_deciding_all_rows_on_the_device_equals_walking_row_by_row(seed, picks):
    rng = np.random.default_rng(seed)
    batch = [
        request(
            random_tree(rng, int(rng.integers(0, 7))),
            seed=int(rng.integers(0, 2**63)),
            output=rng.integers(0, 32, 4),
            **SETTINGS[pick],
        )
        for pick in picks
    ]
    logits = Script(seed % 7).logits(batch)
    at_once = choices_on_device(logits, batch)
    for index, outcome in enumerate(choose(logits, batch)):
        assert isinstance(outcome, Choice)
        verdict = verify_greedy(batch[index].tree, at_once[index])
        assert (verdict.nodes, verdict.bonus) == (outcome.nodes, outcome.bonus)


def test_choices_on_the_device_are_chunked_without_a_difference():
    rng = np.random.default_rng(3)
    batch = [request(random_tree(rng, 4), **SETTINGS[index % len(SETTINGS)]) for index in range(9)]
    logits = Script().logits(batch)
    whole = choices_on_device(logits, batch)
    parts = choices_on_device(logits, batch, max_cells=6 * VOCAB_SIZE)
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(whole[first], parts[first]) for first in whole)


def test_coupled_choices_are_those_of_the_verifier_on_log_softmax():
    rng = np.random.default_rng(4)
    for _ in range(50):
        tree = random_tree(rng, 5)
        one = request(tree, verifier=Verifier.COUPLED, temperature=1.0, seed=int(rng.integers(0, 2**63)), choice=2)
        logits = Script().logits([one])
        verdict = verify_coupled(tree, torch.log_softmax(logits, -1), seed=one.seed, position=one.position, choice=2)
        (outcome,) = choose(logits, [one])
        assert isinstance(outcome, Choice)
        assert (outcome.nodes, outcome.bonus) == (verdict.nodes, verdict.bonus)


@pytest.mark.parametrize("drafted", [False, True])
def test_two_equal_top_logits_give_the_lower_id_with_and_without_a_draft(drafted):
    script = Script()
    script.table[:] = 0.0
    script.table[:, [7, 9]] = 1.0
    trees = (lambda _: TokenTree([9, 7, 7, 9], [-1, -1, 1, 1])) if drafted else no_draft
    assert decode(script, request(), 12, trees)[0] == [7] * 12
    assert decode(script, request(frequency_penalty=0.001), 4, trees)[0] == [7, 9, 7, 9]


def test_presence_penalty_stops_a_loop_inside_a_run():
    script = Script()
    script.table[:] = 0.0
    script.table[:, 4] = 1.0
    script.table[:, 6] = 0.5
    one = request(TokenTree.chain([4, 4, 4]), presence_penalty=2.0)
    (outcome,) = choose(script.logits([one]), [one])
    assert outcome == Choice((0,), 6)


def test_a_sibling_is_not_penalised_for_its_sibling():
    script = Script()
    script.table[:] = 0.0
    script.table[:, 6] = 1.0
    one = request(TokenTree([6, 8, 6, 6], [-1, -1, 1, 0]), presence_penalty=2.0, logit_bias={8: 2.0})
    script.table[8, 8] = -5.0
    (outcome,) = choose(script.logits([one]), [one])
    assert outcome == Choice((1, 2), 0)


@pytest.mark.parametrize("depth", [2, 8, 48])
@pytest.mark.parametrize("params", SETTINGS[1:3])
def test_rejected_drafts_leave_no_mark_on_penalties(depth, params):
    script = Script()
    start = request(**params)
    reference, _ = decode(script, start, 30, no_draft)

    def wrong(current):
        token = (reference[len(current.output)] + 1) % VOCAB_SIZE
        return TokenTree.chain([token] * depth)

    assert decode(script, start, 30, wrong) == (reference, 30)


def test_frequency_penalty_of_either_sign_changes_the_text():
    script = Script()
    low, high = (decode(script, request(frequency_penalty=value), 30, random_drafts(0))[0] for value in (-2.0, 2.0))
    assert low != high
    assert low == decode(script, request(frequency_penalty=-2.0), 30, no_draft)[0]


def test_the_same_seed_repeats_and_other_seeds_and_choices_differ():
    script = Script()
    params = {"verifier": Verifier.COUPLED, "temperature": 2.0}
    texts = [decode(script, request(seed=42, **params), 10, random_drafts(index))[0] for index in range(5)]
    assert all(text == texts[0] for text in texts)
    others = [
        decode(script, request(seed=seed, choice=choice, **params), 10, no_draft)[0]
        for seed in range(1, 4)
        for choice in range(2)
    ]
    assert len({tuple(text) for text in others}) == 6


def mss_request(rng, **params):
    """Two children of the anchor, drawn from a quantised q."""
    q = quantised(np.arange(VOCAB_SIZE), rng.normal(size=VOCAB_SIZE), 16)
    tree = TokenTree(draw(q, 2, rng), np.array([-1, -1], np.int32))
    return request(tree, verifier=Verifier.MSS, proposals={0: {0: q}}, **params)


@pytest.mark.parametrize("verifier", [Verifier.MSS, Verifier.NAIVE])
def test_mss_and_naive_repeat_with_their_seed_and_position(verifier):
    rng = np.random.default_rng(0)
    one = replace(mss_request(rng, temperature=1.0), verifier=verifier)
    script = Script()
    outcomes = [choose(script.logits([one]), [one])[0] for _ in range(3)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    varied = [choose(script.logits([one]), [replace(one, seed=seed)])[0] for seed in range(40)]
    assert len({(outcome.nodes, outcome.bonus) for outcome in varied if isinstance(outcome, Choice)}) > 5


def test_every_verifier_at_temperature_zero_is_greedy():
    rng = np.random.default_rng(1)
    for _ in range(20):
        one = mss_request(rng)
        logits = Script().logits([one])
        best = int(logits[0].argmax())
        for verifier in Verifier:
            (outcome,) = choose(logits, [replace(one, verifier=verifier)])
            assert isinstance(outcome, Choice)
            assert (int(one.tree.tokens[outcome.nodes[0]]) if outcome.nodes else outcome.bonus) == best


def test_logprobs_are_the_targets_own_whatever_was_drafted():
    script = Script()
    params = {"temperature": 0.7, "verifier": Verifier.COUPLED, "frequency_penalty": 1.0, "logprobs": 3}
    reference, _ = decode(script, request(**params), 12, no_draft)
    one = request(TokenTree.chain(reference[:4]), **params)
    other = request(TokenTree.chain([1, 2]), logprobs=0)
    silent = request()
    first, second, third = choose(script.logits([one, other, silent]), [one, other, silent])
    assert isinstance(first, Choice) and isinstance(second, Choice) and isinstance(third, Choice)
    assert len(first.logprobs) == 5
    last = 3
    for token, entry in zip(reference[:5], first.logprobs, strict=True):
        exact = torch.log_softmax(script.table[last].double(), -1)
        assert entry.logprob == pytest.approx(float(exact[token]), abs=1e-5)
        assert entry.logprob < 0.0
        assert [top for top, _ in entry.top] == exact.argsort(descending=True)[:3].tolist()
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        last = token
    assert len(second.logprobs) == len(second.nodes) + 1
    assert all(entry.top == () for entry in second.logprobs)
    assert third.logprobs == ()


def test_top_logprobs_break_ties_by_lowest_id():
    table = torch.zeros(1, 500)
    table[0, 400] = 1.0
    assert [token for token, _ in likeliest(table, 4)[0]] == [400, 0, 1, 2]


def test_a_generation_with_nan_logits_fails_alone():
    script = Script()
    batch = [request(**SETTINGS[index]) for index in (0, 3, 4)] + [
        mss_request(np.random.default_rng(0), temperature=1.0)
    ]
    logits = script.logits(batch)
    expected = choose(logits, batch)
    for index, row in enumerate((0, 1, 2, 3)):
        broken = logits.clone()
        broken[row] = float("nan")
        outcomes = choose(broken, batch)
        assert isinstance(outcomes[index], NumericsError)
        assert outcomes[:index] + outcomes[index + 1 :] == expected[:index] + expected[index + 1 :]


def test_a_single_nan_never_wins_under_any_verifier():
    script = Script()
    rng = np.random.default_rng(2)
    for params in SETTINGS:
        one = request(**params)
        logits = script.logits([one])
        logits[0, 11] = float("nan")
        (outcome,) = choose(logits, [one])
        logits[0, 11] = -float("inf")
        assert choose(logits, [one]) == [outcome]
    one = mss_request(rng, temperature=1.0)
    logits = script.logits([one])
    logits[:, 11] = float("nan")
    assert not isinstance(choose(logits, [one])[0], PacelineError)


def test_a_generation_with_impossible_proposals_fails_alone():
    good = request()
    bad = request(
        TokenTree.chain([3]),
        verifier=Verifier.MSS,
        temperature=1.0,
        proposals={0: {0: Proposal(ids(4), np.array([1.0]))}},
    )
    logits = Script().logits([good, bad])
    first, second = choose(logits, [good, bad])
    assert isinstance(first, Choice)
    assert isinstance(second, TreeError)


def test_barring_every_token_is_an_error_and_not_a_token():
    one = request(min_tokens=2, eos_ids=range(VOCAB_SIZE))
    assert isinstance(choose(Script().logits([one]), [one])[0], NumericsError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_decided_in_float32(dtype):
    for params in SETTINGS:
        one = request(TokenTree.chain([1, 2]), logprobs=2, **params)
        logits = Script().logits([one]).to(dtype)
        assert choose(logits, [one]) == choose(logits.float(), [one])


def test_logits_with_a_wrong_number_of_rows_are_refused():
    with pytest.raises(ValueError, match="expected 1 rows"):
        choose(torch.zeros(2, 4), [request()])


def test_filters_hold_inside_trees():
    """With top_k = 2 a step never emits anything but the two likeliest after penalties, at any depth."""
    script = Script()
    rng = np.random.default_rng(5)
    for seed in range(60):
        one = request(
            random_tree(rng, 8), verifier=Verifier.COUPLED, temperature=1.3, top_k=2, presence_penalty=0.5, seed=seed
        )
        (outcome,) = choose(script.logits([one]), [one])
        assert isinstance(outcome, Choice)
        run = [*(int(one.tree.tokens[node]) for node in outcome.nodes), outcome.bonus]
        for place, token in enumerate(run):
            last = ([3, *run])[place]
            warped = warp_row(np.arange(VOCAB_SIZE), script.table[last].numpy(), one.sampling, one.prompt, run[:place])
            assert np.isfinite(warped[token])

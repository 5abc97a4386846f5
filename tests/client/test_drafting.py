"""Acceptance, policies, rankings and the controller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import NO_LOGPROB, Candidates
from paceline.client.drafting.live_tree import ANCHOR_ROW, Labels, LiveTree
from paceline.client.drafting.policy import BestFirstPolicy, CallCost, Conditions, StaticPolicy
from paceline.client.drafting.ranking import Situation, make_ranking, warp
from paceline.shared.errors import ParameterError
from paceline.shared.messages import Commit, Limits, StepTime
from paceline.shared.noise import gumbel
from paceline.shared.sampling import SamplingParams, Verifier

WIDE = Conditions(threshold=0.01, lateness=0.0, follow=0.5, max_depth=32, max_nodes=64)


def learn(acceptance, priors, hits, depths=None):
    depths = np.ones(len(priors), np.int32) if depths is None else depths
    chances, cells = acceptance.estimate(0, depths, np.array(priors))
    acceptance.learn(Labels(cells, np.array(hits), chances))
    return chances


def test_always_wrong_drafter_is_unmasked_within_ten_labels():
    acceptance = Acceptance()
    assert learn(acceptance, [0.6], [False])[0] == pytest.approx(0.6)
    for _ in range(9):
        last = learn(acceptance, [0.6], [False])[0]
    assert last < 0.05
    assert acceptance.skill(0) < 0.4


def test_estimate_converges_to_the_true_rate_of_its_confidence():
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    for _ in range(600):
        learn(acceptance, [0.9, 0.3], [rng.random() < 0.5, rng.random() < 0.6])
    chances, _ = acceptance.estimate(0, np.array([1, 1], np.int32), np.array([0.9, 0.3]))
    assert chances == pytest.approx([0.5, 0.6], abs=0.1)


def tree_of(parents, tokens, chances, sent=True):
    tree = LiveTree()
    for parent, token, chance in zip(parents, tokens, chances, strict=True):
        tree.append(np.array([parent]), np.array([token], np.int32), np.array([chance]), np.zeros(1, np.int32), 0)
    if sent:
        tree.ids[:] = np.arange(len(tree))
    return tree


def test_static_policy_expands_level_by_level_to_its_depth():
    policy = StaticPolicy([3, 2])
    assert policy.max_children(np.array([0, 1, 2], np.int32)).tolist() == [3, 2, 0]
    tree = LiveTree()
    assert policy.select(tree, 0, WIDE, CallCost()).anchor
    tree = tree_of([ANCHOR_ROW, ANCHOR_ROW, 0], [1, 2, 3], [0.5, 0.2, 0.5])
    tree.anchor_expanded = 1
    assert policy.select(tree, 0, WIDE, CallCost()).rows.tolist() == [0, 1]
    tree.mark_expanded(np.array([0, 1]), 0, anchor=False)
    assert policy.select(tree, 0, WIDE, CallCost()).is_empty
    with pytest.raises(ParameterError, match="at least one width"):
        StaticPolicy([0])


def test_best_first_policy_expands_the_likeliest_and_skips_the_hopeless():
    tree = tree_of([ANCHOR_ROW, ANCHOR_ROW, 0], [1, 2, 3], [0.8, 0.0001, 0.9])
    tree.anchor_expanded = 1
    choice = BestFirstPolicy().select(tree, 0, WIDE, CallCost(base_s=0.0, per_row_s=1.0))
    assert choice.rows.tolist() == [0, 2], "the best unexpanded row, with the ancestor that it needs"
    many = BestFirstPolicy().select(tree, 0, WIDE, CallCost(base_s=1.0, per_row_s=0.0))
    assert many.rows.tolist() == [0, 2], "row 1 is below the threshold however cheap the call is"


def test_best_first_policy_sends_connected_rows_within_the_node_budget():
    tree = tree_of([ANCHOR_ROW, 0, 1, ANCHOR_ROW], [1, 2, 3, 4], [0.9, 0.9, 0.9, 0.2], sent=False)
    narrow = Conditions(threshold=0.01, lateness=0.0, follow=0.5, max_depth=32, max_nodes=2)
    assert BestFirstPolicy().send(tree, narrow).tolist() == [0, 1]
    assert BestFirstPolicy().send(tree, WIDE).tolist() == [0, 1, 2, 3]
    shallow = Conditions(threshold=0.01, lateness=0.0, follow=0.5, max_depth=2, max_nodes=64)
    assert BestFirstPolicy().send(tree, shallow).tolist() == [0, 1, 3]
    silent = Conditions(threshold=0.01, lateness=0.0, follow=0.5, max_depth=32, max_nodes=64, sends=False)
    assert BestFirstPolicy().send(tree, silent).tolist() == []


def test_room_is_kept_for_what_grows_while_the_answer_is_under_way():
    tree = tree_of([ANCHOR_ROW] * 12, list(range(12)), [0.9**rank / 12 for rank in range(12)], sent=False)
    near = Conditions(threshold=0.01, lateness=0.0, follow=0.5, max_depth=32, max_nodes=9)
    far = replace(near, in_flight=2.0)
    assert BestFirstPolicy().send(tree, near).tolist() == list(range(9))
    assert BestFirstPolicy().send(tree, far).tolist() == [0, 1, 2]
    wide = replace(far, max_nodes=64)
    assert BestFirstPolicy().send(tree, wide).tolist() == list(range(12)), "where there is plenty, none is held back"


def test_lateness_makes_a_deep_likely_chain_worth_more_than_an_early_sibling():
    late = Conditions(threshold=0.01, lateness=6.0, follow=0.7, max_depth=32, max_nodes=64)
    values = late.values(np.array([1, 4], np.int32), np.array([0.2, 0.7**4]))
    assert values[1] > values[0]


CANDIDATES = Candidates(np.array([[3, 1, 7, 2]], np.int32), np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)))


def situation(limit=8, odds=1.0, position=11):
    return Situation(np.array([position]), np.array([odds]), np.array([limit], np.int32), 0.01)


def test_greedy_ranks_by_likelihood_and_logit_bias_counts():
    ranked = make_ranking(Verifier.GREEDY, SamplingParams()).rank(CANDIDATES, situation(3))
    assert ranked.tokens.tolist() == [3, 1, 7]
    assert ranked.priors == pytest.approx([0.5, 0.3, 0.15], rel=1e-5)
    biased = make_ranking(Verifier.GREEDY, SamplingParams(logit_bias={3: -100.0})).rank(CANDIDATES, situation(3))
    assert biased.tokens.tolist() == [1, 7, 2]


def test_warp_follows_the_targets_order_of_parameters():
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
    probs = np.exp(warp(CANDIDATES, params))[0]
    squared = np.array([0.25, 0.09, 0.0225])
    squared /= squared.sum()
    kept = squared[:2] if squared[:2].sum() >= 0.9 else squared
    expected = [*(kept / kept.sum()), *([0.0] * (4 - len(kept)))]
    assert probs == pytest.approx(expected, abs=1e-6)


def test_coupled_ranks_by_the_servers_own_noise():
    params = SamplingParams(temperature=1.0, seed=9)
    ranked = make_ranking(Verifier.COUPLED, params, choice=2).rank(CANDIDATES, situation(4))
    scores = CANDIDATES.logprobs[0] + gumbel(9, 11, CANDIDATES.token_ids[0], 2)
    expected = CANDIDATES.token_ids[0][np.argsort(-scores)]
    assert ranked.tokens.tolist() == expected[: len(ranked.tokens)].tolist()
    assert (np.diff(ranked.priors) <= 0).all()


def test_coupled_first_child_is_the_targets_token_when_the_draft_is_the_target():
    rng = np.random.default_rng(1)
    logprobs = np.log(rng.dirichlet(np.ones(16), 200)).astype(np.float32)
    ranking = make_ranking(Verifier.COUPLED, SamplingParams(temperature=1.0, seed=3))
    ids = np.tile(np.arange(16, dtype=np.int32), (1, 1))
    for position in range(200):
        row = Candidates(ids, logprobs[position : position + 1])
        ranked = ranking.rank(row, situation(4, position=position))
        target = int(np.argmax(logprobs[position] + gumbel(3, position, ids[0])))
        assert ranked.tokens[0] == target


def test_mss_draws_distinct_children_from_the_proposal_as_often_as_it_says():
    params = SamplingParams(temperature=1.0, seed=5)
    ranking = make_ranking(Verifier.MSS, params)
    counts = np.zeros(8)
    for _ in range(1500):
        ranked = ranking.rank(CANDIDATES, situation(2))
        assert len(set(ranked.tokens.tolist())) == len(ranked.tokens) == 2
        counts[ranked.tokens[0]] += 1
    proposal = ranked.proposals[0]
    for token, prob in zip(proposal.token_ids, proposal.probs, strict=True):
        assert counts[token] / 1500 == pytest.approx(prob, abs=0.05)


def test_mss_number_of_draws_depends_on_odds_and_not_on_tokens():
    ranking = make_ranking(Verifier.MSS, SamplingParams(temperature=1.0, seed=5))
    sizes = {
        odds: {len(ranking.rank(CANDIDATES, situation(4, odds)).tokens) for _ in range(50)} for odds in (1.0, 0.05)
    }
    assert all(len(found) == 1 for found in sizes.values())
    assert max(sizes[1.0]) > max(sizes[0.05])


def test_point_masses_keep_their_confidence_under_every_verifier():
    guess = Candidates(np.array([[4, 0]], np.int32), np.array([[np.log(0.7), NO_LOGPROB]], np.float32), True)
    for verifier in Verifier:
        params = SamplingParams(temperature=0.0 if verifier is Verifier.GREEDY else 1.0, seed=1)
        ranked = make_ranking(verifier, params).rank(guess, situation())
        assert ranked.tokens.tolist() == [4]
        assert ranked.priors == pytest.approx([0.7]) or verifier is Verifier.COUPLED
        assert not ranked.proposals


def test_coupled_weighs_point_masses_by_their_noise():
    guess = Candidates(np.array([[4, 8]], np.int32), np.log(np.array([[0.3, 0.2]], np.float32)), True)
    ranking = make_ranking(Verifier.COUPLED, SamplingParams(temperature=1.0, seed=1))
    priors = {4: 0.0, 8: 0.0}
    for position in range(3000):
        ranked = ranking.rank(guess, situation(position=position))
        for token, prior in zip(ranked.tokens.tolist(), ranked.priors.tolist(), strict=True):
            priors[token] += prior / 3000
        if len(ranked.tokens) == 2:
            noise = gumbel(1, position, ranked.tokens)
            scores = np.log([{4: 0.3, 8: 0.2}[token] for token in ranked.tokens.tolist()]) + noise
            assert scores[0] >= scores[1]
    # Over all noise a token wins as often as its confidence says.
    assert priors[4] == pytest.approx(0.3, abs=0.02)
    assert priors[8] == pytest.approx(0.2, abs=0.02)


def test_coupled_asks_for_the_tokens_that_the_noise_favours():
    ranking = make_ranking(Verifier.COUPLED, SamplingParams(temperature=1.0, seed=5), choice=1, vocab_size=4000)
    found = ranking.extra_ids(np.array([20, 21, 21]))
    noise = np.maximum(gumbel(5, 20, np.arange(4000), 1), gumbel(5, 21, np.arange(4000), 1))
    assert found.tolist() == np.flatnonzero(noise > 5.0).tolist()
    assert 20 < len(found) < 100


@pytest.mark.parametrize(
    ("verifier", "changes"),
    [
        (Verifier.GREEDY, {"temperature": 0.0}),
        (Verifier.NAIVE, {}),
        (Verifier.MSS, {}),
        (Verifier.COUPLED, {"temperature": 0.3}),
        (Verifier.COUPLED, {"top_p": 0.9}),
        (Verifier.COUPLED, {"top_k": 20}),
        (Verifier.COUPLED, {"min_p": 0.05}),
    ],
)
def test_no_extra_tokens_are_asked_for_where_no_tail_is_sampled(verifier, changes):
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **changes})
    assert not len(make_ranking(verifier, params, vocab_size=4000).extra_ids(np.array([20])))


def test_coupled_noise_is_the_same_whether_a_whole_row_is_kept_or_not():
    params = SamplingParams(temperature=1.0, seed=9)
    kept, fresh = (make_ranking(Verifier.COUPLED, params, vocab_size=size) for size in (50, 0))
    for position in range(40):
        kept.extra_ids(np.array([position]))
    for position in (0, 11, 39):
        ranked = [ranking.rank(CANDIDATES, situation(4, position=position)) for ranking in (kept, fresh)]
        assert ranked[0].tokens.tolist() == ranked[1].tokens.tolist()
        assert ranked[0].priors == pytest.approx(ranked[1].priors)


def commit(tokens, scored, budget=32):
    return Commit(0, 0, np.zeros(tokens, np.int32), tokens - 1, scored, budget, 0.03)


def test_controller_goes_off_when_nodes_do_not_pay_and_comes_back_after_good_probes():
    controller = Controller(StepTime(0.03, 0.001), Limits())
    for _ in range(10):
        controller.observe_commit(commit(1, 16), top_hit=False)
    assert not controller.is_on
    assert "off (acceptance 0.00, est. speed-up 0.6" in controller.reason
    assert not controller.conditions(32).sends
    for _ in range(60):
        controller.observe_commit(commit(1, 0), top_hit=True)
    assert controller.is_on


def test_controller_stays_on_while_it_pays_and_can_be_held_on():
    controller = Controller(StepTime(0.03, 0.0001), Limits())
    for _ in range(40):
        controller.observe_commit(commit(3, 16), top_hit=True)
    assert controller.is_on
    assert controller.speed_up > 2.0
    held = Controller(StepTime(0.03, 0.001), Limits(), can_switch=False)
    for _ in range(40):
        held.observe_commit(commit(1, 16), top_hit=False)
    assert held.is_on


@pytest.mark.parametrize(("hits", "is_on"), [(0.1, False), (0.9, True)])
def test_controller_measures_what_nodes_cost_where_the_first_ones_are_the_dearest(hits, is_on):
    """By its line two nodes cost 4 % of a step; really they cost 30 %, as on a CPU."""
    controller = Controller(StepTime(0.065, 0.001), Limits())
    reasons = set()
    for number in range(60):
        has_nodes = number % 2 == 1 and controller.is_on
        tokens = 1 + (has_nodes and number % 20 < 20 * hits)
        step_s = 0.086 if has_nodes else 0.066
        controller.observe_commit(replace(commit(tokens, 2 * has_nodes), step_s=step_s), top_hit=tokens > 1)
        reasons.add(controller.reason.split()[0])
    assert ("off" not in reasons) == is_on


def test_controller_learns_what_a_call_costs():
    controller = Controller(StepTime(0.03, 0.0001), Limits())
    for rows in [1, 4, 8, 16] * 20:
        controller.observe_call(0, rows, 0.002 + 0.0005 * rows)
    assert controller.call_cost(0).base_s == pytest.approx(0.002, rel=0.1)
    assert controller.call_cost(0).per_row_s == pytest.approx(0.0005, rel=0.1)


def test_controller_allows_more_nodes_on_longer_links():
    controller = Controller(StepTime(0.03, 0.0001), Limits())
    for _ in range(3):
        controller.observe_commit(commit(2, 8, budget=16), top_hit=True)
    near = controller.conditions(32).max_nodes
    controller.observe_rtt(0.12)
    assert controller.conditions(32).max_nodes > 3 * near
    assert controller.conditions(32).lateness > 3

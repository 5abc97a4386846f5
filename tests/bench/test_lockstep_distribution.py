"""Sampled text end to end has the target's distribution: real sessions, real engine, frames that come late.

A Markov target of 16 tokens, a draft model that knows it with an error, and an n-gram drafter beside it. What follows
each token, pooled over all positions but the last, is compared with p. A client that leaves a drawn child out because
of its token is caught by the same test.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.bench.lockstep import LockstepSettings, run_lockstep, welcome_of
from paceline.bench.markov import MarkovDrafter
from paceline.client import session as session_module
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.ranking import make_ranking
from paceline.client.session import Task
from paceline.server.engine import Engine, EngineSettings
from paceline.server.scripted import ScriptedTarget
from paceline.shared.messages import Limits
from paceline.shared.sampling import SamplingParams, Verifier

VOCAB_SIZE = 16
MAX_TOKENS = 9
PROMPT = np.array([3, 5, 7, 3, 5, 7, 3, 5], np.int32)
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=MAX_TOKENS)
TABLE = (np.random.default_rng(16).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 1.5).astype(np.float32)
GUESS = TABLE + np.random.default_rng(17).normal(size=TABLE.shape).astype(np.float32)


def target_distribution():
    """float64[V, V]: p after each token."""
    p = torch.softmax(torch.from_numpy(TABLE).double() / SAMPLING.temperature, -1).numpy()
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    ranked[np.cumsum(ranked, axis=1) - ranked >= SAMPLING.top_p] = 0.0
    np.put_along_axis(p, order, ranked, axis=1)
    return p / p.sum(axis=1, keepdims=True)


def sample(verifier, num_texts, delay, max_nodes=32, limits=None):
    """int64[V, V]: what followed each token, and how many tokens each drafter contributed."""
    target = ScriptedTarget(lambda context: TABLE[context[-1]], VOCAB_SIZE)
    engine = Engine(target, EngineSettings(max_running=8, max_nodes=max_nodes, limits=limits or Limits()))
    tasks = [Task(PROMPT, replace(SAMPLING, seed=seed), verifier) for seed in range(num_texts)]
    settings = LockstepSettings(num_parallel=8, delay=delay, calls=4, can_switch=False)
    answers = run_lockstep(engine, welcome_of(engine), tasks, (MarkovDrafter(GUESS), NGramDrafter()), settings)
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.int64)
    for answer in answers:
        text = [int(PROMPT[-1]), *answer.token_ids[: MAX_TOKENS - 1].tolist()]
        np.add.at(counts, (text[:-1], text[1:]), 1)
    proposers = np.concatenate([answer.proposers for answer in answers])
    return counts, np.bincount(proposers + 1, minlength=3)[1:]


def p_value(counts):
    """Chi-square of all rows together; cells with fewer than 5 expected are pooled within their row."""
    statistic, freedom = 0.0, 0
    for seen, p in zip(counts, target_distribution(), strict=True):
        assert not seen[p == 0.0].any(), "a token came out that the filters rule out"
        expected = p * seen.sum()
        rare = expected < 5.0
        observed, wanted = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
        some = wanted > 0.0
        statistic += float((np.square(observed - wanted)[some] / wanted[some]).sum())
        freedom += max(int(some.sum()) - 1, 0)
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(
    ("verifier", "delay", "max_nodes"),
    [
        (Verifier.MSS, 0, 32),
        (Verifier.MSS, 1, 32),
        (Verifier.MSS, 2, 5),
        (Verifier.NAIVE, 1, 32),
        (Verifier.COUPLED, 1, 32),
    ],
)
def test_drafted_text_has_the_target_distribution(verifier, delay, max_nodes):
    counts, contributed = sample(verifier, 100, delay, max_nodes)
    assert contributed[0] > 0.05 * counts.sum(), "the draft model must matter for the test to mean anything"
    assert p_value(counts) > 1e-3


def test_draws_that_fill_more_than_one_frame_are_split():
    counts, contributed = sample(Verifier.MSS, 60, 0, limits=Limits(max_frame_nodes=3))
    assert contributed[0] > 0.05 * counts.sum()
    assert p_value(counts) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("max_nodes", [5, 64])
@pytest.mark.parametrize("verifier", [Verifier.MSS, Verifier.NAIVE, Verifier.COUPLED])
def test_many_drafted_texts_have_the_target_distribution(verifier, max_nodes, delay):
    counts, _ = sample(verifier, 4_000, delay, max_nodes)
    assert p_value(counts) > 1e-3


class DroppingRanking:
    """A planted fault: draws, but some tokens are never sent."""

    def __init__(self, honest):
        self._honest = honest
        self.extra_ids, self.width = honest.extra_ids, honest.width

    def rank(self, candidates, situation):
        ranked = self._honest.rank(candidates, situation)
        kept = (ranked.tokens % 2 == 0) if ranked.proposals else np.ones(len(ranked.tokens), np.bool_)
        return replace(ranked, rows=ranked.rows[kept], tokens=ranked.tokens[kept], priors=ranked.priors[kept])


class LikeliestRanking(DroppingRanking):
    """A planted fault: the likeliest tokens in the place of draws."""

    def rank(self, candidates, situation):
        ranked = self._honest.rank(candidates, situation)
        tokens = ranked.tokens.copy()
        for row, proposal in ranked.proposals.items():
            here = ranked.rows == row
            tokens[here] = proposal.token_ids[np.argsort(-proposal.probs, kind="stable")[: here.sum()]]
        return replace(ranked, tokens=tokens)


@pytest.mark.parametrize("fault", [DroppingRanking, LikeliestRanking])
def test_a_client_that_picks_among_its_draws_is_caught(monkeypatch, fault):
    monkeypatch.setattr(session_module, "make_ranking", lambda *args: fault(make_ranking(*args)))
    counts, _ = sample(Verifier.MSS, 60, 0)
    assert p_value(counts) < 1e-6

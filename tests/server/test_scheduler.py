"""Rows of a step: decoding first, nodes shared fairly, prefill in what is left."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.acceptance import Acceptance, NodeBudget
from paceline.server.counters import EngineCounters
from paceline.server.overload import overloaded, seconds_until_room
from paceline.server.patience import Habits, Patience
from paceline.server.scheduler import Candidate, StepLimits, min_rate, schedule
from paceline.server.steptime import StepTimeModel
from paceline.shared.messages import StepTime

MODEL = StepTime(0.03, 0.0005)
candidates = st.builds(
    Candidate,
    num_missing=st.integers(1, 300),
    num_live=st.integers(0, 300),
    max_nodes=st.integers(0, 128),
    num_verified=st.integers(0, 10_000),
)


@given(st.lists(candidates, max_size=20), st.integers(1, 512))
def test_every_schedule_keeps_its_bounds_and_moves(group: list[Candidate], max_rows: int) -> None:
    shares = schedule(group, StepLimits(max_rows=max_rows), MODEL)
    assert sum(share.num_tokens + share.num_nodes for share in shares) <= max_rows
    for candidate, share in zip(group, shares, strict=True):
        assert 0 <= share.num_tokens <= candidate.num_missing
        assert 0 <= share.num_nodes <= min(candidate.num_live, candidate.max_nodes)
        if share.num_nodes:
            assert share.num_tokens == candidate.num_missing
    if group:
        assert sum(share.num_tokens for share in shares) >= 1
    decoding = [share for candidate, share in zip(group, shares, strict=True) if candidate.num_missing == 1]
    if len(decoding) <= max_rows:
        assert all(share.num_tokens == 1 for share in decoding)


def test_node_rows_are_shared_equally_and_the_rest_goes_to_the_least_served() -> None:
    group = [Candidate(1, 100, 100, 900), Candidate(1, 100, 100, 10), Candidate(1, 3, 100, 0)]
    shares = schedule(group, StepLimits(max_rows=3 + 44), MODEL)
    nodes = [share.num_nodes for share in shares]
    assert nodes[2] == 3
    assert sum(nodes) == 44
    assert 0 <= nodes[1] - nodes[0] <= 1


@given(st.integers(0, 8), st.lists(st.integers(2, 3000), min_size=1, max_size=6))
def test_prefill_keeps_steps_short_whether_others_decode_or_not(num_decoding: int, prompts: list[int]) -> None:
    limits = StepLimits(max_rows=1024, prefill_step_s=0.08)
    group = [Candidate(1, 0, 0, 0)] * num_decoding + [Candidate(size, 0, 0, 0) for size in prompts]
    shares = schedule(group, limits, MODEL)
    assert all(share.num_tokens == 1 for share in shares[:num_decoding])
    rows = sum(share.num_tokens for share in shares)
    assert MODEL.at(rows) <= (0.08 if num_decoding else 0.16) + 1e-9
    assert rows >= min(sum(prompts), 60)


@given(st.integers(1, 200), st.integers(2, 8000))
def test_prefill_makes_a_shared_step_twice_as_long_at_most(num_decoding: int, prompt: int) -> None:
    model = StepTime(0.0072, 0.00003)
    group = [Candidate(1, 0, 0, 0)] * num_decoding + [Candidate(prompt, 0, 0, 0)]
    rows = sum(share.num_tokens for share in schedule(group, StepLimits(), model))
    assert model.at(rows) <= 2 * model.at(num_decoding) + 1e-9
    assert rows >= num_decoding + min(prompt, 16)


def test_prompts_are_spread_over_steps_where_many_decode() -> None:
    model = StepTime(0.0072, 0.00003)
    chunks = []
    for num_decoding in (1, 8, 16, 40, 400):
        group = [Candidate(1, 0, 0, 0)] * num_decoding + [Candidate(60, 0, 0, 0), Candidate(40, 0, 0, 0)]
        chunks.append(sum(share.num_tokens for share in schedule(group, StepLimits(), model)) - num_decoding)
    assert chunks == [100, 100, 50, 20, 20]


def test_nodes_of_all_generations_together_keep_a_bound() -> None:
    group = [Candidate(1, 50, 50, 0), Candidate(20, 50, 50, 0), Candidate(1, 50, 50, 0)]
    shares = schedule(group, StepLimits(), MODEL, 30)
    assert sum(share.num_nodes for share in shares) == 30
    assert all(share.num_nodes == 0 for share in schedule(group, StepLimits(), MODEL, 0))


def test_prefill_fills_the_step_where_rows_are_cheap() -> None:
    shares = schedule([Candidate(2000, 0, 0, 0)], StepLimits(max_rows=1024), StepTime(0.02, 0.00001))
    assert shares[0].num_tokens == 1024


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    limits = StepLimits(prefill_step_s=0.08)
    shares = schedule([Candidate(5000, 0, 0, 0), Candidate(12, 0, 0, 0)], limits, MODEL)
    assert shares[1].num_tokens == 12
    assert shares[0].num_tokens >= 80


def test_a_node_must_pay_more_as_generations_join() -> None:
    rates = [min_rate(MODEL, count, 0.5 * count, 8 * count) for count in (1, 4, 32, 128)]
    assert rates == sorted(rates)
    assert rates[0] < 0.05 < rates[-1]


def test_budget_follows_what_ranks_are_worth() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe(range(16), [0, 2])
    assert acceptance.rate(0) > 0.9
    assert acceptance.rate(1) < 0.1
    assert 3 <= acceptance.paying_nodes(0.2, 64) <= 4
    assert acceptance.paying_nodes(0.2, 2) <= 2
    assert 1.5 < acceptance.expected(16) < 2.5


def test_wrong_drafter_is_cut_and_probed_less_and_less_often() -> None:
    budget = NodeBudget(64)
    probes = []
    for step in range(600):
        nodes = budget.update(0.02)
        budget.observe(range(nodes), [])
        if step > 100 and nodes:
            assert nodes <= 4
            probes.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert len(probes) >= 3
    assert gaps == sorted(gaps)


def test_budget_comes_back_when_probes_hit() -> None:
    budget = NodeBudget(64)
    for _ in range(200):
        budget.observe(range(budget.update(0.02)), [])
    assert budget.current <= 4
    for _ in range(80):
        nodes = budget.update(0.02)
        budget.observe(range(nodes), range(nodes))
    assert budget.update(0.02) >= 32


def test_step_time_model_finds_the_line_and_survives_a_pause() -> None:
    model = StepTimeModel(StepTime(0.1, 0.01))
    for index in range(400):
        rows = 1 + index * 7 % 60
        model.observe(rows, 0.02 + 0.001 * rows)
    assert abs(model.current.base_s - 0.02) < 0.004
    assert abs(model.current.per_row_s - 0.001) < 0.0003
    model.observe(5, 30.0)
    assert model.current.at(5) < 0.1


def test_small_steps_alone_do_not_make_large_ones_look_dear() -> None:
    """On a CPU the first nodes cost far more than the next ones: a few rows must not talk the budget down for good."""
    real = {1: 0.068, 2: 0.077, 3: 0.087, 33: 0.170}
    model = StepTimeModel(StepTime(0.065, 0.0032))
    for index in range(200):
        rows = 1 + index % 3
        model.observe(rows, real[rows])
    assert model.current.at(33) < 1.25 * real[33]
    assert abs(model.current.at(2) - real[2]) < 0.01


def test_model_with_one_size_of_step_stays_sane() -> None:
    model = StepTimeModel(StepTime(0.03, 0.001))
    for _ in range(100):
        model.observe(1, 0.031)
    assert 0.02 < model.current.at(1) < 0.04
    assert 0.0 <= model.current.per_row_s < 0.002


def run_patience(patience: Patience, gap: float, *, steps: int, step: float = 0.04, tokens: int = 2) -> float:
    """Commits every step; a draft arrives ``gap`` after each, and steps that it reaches bring ``tokens`` each.

    Returns the wait offered at the end.
    """
    now, length = 0.0, 10
    patience.on_commit(now, length, num_tokens=1, num_scored=0, has_nodes=False)
    for _ in range(steps):
        until = patience.hold_until(StepTime(step, 0.0), float(tokens - 1))
        patience.on_frame(now + gap, length)
        is_held = until >= now + gap
        now += step + (gap if is_held else 0.0)
        num_tokens = tokens if is_held else 1
        length += num_tokens
        patience.on_commit(now, length, num_tokens=num_tokens, num_scored=8 * is_held, has_nodes=False)
    return patience.hold_until(StepTime(step, 0.0), float(tokens - 1)) - now


def test_patience_waits_only_for_drafts_that_come_soon() -> None:
    assert 0.003 <= run_patience(Patience(None), 0.003, steps=30) < 0.02
    assert run_patience(Patience(None), 0.035, steps=30) < 0
    assert run_patience(Patience(None), 9.0, steps=30) < 0
    assert run_patience(Patience(None), 0.003, steps=0) <= 0


def test_one_draft_tells_patience_when_to_expect_the_next() -> None:
    assert run_patience(Patience(None), 0.003, steps=1) > 0.003


def test_patience_does_not_wait_for_drafts_that_bring_nothing() -> None:
    assert run_patience(Patience(None), 0.003, steps=30, tokens=1) < 0


def test_what_one_generation_showed_the_next_one_of_its_client_knows() -> None:
    habits = Habits()
    run_patience(Patience(None, habits), 0.003, steps=30)
    assert run_patience(Patience(None, habits), 0.003, steps=0) > 0.003


@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(1, 6), st.integers(0, 40), st.booleans()), max_size=60))
def test_patience_never_waits_longer_than_drafts_were_seen_to_take(steps: list[tuple[float, int, int, bool]]) -> None:
    patience = Patience(None)
    now, length, longest = 0.0, 10, 0.0
    for gap, num_tokens, num_scored, has_nodes in steps:
        patience.on_commit(now, length, num_tokens=num_tokens, num_scored=num_scored, has_nodes=has_nodes)
        patience.on_frame(now + gap, length)
        longest = max(longest, gap)
        assert patience.hold_until(StepTime(0.04, 0.0001), 1.5) - now <= 3.0 * longest + 0.003
        now, length = now + gap + 0.04, length + num_tokens


def test_vain_waits_end_adaptive_patience_soon() -> None:
    patience = Patience(None)
    run_patience(patience, 0.003, steps=30)
    now = 100.0
    for vain in range(2):
        patience.on_commit(now + vain, 100 + vain, num_tokens=1, num_scored=0, has_nodes=False)
        patience.hold_until(StepTime(0.04, 0.0), 2.0)
    patience.on_commit(now + 2, 102, num_tokens=1, num_scored=0, has_nodes=False)
    assert patience.hold_until(StepTime(0.04, 0.0), 2.0) < now


def test_a_wish_is_kept_to_the_letter() -> None:
    strict, eager = Patience(0.5), Patience(0.0)
    for patience in (strict, eager):
        patience.on_commit(10.0, 5, num_tokens=1, num_scored=0, has_nodes=False)
    assert strict.hold_until(MODEL, 0.0) == 10.5
    assert eager.hold_until(MODEL, 5.0) == 10.0
    assert strict.is_strict
    assert not eager.is_strict


def test_advice_to_a_refused_client_follows_steps_and_their_time() -> None:
    counters = EngineCounters(num_finished=10, num_committed=2000, num_accepted=500)
    assert seconds_until_room(counters, StepTime(0.04, 0.0), 1) == 150 * 0.04
    assert seconds_until_room(counters, StepTime(0.04, 0.01), 4) == 150 * 0.08 / 4
    assert seconds_until_room(EngineCounters(), StepTime(0.04, 0.0), 1) == 64 * 0.04
    assert seconds_until_room(counters, StepTime(1e-6, 0.0), 64) == 0.5
    assert seconds_until_room(counters, StepTime(9.0, 0.0), 1) == 60.0
    refusal = overloaded(counters, StepTime(0.04, 0.0), 1, 3, 3)
    assert refusal.retry_after_s == 6.0
    assert "max_queue=3" in str(refusal)

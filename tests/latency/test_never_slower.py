"""Promise 2 on the virtual clock: never slower than the server alone, whatever the drafter and the link do.

The reduced grid runs in every suite; the full one, with the recorded pair, is slow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.client import ClientModel
from paceline.bench.methods import chain, playback_drafters, specedge, stream, tree
from paceline.bench.trial import Trial, tok_s, wrong_drafters

SMALL = Trial(2, 64)
LEAST = 0.99
CELLS = [(0, 30), (10, 15), (40, 30), (80, 60), (300, 30)]


@pytest.mark.parametrize(("rtt_ms", "step_ms"), CELLS)
def test_a_usual_drafter_never_slows_a_stream_down(rtt_ms: float, step_ms: float) -> None:
    cell = SMALL.cell(rtt_ms, step_ms)
    assert tok_s(SMALL.ours(cell)) >= LEAST * tok_s(SMALL.alone(cell))


@pytest.mark.parametrize(("rtt_ms", "step_ms"), CELLS)
def test_a_drafter_that_is_always_wrong_costs_less_than_one_percent(rtt_ms: float, step_ms: float) -> None:
    bench = Trial(1, 256)
    cell = bench.cell(rtt_ms, step_ms)
    served = bench.ours(cell, ClientModel(wrong_drafters, cell.draft_time))
    assert served[0].num_accepted == 0
    assert tok_s(served) >= LEAST * tok_s(bench.alone(cell))


@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_a_drafter_that_stalls_for_two_seconds_costs_nothing(rtt_ms: float) -> None:
    cell = SMALL.cell(rtt_ms, 30)
    stalling = ClientModel(playback_drafters, cell.draft_time, stall=(0.3, 2.0))
    assert tok_s(SMALL.ours(cell, stalling)) >= LEAST * tok_s(SMALL.alone(cell))


@pytest.mark.parametrize("rtt_ms", [20, 80])
def test_jitter_of_half_the_round_trip_does_not_turn_the_gain_into_a_loss(rtt_ms: float) -> None:
    cell = SMALL.cell(rtt_ms, 30, jitter_s=rtt_ms / 2e3)
    assert tok_s(SMALL.ours(cell)) >= LEAST * tok_s(SMALL.alone(cell))


def test_lost_packets_do_not_turn_the_gain_into_a_loss() -> None:
    cell = SMALL.cell(20, 30, loss=0.02)
    assert tok_s(SMALL.ours(cell)) >= 0.95 * tok_s(SMALL.alone(cell))


@pytest.mark.parametrize("rtt_ms", [0, 5, 10, 20, 40])
def test_a_good_draft_gains_on_every_ordinary_link(rtt_ms: float) -> None:
    cell = SMALL.cell(rtt_ms, 30)
    assert tok_s(SMALL.ours(cell)) >= 1.15 * tok_s(SMALL.alone(cell))


@pytest.mark.parametrize("rtt_ms", [20, 40, 150])
def test_ours_is_as_fast_as_the_best_baseline_beyond_the_same_building(rtt_ms: float) -> None:
    cell = SMALL.cell(rtt_ms, 30)
    best = max(method(cell).tok_s for method in (chain, tree, specedge))
    assert tok_s(SMALL.ours(cell)) >= 0.98 * best


def test_a_drafter_switched_off_by_policy_is_as_fast_as_none() -> None:
    bench = Trial(1, 256)
    cell = bench.cell(20, 30)
    off = bench.ours(cell, ClientModel(wrong_drafters, cell.draft_time))
    assert tok_s(off) >= 0.97 * tok_s(bench.alone(cell))


def test_many_clients_with_one_in_ten_stalling_do_not_slow_each_other() -> None:
    bench = Trial(10, 32)
    crowd = replace(bench.cell(10, 30), clients=10)
    alone = bench.alone(crowd)
    stalling = ClientModel(playback_drafters, crowd.draft_time, stall=(0.1, 2.0))
    ours = bench.check(stream(crowd, ClientModel(playback_drafters, crowd.draft_time), others={3: stalling}))
    assert tok_s(ours) >= LEAST * tok_s(alone)


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", [15, 30, 60])
@pytest.mark.parametrize("rtt_ms", [0, 5, 10, 20, 40, 80, 150, 300])
def test_full_grid(rtt_ms: float, step_ms: float) -> None:
    bench = Trial(12, 128)
    cell = bench.cell(rtt_ms, step_ms)
    alone = tok_s(bench.alone(cell))
    assert tok_s(bench.ours(cell)) >= LEAST * alone
    assert tok_s(bench.ours(cell, ClientModel(wrong_drafters, cell.draft_time))) >= LEAST * alone
    jittery = bench.cell(rtt_ms, step_ms, jitter_s=rtt_ms / 2e3)
    assert tok_s(bench.ours(jittery)) >= LEAST * tok_s(bench.alone(jittery))
    stalling = ClientModel(playback_drafters, cell.draft_time, stall=(0.3, 2.0))
    assert tok_s(stream(cell, stalling)) >= LEAST * alone

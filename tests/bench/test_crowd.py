"""Crowds of clients on one server: who comes, what is measured, and when a server falls behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.bench.baselines.shapes import Chain
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.crowd import (
    STALL_S,
    Workload,
    arrivals_of,
    colocated,
    gaps_between,
    paceline,
    run_crowd,
    server_alone,
)
from paceline.bench.link import LinkModel, Pipe
from paceline.bench.stats import Served
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.messages import StepTime

COST = ServerCost(StepTime(0.02, 0.001), 1e-6, DraftTime(0.002, 0.0001))


@pytest.fixture(scope="module")
def workload() -> Workload:
    made, vocab_size = renumbered(synthetic(4, 16, prompt_len=8, seed=1))
    return Workload(made.recordings, vocab_size, COST)


def test_arrivals_are_the_same_each_time_and_have_prompts_of_their_own(workload: Workload) -> None:
    arrivals, begin, end = arrivals_of(workload, 20.0)
    again, _, _ = arrivals_of(workload, 20.0)
    assert [one.time_s for one in arrivals] == [one.time_s for one in again]
    assert len({tuple(one.recording.prompt.tolist()) for one in arrivals}) == len(arrivals)
    assert 0 < begin < end


def test_the_window_begins_with_as_many_generations_as_it_ends_with() -> None:
    """Outputs of very different length: those met under way are the long ones."""
    made, vocab_size = renumbered(synthetic(4, 40, prompt_len=8, seed=1))
    first = made.recordings[0]
    short = replace(first, output=first.output[:4], on_path=first.on_path.at(slice(4)))
    mixed = Workload((short, *made.recordings[1:]), vocab_size, COST)
    rate, step_s = 60.0, mixed.plain_step_s(60.0)
    running = np.zeros(2)
    for seed in range(12):
        arrivals, begin, end = arrivals_of(replace(mixed, seed=seed), rate)
        opened = np.array([one.time_s for one in arrivals])
        closed = opened + step_s * np.array([len(one.recording.output) for one in arrivals])
        running += [np.count_nonzero((opened <= now) & (closed > now)) / 12 for now in (begin, end)]
    assert running == pytest.approx(rate * mixed.output_len * step_s, rel=0.05)


def test_arrivals_come_at_the_rate_and_one_in_ten_stalls(workload: Workload) -> None:
    arrivals, begin, end = arrivals_of(workload, 60.0)
    inside = [one for one in arrivals if begin <= one.time_s < end]
    assert len(inside) / (end - begin) == pytest.approx(60.0, rel=0.2)
    stalling = [one for one in arrivals if one.stall is not None]
    assert 0.03 < len(stalling) / len(arrivals) < 0.2
    assert {one.is_link_stall for one in stalling} == {True, False}
    assert all(one.link().freeze == (one.time_s + one.stall[0], STALL_S) for one in stalling if one.is_link_stall)  # type: ignore[index]


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    served = Served(0.0)
    for now, count in ((1.0, 1), (1.5, 2), (1.6, 1), (9.0, 1)):
        served.arrive(now, range(count))
    assert gaps_between(served, 1.2, 2.0).tolist() == pytest.approx([0.25, 0.25, 0.1])
    assert np.array_equal(gaps_between(served, 0.0, 10.0), served.gaps())


def test_a_frozen_link_delivers_at_its_end_and_in_order() -> None:
    pipe = Pipe(LinkModel(rtt_s=0.02, freeze=(1.0, 2.0)), is_up=False, seed=0)
    assert pipe.send(0.5, 10) < 0.6
    assert pipe.send(1.2, 10) == pipe.send(1.4, 10) == 3.0
    assert pipe.send(3.5, 10) < 3.6


@pytest.mark.parametrize("method", [server_alone, paceline, colocated(Chain(1))])
def test_a_run_repeats_itself_and_serves_about_what_arrives(workload: Workload, method) -> None:  # type: ignore[no-untyped-def]
    crowd = run_crowd(workload, 20.0, method)
    again = run_crowd(workload, 20.0, method)
    assert np.array_equal(crowd.gaps, again.gaps)
    assert crowd.is_keeping_up
    assert 0.02 < crowd.itl_p95_s < 0.1
    assert 2.0 < crowd.mean_running < 20.0


def test_prompts_cost_the_others_time(workload: Workload) -> None:
    longer = renumbered(synthetic(4, 16, prompt_len=64, seed=1))[0].recordings
    crowded = Workload(longer, workload.vocab_size + 1000, COST)
    assert run_crowd(crowded, 10.0, server_alone).itl_p95_s > 1.2 * run_crowd(workload, 10.0, server_alone).itl_p95_s


def test_a_server_that_falls_behind_keeps_no_slo(workload: Workload) -> None:
    slow = Workload(workload.recordings, workload.vocab_size, ServerCost(StepTime(0.02, 0.02)))
    assert run_crowd(slow, 100.0, server_alone).itl_p95_s > 5 * slow.cost.at(1)

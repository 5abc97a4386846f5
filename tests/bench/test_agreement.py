"""What a real run is turned into: fits of made-up measurements, and the simulation that follows from them."""

from __future__ import annotations

import pytest

from paceline.bench.agreement import Replay, best_shape, margin, replay
from paceline.bench.baselines.shapes import Chain, Expansion
from paceline.bench.costs import DraftTime
from paceline.bench.measured import (
    Call,
    Commit,
    MeasuredCost,
    RealAnswer,
    between_steps_s,
    draft_time,
    rtt_s,
    step_table,
)
from paceline.bench.stats import Served
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.messages import StepTime

BELIEVED = StepTime(0.03, 0.001)


def answer(
    rows: list[int], *, between_s: float = 0.002, per_row_s: float = 0.001, base_s: float = 0.03, calls: int = 0
) -> RealAnswer:
    """Steps of so many rows, each a token; then calls of 1, 2, ... rows, 1 ms after each other."""
    at, commits = 10.0, [Commit(10.0, 1, 0, 0, 0.05)]
    for count in rows:
        step_s = base_s + per_row_s * count
        at += step_s + between_s
        commits.append(Commit(at, 1, count, 0, step_s))
    made: list[Call] = []
    for number in range(calls):
        begin = at + 0.001
        at = begin + 0.004 + 0.0005 * (number + 1)
        made.append(Call(number + 1, begin, at))
    arrivals = tuple((commit.at, (5,)) for commit in commits)
    return RealAnswer(9.9, 20, 16, arrivals, tuple(commits), tuple(made), (0.02, 0.03), 0, 10, 20)


def test_what_passes_between_steps_is_what_plain_streaming_leaves_unexplained() -> None:
    assert between_steps_s([answer([1] * 20), answer([1] * 5, between_s=0.004)]) == pytest.approx(0.003)


def test_steps_are_tabled_by_rows_with_the_prompts_among_them() -> None:
    table = step_table([answer([1] * 10), answer([8, 8, 9])], 0.002)
    # One row each, the prompts' 20 - 16 rows, and 8 to 9 rows.
    assert table == (
        (1.0, pytest.approx(0.033)),
        (4.0, pytest.approx(0.052)),
        (pytest.approx(25 / 3), pytest.approx(0.03 + 0.025 / 3 + 0.002)),
    )


def test_a_measured_cost_goes_through_its_points_and_on_beyond_them() -> None:
    cost = MeasuredCost(BELIEVED, table=((1.0, 0.030), (5.0, 0.050), (9.0, 0.054)))
    assert [cost.at(rows) for rows in (1, 3, 5, 9)] == pytest.approx([0.030, 0.040, 0.050, 0.054])
    assert cost.at(17) == pytest.approx(0.054 + 8 * 0.003)


def test_a_draft_call_has_its_hops_and_what_the_loop_does_before_it() -> None:
    found = draft_time([answer([1], calls=12)])
    assert found.base_s == pytest.approx(0.005, abs=2e-4)
    assert found.per_row_s == pytest.approx(0.0005, abs=2e-5)
    assert draft_time([answer([1])]) == DraftTime()
    assert rtt_s([answer([1])]) == pytest.approx(0.025)


def test_an_answer_is_cut_to_the_tokens_that_count() -> None:
    served = answer([1] * 9).served(4)
    assert (served.num_tokens, served.num_steps) == (4, 10)
    assert served.total_s == pytest.approx(10.0 + 3 * 0.033 - 9.9)


@pytest.fixture(scope="module")
def conditions() -> Replay:
    made, vocab_size = renumbered(synthetic(2, 40, top1=0.8, coverage=0.9, seed=5))
    cost = MeasuredCost(BELIEVED, table=((1.0, 0.030), (9.0, 0.034), (33.0, 0.050)))
    return Replay(made.recordings, vocab_size, cost, 0.02, DraftTime(0.003, 0.0002), (0, 0))


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("server-alone", None),
        ("paceline", None),
        ("chain", Chain(4)),
        ("tree", Expansion((3, 2))),
        ("specedge", Chain(3)),
    ],
)
def test_every_method_is_replayed_to_the_recorded_text(conditions: Replay, method: str, shape: Chain | None) -> None:
    served = replay(method, shape, conditions)
    assert [one.token_ids for one in served] == [recording.output.tolist() for recording in conditions.recordings]
    if method == "server-alone":
        assert served[0].gaps() == pytest.approx([0.030] * 39, rel=1e-4)
    assert replay(method, shape, conditions)[0].total_s == served[0].total_s


def test_baselines_get_the_shape_that_is_fastest_here(conditions: Replay) -> None:
    shapes = [Chain(1), Chain(4), Chain(16)]
    best = best_shape("chain", shapes, conditions)
    seconds = {shape: sum(one.total_s for one in replay("chain", shape, conditions)) for shape in shapes}
    assert seconds[best] == min(seconds.values())


def test_margins_pair_prompts_and_know_when_noise_explains_a_loss() -> None:
    def served(*seconds: float) -> list[Served]:
        return [Served(0.0, arrivals=[(one, 1)]) for one in seconds]

    alone = served(1.0, 2.0, 4.0)
    assert margin(served(0.5, 1.0, 2.0), alone).speed_up == pytest.approx(2.0)
    sure = margin(served(1.1, 2.2, 4.4), alone)
    assert sure.loses
    noisy = margin(served(1.3, 1.8, 4.2), alone)
    assert noisy.low < 1.0 < noisy.high
    assert not noisy.loses

"""The search for the highest rate that keeps an SLO, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.bench import capacity
from paceline.bench.capacity import CapacityPlan, CapacityRow, Curve, fewest_vs_alone, fewest_vs_colocated
from paceline.bench.capacity_report import about_capacity, capacity_json, capacity_table, verdict, write_capacity_plot
from paceline.bench.costs import PRESETS, ServerCost, server_cost_of
from paceline.bench.crowd import Crowd, Workload, server_alone
from paceline.bench.recording import RecordingSet
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.errors import UsageError
from paceline.shared.messages import StepTime


class Known(Curve):
    """A server whose p95 is known for each rate."""

    def __init__(self, p95: Callable[[float], float]) -> None:
        made, vocab_size = renumbered(synthetic(2, 16, seed=1))
        super().__init__(Workload(made.recordings, vocab_size, ServerCost(StepTime(0.01, 0.0001))), server_alone)
        self.p95 = p95

    def at(self, rate: float) -> Crowd:
        if rate not in self.points:
            p95 = self.p95(rate)
            self.points[rate] = Crowd(rate, np.full(10, p95), 1.0, 0.1, 1.0, is_keeping_up=p95 < 1.0)
        return self.points[rate]


@pytest.mark.parametrize("guess", [5.0, 60.0, 90.0])
def test_search_finds_where_p95_meets_the_slo_in_few_runs(guess: float) -> None:
    curve = Known(lambda rate: 0.01 / max(1.0 - rate / 100.0, 0.01))
    rate, crowd = curve.capacity(0.02, guess)
    assert rate == pytest.approx(50.0, rel=0.02)
    assert crowd.itl_p95_s == pytest.approx(0.02, rel=0.1)
    assert len(curve.points) <= 6


def test_search_starts_far_beyond_and_comes_back() -> None:
    curve = Known(lambda rate: 0.0101 if rate < 3.0 else 0.0101 + 0.0001 * rate)
    assert curve.capacity(0.0125, 34.0)[0] == pytest.approx(24.0, rel=0.05)


def test_search_says_that_nobody_can_be_served() -> None:
    assert Known(lambda rate: 0.011).capacity(0.01, 10.0)[0] == 0.0


def test_search_survives_a_server_that_falls_behind() -> None:
    curve = Known(lambda rate: 0.015 if rate < 40.0 else 9.0)
    rate, _ = curve.capacity(0.02, 70.0)
    assert 10.0 < rate <= 40.0


def row(method: str, slo: float, alone: float | None, near: float | None) -> CapacityRow:
    return CapacityRow("30", slo, method, 2.0, 40, 5.0, 0.04, 0.1, 1.2, alone, near)


ROWS = [row("server-alone", 2.0, None, None), row("paceline", 2.0, 1.01, 1.5), row("paceline", 0.5, None, None)]


def test_worst_ratios_leave_out_what_nobody_can_serve() -> None:
    assert fewest_vs_alone(ROWS) == 1.01
    assert fewest_vs_colocated(ROWS) == 1.5
    assert fewest_vs_alone(ROWS[2:]) is None
    assert "nothing to compare" in verdict(ROWS[2:])


def test_report_shows_every_row(tmp_path: Path) -> None:
    about = about_capacity(seed=0)
    assert capacity_table(ROWS).row_count == len(ROWS)
    plain = json.loads(capacity_json(ROWS, about))
    assert plain["meta"]["mode"] == "capacity"
    assert plain["rows"][1]["vs_colocated"] == 1.5
    write_capacity_plot(tmp_path / "c.png", ROWS, about)
    write_capacity_plot(tmp_path / "c.html", ROWS, about)
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "c.html").read_text().count("<tr") == len(ROWS) + 1
    with pytest.raises(UsageError, match="writable"):
        write_capacity_plot(tmp_path / "none" / "c.png", ROWS, about)


def test_plan_takes_greedy_recordings_only() -> None:
    assert set(CapacityPlan(synthetic(1, 8), steps=("8b-h100", "30")).workloads()) == {"8b-h100", "30"}
    with pytest.raises(UsageError, match="greedy"):
        CapacityPlan(RecordingSet((), {})).workloads()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_charge_rows_context_and_a_draft_model(name: str) -> None:
    cost = server_cost_of(name)[1]
    assert cost.at(2, 500) >= cost.at(2) > cost.at(1)
    assert 0 < cost.draft.at(1) < cost.at(1)
    assert server_cost_of("40")[1].draft.at(1) == pytest.approx(0.005)


def test_defaults_are_a_grid_around_the_one_token_step() -> None:
    assert min(capacity.DEFAULT_SLOS) == 0.5
    assert max(capacity.DEFAULT_SLOS) == 3.0

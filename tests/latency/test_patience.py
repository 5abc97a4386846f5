"""Adaptive patience on the virtual clock: as good as both extremes on every link, better where waiting pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.client import ClientModel
from paceline.bench.methods import Cell, playback_drafters
from paceline.bench.trial import Trial, tok_s

BENCH, LONGER = Trial(3, 64), Trial(6, 96)
NEVER, ALWAYS = 0.0, 5.0
SLOW = [pytest.param(*cell, marks=pytest.mark.slow) for cell in ((0, 60), (150, 30), (10, 15))]


def speed(cell: Cell, patience_s: float | None, bench: Trial = BENCH) -> float:
    return tok_s(bench.ours(cell, ClientModel(playback_drafters, cell.draft_time, patience_s=patience_s)))


@pytest.mark.parametrize(("rtt_ms", "step_ms"), [(10, 30), (40, 30), *SLOW])
def test_adaptive_patience_is_as_fast_as_both_extremes(rtt_ms: float, step_ms: float) -> None:
    cell = BENCH.cell(rtt_ms, step_ms)
    assert speed(cell, None) >= 0.98 * max(speed(cell, NEVER), speed(cell, ALWAYS))


@pytest.mark.parametrize("step_ms", [30, pytest.param(60, marks=pytest.mark.slow)])
def test_adaptive_patience_beats_both_extremes_where_drafts_come_soon(step_ms: float) -> None:
    cell = LONGER.cell(0, step_ms)
    extremes = [speed(cell, wish, LONGER) for wish in (NEVER, ALWAYS)]
    assert speed(cell, None, LONGER) >= 1.05 * max(extremes)


def test_clients_that_share_steps_lose_nothing_by_adaptive_patience() -> None:
    crowd = replace(BENCH.cell(0, 30), clients=3)
    assert speed(crowd, None) >= 0.98 * speed(crowd, NEVER)

"""Calibration at start: sane figures, and a pool as it was, however small."""

from __future__ import annotations

import pytest

from paceline.server.calibrate import calibrate
from paceline.server.scripted import ScriptedTarget, markov


@pytest.mark.parametrize(("num_blocks", "max_context"), [(64, 4096), (4, 64), (2, 8)])
def test_calibration_times_steps_and_leaves_the_pool_as_it_was(num_blocks: int, max_context: int) -> None:
    target = ScriptedTarget(markov(16, 0), 16, num_blocks=num_blocks, max_context=max_context)
    step_time = calibrate(target)
    assert step_time.at(1) > 0
    assert step_time.per_row_s >= 0
    assert max(target.num_rows[1:], default=1) <= 33
    assert target.pool.num_free_blocks == num_blocks

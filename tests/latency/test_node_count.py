"""Dynamic trees against the best static ones of the same node count, on the shipped recording (docs/drafts.md)."""

import pytest

from paceline.bench.calibrate import draft_time_of
from paceline.bench.grid import Grid, run_grid
from paceline.bench.recording import SHIPPED, RecordingSet


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [16, 32])
def test_dynamic_trees_beat_every_static_one_of_their_size_by_eight_percent(num_nodes: int) -> None:
    recordings = RecordingSet.load(SHIPPED)
    methods = (f"static-{num_nodes}", f"dynamic-{num_nodes}")
    grid = Grid(recordings, rtts_ms=(20.0,), steps=("30",), methods=methods, draft_time=draft_time_of(recordings))
    static, dynamic = run_grid(grid).rows
    assert dynamic.flips == static.flips == 0
    assert dynamic.tok_s >= 1.08 * static.tok_s, f"{dynamic.tok_s:.1f} against {static.tok_s:.1f} of {static.shape}"

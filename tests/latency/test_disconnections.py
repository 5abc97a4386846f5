"""Promise 3 on the virtual clock: dropped links lose nothing and double nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.client import ClientModel
from paceline.bench.methods import no_drafters
from paceline.bench.trial import Trial

BENCH = Trial(3, 64)


@pytest.mark.parametrize("uptime_s", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_forced_drops_change_no_token(rtt_ms: float, uptime_s: float) -> None:
    served = BENCH.ours(BENCH.cell(rtt_ms, 15, mean_uptime_s=uptime_s, downtime_s=0.01))
    assert sum(one.num_reconnects for one in served) > 0


def test_a_stream_without_drafts_survives_too() -> None:
    cell = BENCH.cell(20, 15, mean_uptime_s=0.1)
    served = BENCH.ours(cell, ClientModel(no_drafters))
    assert sum(one.num_reconnects for one in served) > 10


@pytest.mark.slow
def test_a_thousand_drops_lose_and_double_nothing() -> None:
    bench = Trial(10, 96)
    total = 0
    for seed in range(40):
        # Short-lived links: hardly a few steps fit between two drops.
        cell = replace(bench.cell(20, 15, mean_uptime_s=0.05, downtime_s=0.01), seed=seed)
        total += sum(one.num_reconnects for one in bench.ours(cell))
        if total >= 1000:
            return
    raise AssertionError(f"expected 1000 drops, got {total}")

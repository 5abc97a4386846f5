"""Drafts cost a loaded server no clients, on the virtual clock: as many within an SLO as without them."""

from __future__ import annotations

from collections import Counter

from paceline.bench.baselines.shapes import Chain
from paceline.bench.capacity import LEAST_VS_ALONE, LEAST_VS_COLOCATED, run_capacity
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.crowd import Workload
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.messages import StepTime

SEEDS = (0, 1)
"""Runs are short, and p95 comes from the few slowest steps: one seed alone says it within a few percent only."""


def test_a_server_holds_as_many_clients_with_drafts_as_without() -> None:
    made, vocab_size = renumbered(synthetic(6, 24, prompt_len=16, seed=4))
    cost = ServerCost(StepTime(0.02, 0.0003), 1e-7, DraftTime(0.003, 0.00005))
    workloads = {str(seed): Workload(made.recordings, vocab_size, cost, seed=seed) for seed in SEEDS}
    rows = run_capacity(workloads, (0.75, 1.5), (Chain(1),))
    clients: Counter[tuple[float, str]] = Counter()
    for row in rows:
        clients[row.slo, row.method] += row.clients
    assert clients[0.75, "server-alone"] == 0
    assert clients[1.5, "server-alone"] > 300 * len(SEEDS)
    assert clients[1.5, "paceline"] >= LEAST_VS_ALONE * clients[1.5, "server-alone"]
    assert clients[1.5, "paceline"] >= LEAST_VS_COLOCATED * clients[1.5, "colocated"]

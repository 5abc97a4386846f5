"""Drafts cost a loaded server no clients, on the virtual clock: as many within an SLO as without them."""

from __future__ import annotations

from paceline.bench.baselines.shapes import Chain
from paceline.bench.capacity import (
    LEAST_VS_ALONE,
    LEAST_VS_COLOCATED,
    fewest_vs_alone,
    fewest_vs_colocated,
    run_capacity,
)
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.crowd import Workload
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.messages import StepTime


def test_a_server_holds_as_many_clients_with_drafts_as_without() -> None:
    made, vocab_size = renumbered(synthetic(6, 24, prompt_len=16, seed=4))
    cost = ServerCost(StepTime(0.02, 0.0003), 1e-7, DraftTime(0.003, 0.00005))
    rows = run_capacity({"small": Workload(made.recordings, vocab_size, cost)}, (0.75, 1.5), (Chain(1),))
    clients = {(row.slo, row.method): row.clients for row in rows}
    assert clients[0.75, "server-alone"] == 0
    assert clients[1.5, "server-alone"] > 300
    assert (fewest_vs_alone(rows) or 0.0) >= LEAST_VS_ALONE
    assert (fewest_vs_colocated(rows) or 0.0) >= LEAST_VS_COLOCATED

"""Bytes on the wire: what a drafted token costs by default, and what padding and compression add or save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.client import ClientModel
from paceline.bench.costs import DraftTime
from paceline.bench.link import LinkModel
from paceline.bench.methods import Cell, playback_drafters, stream
from paceline.bench.recording import SHIPPED, RecordingSet
from paceline.bench.transport_cost import UNITS, cell_transport_cost
from paceline.shared.messages import StepTime

VOCAB = 49_152
RECORDINGS = RecordingSet.load(SHIPPED).recordings


def cell(rtt_ms: float, temperature: float = 0.0) -> Cell:
    """The embedded pair, ids as they are. Sampled, its drafts are ranked with noise and rarely right."""
    recording = replace(RECORDINGS[1], temperature=temperature, seed=7 if temperature else 0)
    return Cell((recording,), VOCAB, StepTime(0.0299, 0.0001), LinkModel(rtt_ms / 1e3), DraftTime())


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
@pytest.mark.parametrize("rtt_ms", [0, 40])
def test_a_drafted_token_costs_at_most_12_bytes_up_all_overhead_included(rtt_ms: float, temperature: float) -> None:
    here = cell(rtt_ms, temperature)
    (served,) = stream(here, ClientModel(playback_drafters, here.draft_time))
    assert served.num_drafted > 50
    assert served.bytes_up <= 12 * served.num_drafted


def test_padding_and_compression_are_priced_side_by_side() -> None:
    costs = cell_transport_cost(cell(20))
    assert list(costs) == ["plain", *(f"padding {unit}" for unit in UNITS), "compression"]
    plain, small, large = (costs[name] for name in list(costs)[:3])
    assert 0 < plain.bytes_up_per_token < small.bytes_up_per_token < large.bytes_up_per_token
    assert 0 < plain.bytes_down_per_token < small.bytes_down_per_token < large.bytes_down_per_token
    assert 0 < costs["compression"].bytes_down_per_token < 2 * plain.bytes_down_per_token

"""What padding and compression cost or save: bytes per token each way, of the same messages, with and without.

Padding makes frames longer so that their sizes tell less; compression (permessage-deflate with context kept, RFC 7692)
mostly cannot do much for frames that are packed ids already. Not here: either one (``paceline.shared.padding``, the
websocket's).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paceline.bench.client import ClientModel, StreamClient
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import ServerCost, step_time_of
from paceline.bench.frames import header_bytes
from paceline.bench.grid import Grid
from paceline.bench.methods import Cell, playback_drafters
from paceline.bench.recording import Recording, RecordingSet
from paceline.bench.server import SimulatedServer
from paceline.bench.target import RecordedTarget
from paceline.server.engine import EngineSettings
from paceline.shared.messages import Message
from paceline.shared.wire import encode

UNITS = (64, 256)
_SYNC_FLUSH_TAIL = 4
"""Bytes that every flush ends with and permessage-deflate leaves out (RFC 7692, section 7.2.1)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes per token of output, headers of websocket frames included."""

    bytes_up_per_token: float
    bytes_down_per_token: float


@dataclass(slots=True)
class _Scales:
    """Weighs every message in each way that it might travel."""

    totals: dict[str, list[int]] = field(default_factory=dict)
    deflaters: tuple[zlib._Compress, zlib._Compress] = field(
        default_factory=lambda: (zlib.compressobj(wbits=-12), zlib.compressobj(wbits=-12))
    )

    def weigh(self, message: Message, *, is_up: bool) -> int:
        """The bytes of the plain frame; all others are noted."""
        sizes = {"plain": len(encode(message))}
        sizes |= {f"padding {unit}": len(encode(message, unit)) for unit in UNITS}
        deflater = self.deflaters[int(is_up)]
        data = deflater.compress(encode(message)) + deflater.flush(zlib.Z_SYNC_FLUSH)
        sizes["compression"] = len(data) - _SYNC_FLUSH_TAIL
        for name, size in sizes.items():
            total = self.totals.setdefault(name, [0, 0])
            total[int(is_up)] += size + header_bytes(size, is_up=is_up)
        return sizes["plain"] + header_bytes(sizes["plain"], is_up=is_up)


def transport_cost(grid: Grid, num_prompts: int = 4) -> dict[str, Cost]:
    """Of ours, in the middle one of a grid's cells, for the first prompts, one connection each."""
    # Ids as they are: how many bytes they take is the question.
    recordings = RecordingSet(grid.recordings.recordings[:num_prompts], grid.recordings.meta)
    vocab_size = 1 + max(int(a.max(initial=0)) for r in recordings.recordings for a in _ids(r))
    _, step_time = step_time_of(grid.steps[len(grid.steps) // 2])
    link = replace(grid.link, rtt_s=grid.rtts_ms[len(grid.rtts_ms) // 2] / 1e3)
    return cell_transport_cost(Cell(recordings.recordings, vocab_size, step_time, link, grid.draft_time))


def _ids(recording: Recording) -> list[NDArray[np.int32]]:
    return [recording.prompt, recording.output, recording.on_path.token_ids, recording.off_path.token_ids]


def cell_transport_cost(cell: Cell) -> dict[str, Cost]:
    """Of ours, in one cell."""
    scales_of: list[_Scales] = []
    num_tokens = 0
    clock = VirtualClock()
    settings = EngineSettings(step_time=cell.step_time)
    server = SimulatedServer(clock, RecordedTarget(cell.vocab_size), ServerCost(cell.step_time), settings)
    model = ClientModel(playback_drafters, cell.draft_time)
    for number, recording in enumerate(cell.recordings, start=1):
        scales = _Scales()
        client = StreamClient(clock, server, recording, cell.link, model, number=number, weigh=scales.weigh)
        client.start()
        clock.run()
        num_tokens += client.served.num_tokens
        scales_of.append(scales)
    return {name: _cost([scales.totals[name] for scales in scales_of], num_tokens) for name in scales_of[0].totals}


def _cost(totals: Sequence[Sequence[int]], num_tokens: int) -> Cost:
    down, up = (sum(total[way] for total in totals) / num_tokens for way in (0, 1))
    return Cost(round(up, 1), round(down, 1))

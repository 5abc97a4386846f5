"""A pair made of dice, or any set of recordings, put through its paces: plain, drafted, and with drafters gone wrong.

What latency tests and tuning share. Every request is checked: each token there, once, and the target's own.
Not here: grids and figures for people (``grid``, ``report``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.bench.client import ClientModel
from paceline.bench.grid import count_flips
from paceline.bench.link import LinkModel
from paceline.bench.methods import Cell, no_drafters, playback_drafters, stream
from paceline.bench.recording import Recording, Rows
from paceline.bench.stats import Served
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.client.drafting.drafter import Drafter
from paceline.shared.messages import StepTime


class Trial:
    """A pair made of dice, and what each kind of client makes of it."""

    def __init__(self, prompts: int, length: int, **quality: float) -> None:
        made, self.vocab_size = renumbered(synthetic(prompts, length, seed=3, **quality))  # type: ignore[arg-type]
        self.recordings = made.recordings

    def cell(self, rtt_ms: float, step_ms: float, **link: float) -> Cell:
        """A cell whose server needs 0.4 % of a one-token step for a row; ``link``: fields of ``LinkModel``."""
        step = StepTime(step_ms * 0.996e-3, step_ms * 0.004e-3)
        return Cell(self.recordings, self.vocab_size, step, LinkModel(rtt_ms / 1e3, **link))  # type: ignore[arg-type]

    def alone(self, cell: Cell) -> list[Served]:
        """Plain streaming."""
        return self.check(stream(cell, ClientModel(no_drafters)))

    def ours(self, cell: Cell, model: ClientModel | None = None) -> list[Served]:
        """Drafted."""
        return self.check(stream(cell, model or ClientModel(playback_drafters, cell.draft_time)))

    def check(self, served: list[Served]) -> list[Served]:
        """The same requests. Raises ``AssertionError`` unless every token is there, once, and the target's own."""
        for recording, one in zip(self.recordings, served, strict=True):
            if not one.is_finished or one.token_ids != recording.output.tolist():
                got = f"{one.num_tokens} tokens of which {count_flips(one.token_ids, recording)} are missing or wrong"
                raise AssertionError(f"expected the {len(recording.output)} recorded tokens, got {got}")
        return served


def tok_s(served: Sequence[Served]) -> float:
    """Tokens per second of the mean stream."""
    return sum(one.num_tokens for one in served) / sum(one.total_s for one in served)


def wrong_drafters(recording: Recording) -> Sequence[Drafter]:
    """The recorded drafter, with every right candidate replaced by a wrong one: sure of itself, and never right."""
    ids = recording.on_path.token_ids.copy()
    right = ids == recording.output[:, None]
    spare = (ids.max(axis=1) + 1) % max(int(ids.max()), 1)
    ids[right] = np.broadcast_to(spare[:, None], ids.shape)[right]
    ids[ids == recording.output[:, None]] = 0
    return playback_drafters(replace(recording, on_path=Rows(ids, recording.on_path.logprobs)))

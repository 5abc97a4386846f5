"""A target that recites recordings: the engine steps it like any other, and it writes what was recorded.

Rows on the recorded path get logits whose only peak is the recorded token; rows off it can never be committed, so any
token will do there. The engine above it is the real one: scheduling, budgets, patience, alignment, commits.

Not here: time (``server``), and whether KV would be in place, which the server's own tests prove.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bench.playback import OFF_PATH, Oracle
from paceline.bench.recording import Recording, RecordingSet, Rows
from paceline.server.batch import Batch
from paceline.server.kv.pool import KVPool
from paceline.server.target import TargetInfo
from paceline.shared.tree import ANCHOR

PEAK = 1e4
"""Logit of the recorded token; all others are 0. Far above any Gumbel noise, so seeded sampling picks it too."""


class RecordedTarget:
    """Implements ``paceline.server.target.Target``. ``prepare`` says whose output each segment of a step belongs to."""

    def __init__(self, vocab_size: int, *, max_context: int = 8192, num_blocks: int = 8192) -> None:
        self._pool = KVPool(num_blocks, 16, 1, 1, 1, torch.float32, "cpu")
        self._info = TargetInfo(
            name="recorded",
            vocab_size=vocab_size,
            max_context=max_context,
            bos_token_id=None,
            eos_token_ids=(),
            dtype="float32",
            device="cpu",
            tokenizer_path=None,
            chat_template_path=None,
            fingerprint="recorded",
        )
        self._contexts: list[tuple[Oracle, int]] = []

    @property
    def info(self) -> TargetInfo:
        """What the target is."""
        return self._info

    @property
    def pool(self) -> KVPool:
        """Where its KV would live: blocks are counted, nothing is written."""
        return self._pool

    def prepare(self, contexts: Sequence[tuple[Oracle, int]]) -> None:
        """For each segment of the next step: whose output it is and the place of the anchor's next token in it."""
        self._contexts = list(contexts)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Target.forward``."""
        tokens: list[int] = []
        for segment, (oracle, place) in zip(batch.segments, self._contexts, strict=True):
            if not segment.wants_logits:
                continue
            places = [place]
            nodes = zip(segment.tree.tokens.tolist(), segment.tree.parents.tolist(), strict=True)
            for token, parent in nodes:
                places.append(oracle.step(places[0] if parent == ANCHOR else places[parent + 1], token))
            tokens.extend(self._choice(oracle, one) for one in places)
        logits = torch.zeros((len(tokens), self._info.vocab_size))
        logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)] = PEAK
        return logits

    def _choice(self, oracle: Oracle, place: int) -> int:
        return oracle.output[place] if place != OFF_PATH and place < len(oracle.output) else 0


def renumbered(recordings: RecordingSet) -> tuple[RecordingSet, int]:
    """The same recordings over a vocabulary of only the ids that occur, and its size. For greedy output only: noise
    depends on ids. Logits get ten times smaller, frames keep their size (ids still take two bytes).
    """
    arrays = [
        array
        for r in recordings.recordings
        for array in (r.prompt, r.output, r.on_path.token_ids, r.off_path.token_ids)
    ]
    known = np.unique(np.concatenate([array.ravel() for array in arrays]))

    def renumber(ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.searchsorted(known, ids).astype(np.int32)

    def rows(old: Rows) -> Rows:
        return Rows(renumber(old.token_ids), old.logprobs)

    made = tuple(
        Recording(renumber(r.prompt), renumber(r.output), rows(r.on_path), rows(r.off_path), r.temperature, r.seed)
        for r in recordings.recordings
    )
    return RecordingSet(made, recordings.meta), max(len(known), 256)

"""A drafter that is sure of itself and always wrong: the worst case, for diagnosis (``--drafter wrong``).

It names tokens that have nothing to do with the text, with high confidence, so everything that protects a user from a
useless drafter can be watched at work. A hit is possible, but no likelier than picking a token blindly.
"""

from __future__ import annotations

import numpy as np

from paceline.client.drafting.drafter import Candidates, DraftRequest, DraftSequence

_CONFIDENCES = (0.6, 0.2, 0.1, 0.05)
_MIX = 0x9E3779B1


class WrongDrafter:
    """Proposes ``_CONFIDENCES`` many arbitrary tokens per node. vocab_size: of the target."""

    def __init__(self, vocab_size: int, *, name: str = "wrong") -> None:
        self._vocab_size = vocab_size
        self.name = name
        self.is_instant = True
        self.max_context = 1 << 20
        self.chunk_len = 1 << 20

    def start(self) -> DraftSequence:
        return WrongSequence(self._vocab_size)

    def close(self) -> None:
        """Nothing to free."""


class WrongSequence:
    """Holds nothing: what it says depends on position and depth alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def expand(self, request: DraftRequest) -> Candidates:
        depths = request.depths.astype(np.int64)
        if request.wants_anchor:
            depths = np.concatenate([[0], depths])
        count = min(len(_CONFIDENCES), self._vocab_size)
        first = ((request.committed_len + depths) * _MIX) % self._vocab_size
        token_ids = (first[:, None] + np.arange(count)) % self._vocab_size
        logprobs = np.broadcast_to(np.log(np.array(_CONFIDENCES[:count], np.float32)), token_ids.shape)
        return Candidates(token_ids.astype(np.int32), logprobs.copy(), is_point_mass=True)

    def close(self) -> None:
        """Nothing to free."""

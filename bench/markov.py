"""A draft model that sees one token back, from a table of logits. Goes with ``paceline.server.scripted``, for tests.

Not here: drafters of a known quality along recorded text (``synthetic``, ``playback``).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.client.drafting.drafter import Candidates, DraftRequest


class MarkovDrafter:
    """Implements the client's ``Drafter`` and, because it is stateless, ``DraftSequence``."""

    name = "markov"
    max_context = 4096

    def __init__(
        self, logits: NDArray[np.float32], *, width: int | None = None, is_instant: bool = False, chunk_len: int = 64
    ) -> None:
        """logits: float32[V, V], row i: what follows token i. width: candidates a row, None for all."""
        self.logprobs: NDArray[np.float32] = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        self.is_instant, self.chunk_len = is_instant, chunk_len
        self.num_calls = 0
        self._width = width

    def start(self) -> MarkovDrafter:
        """Itself."""
        return self

    def close(self) -> None:
        """Nothing to free."""

    def expand(self, request: DraftRequest) -> Candidates:
        """The table's rows of the tokens that are asked about, best first."""
        self.num_calls += 1
        last = [int(request.token_ids[-1])] if request.wants_anchor else []
        rows = self.logprobs[[*last, *request.tokens.tolist()]]
        order = np.argsort(-rows, axis=1, kind="stable")[:, : self._width]
        return Candidates(order.astype(np.int32), np.take_along_axis(rows, order, axis=1))

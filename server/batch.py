"""What one engine step asks of the target: the packed, ragged batch that the scheduler makes and the target scores.

A batch is a list of segments, one for each generation that takes part. Nothing here knows about sessions or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.shared.tree import TokenTree


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One generation's rows in a step: committed tokens whose KV is missing, then the nodes of its tree.

    sequence: the KV pool's handle of the generation (its block table lives there).
    cached_len: number of tokens at the front of the generation whose KV is in the pool.
    token_ids: int32[c], c >= 1, the committed tokens at positions cached_len .. cached_len+c-1, a causal chain.
    tree: nodes below the last of them, depth first; empty while prefill has not reached the last committed token.
        Node i is written at slot cached_len + c + i; its position is cached_len + c - 1 + depth.
    wants_logits: whether the rows of the anchor (last of token_ids) and of the nodes are scored. False for a prefill
        chunk that ends before the last committed token.
    """

    sequence: int
    cached_len: int
    token_ids: NDArray[np.int32]
    tree: TokenTree
    wants_logits: bool = True

    @property
    def num_rows(self) -> int:
        """Rows in the packed batch: c + n."""
        return len(self.token_ids) + len(self.tree)

    @property
    def num_scored(self) -> int:
        """Rows of logits that come back: n + 1 (anchor first), or 0."""
        return len(self.tree) + 1 if self.wants_logits else 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The segments of one step, in the order in which their rows are packed and their logits come back."""

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """All rows of the packed forward pass."""
        return sum(segment.num_rows for segment in self.segments)

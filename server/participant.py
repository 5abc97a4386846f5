"""A generation inside the engine: its output, its KV handle, and what the scheduler has learnt about it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.acceptance import NodeBudget
from paceline.server.generation import Generation
from paceline.server.patience import Patience

Key = tuple[int, int]
"""(connection, generation): a generation's number means something on its own connection only."""


@dataclass(slots=True)
class Participant:
    """sequence: the KV pool's handle, None while it waits or after preemption. cached_len: tokens with KV."""

    key: Key
    generation: Generation
    budget: NodeBudget
    patience: Patience
    opened_at: float
    sequence: int | None = None
    cached_len: int = 0
    was_opened: bool = False
    num_verified: int = 0

    @property
    def num_missing(self) -> int:
        """Committed tokens without KV."""
        return self.generation.length - self.cached_len

    @property
    def has_nodes(self) -> bool:
        """Whether there are nodes that a step could score."""
        return len(self.generation.live) > 0

"""Our engine, but it scores every node that it is sent.

For what measures trees of a given size (``evaluate``) and for methods that score whole trees (``whole_tree_server``).
Ours scores the nodes that pay, in a shared step also only those that leave the others their pace.
"""

from __future__ import annotations

from paceline.server.acceptance import NodeBudget
from paceline.server.engine import Engine
from paceline.server.participant import Key
from paceline.shared.messages import Open


class WholeTrees(NodeBudget):
    """Every node pays."""

    def __init__(self, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self._all = max_nodes

    def paying(self, min_rate: float) -> int:
        """All of them."""
        del min_rate
        return self._all


class WholeTreeEngine(Engine):
    """Our engine without our node budget."""

    def open(self, key: Key, request: Open, now: float) -> None:
        """See ``Engine.open``."""
        super().open(key, request, now)
        participant = self.find(key)
        assert participant is not None
        participant.budget = WholeTrees(self.settings.max_nodes)

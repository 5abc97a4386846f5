"""Static against dynamic trees at the same node count: the same client, link and server, another tree policy.

    static-N    the best of SpecInfer's expansions <k1,...,km> of about N nodes, picked with hindsight
    dynamic-N   best first, with as many nodes

Both draft full duplex, and the server scores at most N nodes a step for both. Not here: other systems (``methods``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from paceline.bench.client import ClientModel
from paceline.bench.methods import Cell, Outcome, playback_drafters, stream
from paceline.client.drafting.policy import StaticPolicy
from paceline.server.engine import EngineSettings

Widths = tuple[int, ...]
_NAME = re.compile(r"(static|dynamic)-([1-9][0-9]{0,2})")
_MAX_DEPTH = 8
_LEAST_FILL = 0.8


def expansions(num_nodes: int, max_depth: int = _MAX_DEPTH) -> list[Widths]:
    """All <k1,...,km> with k1 >= k2 >= ... whose last level is as wide as can be and that have no room for another one.

    Those that leave more than a fifth of the nodes unused are left out, unless they are as deep as is allowed.
    """
    found: list[Widths] = []

    def extend(widths: Widths, level: int, total: int) -> None:
        room = (num_nodes - total) // level
        widest = min(room, widths[-1] if widths else num_nodes)
        if not widest or len(widths) == max_depth:
            if len(widths) == max_depth or total >= _LEAST_FILL * num_nodes:
                found.append(widths)
            return
        for width in range(widest, 0, -1):
            nodes = level * width
            has_room = len(widths) + 1 < max_depth and num_nodes - total - nodes >= nodes
            if width == widest or has_room:
                extend((*widths, width), nodes, total + nodes)

    extend((), 1, 0)
    return found


def static_trees(cell: Cell, num_nodes: int) -> Outcome:
    """The best expansion of that many nodes in this cell."""
    outcomes = [_run(cell, num_nodes, widths) for widths in expansions(num_nodes)]
    return max(outcomes, key=lambda outcome: outcome.tok_s)


def dynamic_trees(cell: Cell, num_nodes: int) -> Outcome:
    """Best first within that many nodes."""
    return _run(cell, num_nodes, ())


def _run(cell: Cell, num_nodes: int, widths: Widths) -> Outcome:
    model = ClientModel(playback_drafters, cell.draft_time)
    if widths:
        model = ClientModel(playback_drafters, cell.draft_time, make_policy=lambda: StaticPolicy(widths))
    served = stream(cell, model, EngineSettings(max_nodes=num_nodes))
    return Outcome(served, f"<{','.join(map(str, widths))}>" if widths else "")


def find_node_count_method(name: str) -> Callable[[Cell], Outcome] | None:
    """``static-N`` or ``dynamic-N``, None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    run = static_trees if match[1] == "static" else dynamic_trees
    return partial(run, num_nodes=int(match[2]))

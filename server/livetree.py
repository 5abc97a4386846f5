"""The live tree of one generation: the proposed nodes that can still become output, and the names of those that did.

Node ids count up from 0 within a generation. Every id below ``next_id`` is in one of three states:

    live      it hangs, through live nodes, below the anchor (the last committed token)
    on path   its parent is on the path and its token is the committed token at its position
    dead      everything else

Late frames need no special case: a node joins the tree, the path or the dead by what its parent is (DESIGN.md section
5). Only live nodes and the latest names on the path are stored, so that memory is bounded whatever a client sends.
Not here: what is committed and why (``generation``), and which nodes a step takes (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.shared.errors import LimitError, ProtocolError, TreeError
from paceline.shared.messages import ANCHOR_ID, Grow, Limits, Proposal
from paceline.shared.tree import ANCHOR, TokenTree

MAX_PATH_NAMES = 4096
"""How many ids on the path are remembered: a frame that extends an older one is stale."""


Siblings = dict[tuple[int, int], int]
"""(token, drafter) -> node id, in order of arrival: one drafter proposes a token once below one parent."""


@dataclass(slots=True)
class LiveNode:
    """A node that can still be accepted. parent: a live id, or ANCHOR_ID for a child of the anchor."""

    node_id: int
    token: int
    position: int
    parent: int
    drafter: int
    children: Siblings = field(default_factory=dict)
    proposals: dict[int, Proposal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """Nodes chosen for a step, depth first. ids[i] names node i of ``tree``.

    proposals: row -> drafter -> q; row 0 is the anchor, row i + 1 is node i.
    """

    ids: tuple[int, ...]
    tree: TokenTree
    proposals: dict[int, dict[int, Proposal]]


@dataclass(slots=True)
class Growth:
    """What became of a frame: how many nodes joined the live tree, and which of the others (by their place in the
    frame) were judged at once, on the path or not.
    """

    num_joined: int = 0
    judged: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


_NOTHING = LaidOut((), TokenTree.empty(), {})
"""Shared by all steps without nodes, which are most steps of a loaded server."""


class LiveTree:
    """See the module's text.

    aliases: whether two nodes with one token below one parent may both be on the path. Not in mss, where the children
    drawn below either are separate draws.
    """

    def __init__(self, limits: Limits, vocab_size: int, *, aliases: bool) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._aliases = aliases
        self._nodes: dict[int, LiveNode] = {}
        self._roots: Siblings = {}
        self._root_proposals: dict[int, Proposal] = {}
        self._path: dict[int, int] = {}
        self._named_until = -1
        self.next_id = 0
        self.num_stale = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    @property
    def num_path_names(self) -> int:
        """How many ids on the path are remembered."""
        return len(self._path)

    @property
    def ids(self) -> list[int]:
        """The live ids in order of arrival."""
        return list(self._nodes)

    def judge(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of nodes that were live before a commit, in order of arrival: the places of those that are not live any more,
        and of those of them that are on the path. Unscored nodes are judged as well: the committed text is the label.
        """
        decided = [place for place, node_id in enumerate(ids) if node_id not in self._nodes]
        return decided, [place for place in decided if ids[place] in self._path]

    def is_on_path(self, node_id: int) -> bool:
        """Whether the id is known to be on the committed path."""
        return node_id in self._path

    def grow(self, frame: Grow, committed: Sequence[int], first_position: int) -> Growth:
        """Aligns a frame's nodes.

        committed: the output tokens so far; first_position: the position of the first of them.
        Raises ``ProtocolError``, ``LimitError`` or ``TreeError``; the generation is then beyond repair.
        """
        end = first_position + len(committed)
        self._check_frame(frame, first_position, end)
        drafters = [0] * len(frame.tokens) if frame.drafters is None else frame.drafters.tolist()
        rows = zip(frame.tokens.tolist(), frame.parents.tolist(), drafters, strict=True)
        growth = Growth()
        for offset, (token, parent, drafter) in enumerate(rows):
            node_id = frame.first_id + offset
            position = self._position_below(parent, frame.at)
            if position is not None and position >= end:
                above = ANCHOR_ID if position == end else parent
                self._join(LiveNode(node_id, token, position, above, drafter), end)
                growth.num_joined += 1
                continue
            growth.judged.append(offset)
            if position is not None and token == committed[position - first_position]:
                growth.accepted.append(offset)
                self._pass_by(node_id, position)
            else:
                self.num_stale += 1
        self.next_id += len(frame.tokens)
        self._keep_proposals(frame, end)
        return growth

    def advance(self, token: int, position: int, accepted: int | None = None) -> int:
        """Moves the anchor one token on and returns how many nodes died.

        accepted: the node that the verifier accepted, None for a bonus token: then the first root with that token, if
        there is one, becomes the anchor.
        """
        matching = [node_id for (root_token, _), node_id in self._roots.items() if root_token == token]
        if accepted is not None:
            matching.sort(key=lambda node_id: node_id != accepted)
        heirs = matching if self._aliases else matching[:1]
        before = len(self._nodes)
        for node_id in self._roots.values():
            if node_id not in heirs:
                self._remove(node_id)
        self._root_proposals = self._nodes[heirs[0]].proposals if heirs else {}
        inherited: list[tuple[tuple[int, int], int]] = []
        for node_id in heirs:
            inherited.extend(self._nodes.pop(node_id).children.items())
            self._name_on_path(node_id, position)
        self._roots = {}
        for key, node_id in inherited:
            self._nodes[node_id].parent = ANCHOR_ID
            if self._roots.setdefault(key, node_id) != node_id:
                self._remove(node_id)
        return before - len(self._nodes) - len(heirs)

    def lay_out(self, max_nodes: int, end_position: int) -> LaidOut:
        """The first nodes to arrive, at positions below ``end_position``, in depth-first order.

        Arrival order is the drafters' own ranking, and does not depend on drawn tokens (which mss must not look at).
        """
        if not (self._nodes and max_nodes) and not self._root_proposals:
            return _NOTHING
        chosen: list[LiveNode] = []
        index: dict[int, int] = {ANCHOR_ID: ANCHOR}
        for node in self._nodes.values():
            if len(chosen) >= max_nodes:
                break
            if node.position < end_position and node.parent in index:
                index[node.node_id] = len(chosen)
                chosen.append(node)
        parents = [index[node.parent] for node in chosen]
        arrived = TokenTree([n.token for n in chosen], parents, [n.drafter for n in chosen])  # type: ignore[arg-type]
        order = arrived.depth_first()
        nodes = [chosen[i] for i in order.tolist()]
        proposals = {row + 1: dict(node.proposals) for row, node in enumerate(nodes) if node.proposals}
        if self._root_proposals:
            proposals[0] = dict(self._root_proposals)
        return LaidOut(tuple(node.node_id for node in nodes), arrived.take(order), proposals)

    def clear(self) -> None:
        """Forgets all nodes: the generation is over."""
        self._nodes.clear()
        self._roots.clear()
        self._path.clear()
        self._root_proposals.clear()

    def _check_frame(self, frame: Grow, first_position: int, end: int) -> None:
        count = len(frame.tokens)
        if frame.first_id != self.next_id:
            raise ProtocolError(f"expected the frame's first node id to be {self.next_id}, got {frame.first_id}")
        if not first_position <= frame.at <= end:
            raise ProtocolError(f"expected at in {first_position}..{end} (the committed length), got {frame.at}")
        if count > self._limits.max_frame_nodes:
            raise LimitError(f"expected at most max_frame_nodes={self._limits.max_frame_nodes} nodes, got {count}")
        if len(frame.parents) != count or (frame.drafters is not None and len(frame.drafters) != count):
            raise TreeError(f"expected one parent and one drafter for each of {count} tokens")
        if not count:
            return
        low, high = int(frame.tokens.min()), int(frame.tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise TreeError(f"expected tokens in 0..{self._vocab_size - 1}, got {low if low < 0 else high}")
        ids = np.arange(frame.first_id, frame.first_id + count)
        wrong = np.flatnonzero((frame.parents < ANCHOR_ID) | (frame.parents >= ids))
        if len(wrong):
            node = int(wrong[0])
            raise TreeError(f"expected a parent in -1..{ids[node] - 1} for node {ids[node]}, got {frame.parents[node]}")
        # Late nodes are not kept, so that repeats among them show here or nowhere.
        drafters = np.zeros(count, np.uint8) if frame.drafters is None else frame.drafters
        if len(set(zip(frame.parents.tolist(), frame.tokens.tolist(), drafters.tolist(), strict=True))) < count:
            raise TreeError("expected distinct siblings, got a token twice below one parent in one frame")

    def _position_below(self, parent: int, at: int) -> int | None:
        """The position that a child of ``parent`` proposes for; None if the parent is dead."""
        if parent == ANCHOR_ID:
            return at
        node = self._nodes.get(parent)
        if node is not None:
            return node.position + 1
        position = self._path.get(parent)
        return None if position is None else position + 1

    def _pass_by(self, node_id: int, position: int) -> None:
        """A late node with the committed token: its children are welcome, unless another one's draws are (mss)."""
        if self._aliases or position > self._named_until:
            self._name_on_path(node_id, position)
        else:
            self.num_stale += 1

    def _name_on_path(self, node_id: int, position: int) -> None:
        self._path[node_id] = position
        self._named_until = max(self._named_until, position)
        if len(self._path) > MAX_PATH_NAMES:
            del self._path[next(iter(self._path))]

    def _join(self, node: LiveNode, end: int) -> None:
        siblings = self._roots if node.parent == ANCHOR_ID else self._nodes[node.parent].children
        twin = siblings.get((node.token, node.drafter))
        if twin is not None:
            raise TreeError(f"expected distinct siblings, got token {node.token} for nodes {twin} and {node.node_id}")
        if len(self._nodes) >= self._limits.max_live_nodes:
            raise LimitError(f"expected at most max_live_nodes={self._limits.max_live_nodes} live nodes")
        depth = node.position - end + 1
        if depth > self._limits.max_depth:
            raise LimitError(f"expected a depth of at most max_depth={self._limits.max_depth}, got {depth}")
        siblings[node.token, node.drafter] = node.node_id
        self._nodes[node.node_id] = node

    def _keep_proposals(self, frame: Grow, end: int) -> None:
        """Stores each q with its parent, the first one for good: its children were drawn from that."""
        for (parent, drafter), proposal in frame.proposals.items():
            if parent >= self.next_id:
                raise ProtocolError(f"expected proposals below known nodes, got one below node {parent}")
            node = self._nodes.get(parent)
            if node is not None:
                node.proposals.setdefault(drafter, proposal)
            elif self._position_below(parent, frame.at) == end:
                self._root_proposals.setdefault(drafter, proposal)

    def _remove(self, node_id: int) -> None:
        stack = [node_id]
        while stack:
            stack.extend(self._nodes.pop(stack.pop()).children.values())

"""The growing half of a client session: asks drafters, takes their candidates into the live tree, writes grow frames.

Each drafter has its own pace. What it was told of the text (``synced``) and which nodes it expanded are kept here, so a
request carries exactly what the drafter lacks. An answer that arrives after a commit is matched by node keys: what died
meanwhile is dropped, a node that became the anchor counts as the anchor.

Not here: the text and its end (``session``), the rules (``drafting.policy``, ``drafting.ranking``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, Drafter, DraftRequest
from paceline.client.drafting.live_tree import ALL_DRAFTERS, ANCHOR_ROW, UNSENT, LiveTree
from paceline.client.drafting.policy import CallCost, Choice, Conditions, Policy, Prospect, Rows
from paceline.client.drafting.ranking import Ranked, Ranking, Situation
from paceline.shared.errors import ProtocolError
from paceline.shared.messages import ANCHOR_ID, ClientMessage, Grow, Proposal

_NO_ROWS: Rows = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


class Growth:
    """See the module's text. ``draws``: mss, where children are draws and all of them must be sent."""

    def __init__(
        self,
        tokens: Sequence[int],
        drafters: Sequence[Drafter],
        policy: Policy,
        acceptance: Acceptance,
        ranking: Ranking,
        *,
        draws: bool,
        closing_ids: Sequence[int],
    ) -> None:
        """tokens: prompt and output so far. closing_ids: tokens that nothing can follow."""
        self.tree = LiveTree()
        self.tokens = list(tokens)
        self.num_sent = 0
        self._keys = [ANCHOR_KEY] * len(self.tokens)
        self._drafters = tuple(drafters)
        self._policy = policy
        self._acceptance = acceptance
        self._ranking = ranking
        self._draws = draws
        self._closing_ids = np.array(sorted(closing_ids), np.int32)
        self._synced = [0] * len(self._drafters)
        self._out: list[DraftRequest | None] = [None] * len(self._drafters)
        self._next_id = 0

    def commit(self, tokens: NDArray[np.int32]) -> bool | None:
        """Tokens became final. Returns whether the likeliest candidate came true, None if there was no candidate."""
        roots = np.flatnonzero(self.tree.parents == ANCHOR_ROW)
        top_hit = None
        if len(roots):
            top_hit = bool(self.tree.tokens[roots[np.argmax(self.tree.chances[roots])]] == tokens[0])
        keys, labels = self.tree.commit(tokens)
        self._acceptance.learn(labels)
        self.tokens.extend(tokens.tolist())
        self._keys.extend(keys.tolist())
        return top_hit

    def restart(self) -> None:
        """Another server, or a new generation number there: nothing counts as sent, ids begin at 0."""
        self._next_id = 0
        if self._draws:
            self.tree.clear()  # draws may not be sent twice: a verifier that saw them would have chosen already
        self.tree.forget_sent()

    # Asking drafters

    def is_asked(self, drafter: int) -> bool:
        """Whether the drafter has a request out."""
        return self._out[drafter] is not None

    def prospect(self, drafter: int, conditions: Conditions, cost: CallCost) -> Prospect:
        """What the next call of a drafter is expected to bring."""
        return self._policy.prospect(self.tree, drafter, conditions, cost)

    def next_request(
        self, drafter: int, conditions: Conditions, cost: CallCost, *, probes: bool
    ) -> DraftRequest | None:
        """The next request for a drafter that has none out. probes: ask even while nothing is sent."""
        behind = len(self.tokens) - self._synced[drafter]
        chunk = self._drafters[drafter].chunk_len
        if behind > chunk:
            return self._request(drafter, chunk, Choice(_NO_ROWS, anchor=False))
        if not conditions.sends and not probes:
            return None
        choice = self._policy.select(self.tree, drafter, conditions, cost)
        return None if choice.is_empty else self._request(drafter, behind, choice)

    def _request(self, drafter: int, count: int, choice: Choice) -> DraftRequest:
        tree, rows = self.tree, choice.rows
        end = self._synced[drafter] + count
        # An anchor whose answer was lost is asked for again: the drafter goes one token back.
        start = self._synced[drafter] - (choice.anchor and not count)
        parents = tree.parents[rows]
        parent_keys = np.full(len(rows), ANCHOR_KEY, np.int64)
        parent_keys[parents != ANCHOR_ROW] = tree.keys[parents[parents != ANCHOR_ROW]]
        path_keys = np.array(self._keys[start:end], np.int64)
        if choice.anchor and not count:
            path_keys[:] = ANCHOR_KEY
        depths = tree.depths[rows]
        all_depths = np.concatenate([np.zeros(int(choice.anchor), np.int32), depths])
        request = DraftRequest(
            drafter=drafter,
            start=start,
            token_ids=np.array(self.tokens[start:end], np.int32),
            path_keys=path_keys,
            alive_keys=tree.keys,
            keys=tree.keys[rows],
            tokens=tree.tokens[rows],
            parent_keys=parent_keys,
            depths=depths,
            wants_anchor=choice.anchor,
            width=self._ranking.width(int(self._policy.max_children(all_depths).max(initial=1))),
            extra_ids=self._extra_ids(drafter, all_depths),
        )
        tree.mark_expanded(rows, drafter, anchor=choice.anchor)
        self._synced[drafter] = end
        self._out[drafter] = request
        return request

    def _extra_ids(self, drafter: int, depths: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens to ask a model about at the positions below nodes of these depths."""
        if self._drafters[drafter].is_instant:
            return _NO_TOKENS
        return self._ranking.extra_ids(len(self.tokens) + np.unique(depths).astype(np.int64))

    # Taking answers

    def answered(self, drafter: int) -> DraftRequest:
        """The request that an answer belongs to; its drafter is free again. Raises ``ProtocolError`` without one."""
        request = self._out[drafter]
        if request is None:
            raise ProtocolError(f"expected an answer from a drafter that was asked, got one from drafter {drafter}")
        self._out[drafter] = None
        return request

    def take(
        self,
        request: DraftRequest,
        candidates: Candidates,
        conditions: Conditions,
        generation: int,
        max_frame_nodes: int,
    ) -> list[Grow]:
        """Hang candidates below the nodes that are still alive. Returns frames in mss only: draws are sent at once."""
        keys = np.concatenate([[ANCHOR_KEY], request.keys]) if request.wants_anchor else request.keys
        rows = self._present_rows(keys, is_anchor_still=request.committed_len == len(self.tokens))
        alive = np.flatnonzero(rows != UNSENT)
        if not len(alive) or not candidates.token_ids.shape[1]:
            return []
        rows = rows[alive]
        depths, odds = self._places(rows)
        situation = Situation(
            positions=len(self.tokens) + depths.astype(np.int64),
            odds=odds,
            limits=self._limits(rows, depths, conditions),
            least_odds=conditions.least_value,
        )
        picked = Candidates(candidates.token_ids[alive], candidates.logprobs[alive], candidates.is_point_mass)
        ranked = self._ranking.rank(picked, situation)
        fresh = self._hang(request.drafter, rows, depths, ranked)
        if not self._draws or not len(fresh):
            return []
        by_parent = {int(rows[index]): proposal for index, proposal in ranked.proposals.items()}
        return [self._frame(generation, part, by_parent) for part in _parts(fresh, max_frame_nodes)]

    def _present_rows(self, keys: NDArray[np.int64], *, is_anchor_still: bool) -> Rows:
        rows = self.tree.rows_of(keys)
        if is_anchor_still:
            return rows
        rows = np.where(keys == ANCHOR_KEY, UNSENT, rows)
        became_anchor = (keys == self._keys[-1]) & (keys != ANCHOR_KEY)
        return np.where(became_anchor, ANCHOR_ROW, rows)

    def _places(self, rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Depths and odds of rows, the anchor's being 0 and 1."""
        depths, odds = np.zeros(len(rows), np.int32), np.ones(len(rows))
        inner = rows != ANCHOR_ROW
        depths[inner] = self.tree.depths[rows[inner]]
        odds[inner] = self.tree.odds[rows[inner]]
        return depths, odds

    def _limits(self, rows: Rows, depths: NDArray[np.int32], conditions: Conditions) -> NDArray[np.int32]:
        limits = np.where(depths < conditions.max_depth, self._policy.max_children(depths), 0)
        if self._draws:
            # All draws are sent at once, so room is shared out before anything is drawn.
            room = conditions.max_nodes - len(self.tree) if conditions.sends else 0
            limits = np.minimum(limits, max(0, room) // max(1, len(rows)))
            # Children below one row come from one drafter: whoever answers later is not drawn from.
            limits[np.isin(rows, self.tree.parents)] = 0
        return limits.astype(np.int32)

    def _hang(self, drafter: int, rows: Rows, depths: NDArray[np.int32], ranked: Ranked) -> Rows:
        """Append ranked children and return their rows."""
        tree = self.tree
        if not len(ranked.rows):
            return _NO_ROWS
        chances, cells = self._acceptance.estimate(drafter, depths[ranked.rows] + 1, ranked.priors)
        parents = rows[ranked.rows]
        count = tree.append(parents, ranked.tokens, chances, cells, drafter, is_merged=not self._draws)
        fresh = np.arange(len(tree) - count, len(tree))
        closes = (tree.tokens[fresh, None] == self._closing_ids).any(axis=1)
        tree.expanded[fresh[closes]] = ALL_DRAFTERS
        return fresh

    # Grow frames

    def frames(self, generation: int, conditions: Conditions, max_frame_nodes: int) -> list[Grow]:
        """Frames with everything that has become worth sending (none in mss: see ``take``)."""
        if self._draws or not len(self.tree):
            return []
        rows = self._policy.send(self.tree, conditions)
        return [self._frame(generation, part, None) for part in _parts(rows, max_frame_nodes)]

    def _frame(self, generation: int, rows: Rows, by_parent: Mapping[int, Proposal] | None) -> Grow:
        tree = self.tree
        tree.ids[rows] = np.arange(self._next_id, self._next_id + len(rows))
        parents = tree.parents[rows]
        parent_ids = np.full(len(rows), ANCHOR_ID, np.int32)
        parent_ids[parents != ANCHOR_ROW] = tree.ids[parents[parents != ANCHOR_ROW]]
        drafters = None
        proposals: dict[tuple[int, int], Proposal] = {}
        if by_parent is not None:
            drafters = tree.drafters[rows]
            for parent, parent_id, drafter in zip(
                parents.tolist(), parent_ids.tolist(), drafters.tolist(), strict=True
            ):
                if parent in by_parent:
                    proposals[parent_id, drafter] = by_parent[parent]
        frame = Grow(generation, len(self.tokens), self._next_id, tree.tokens[rows], parent_ids, drafters, proposals)
        self._next_id += len(rows)
        self.num_sent += len(rows)
        return frame


def _parts(rows: Rows, size: int) -> list[Rows]:
    """Consecutive rows, at most ``size`` at a time: a server takes no larger frame."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def join_frames(messages: Sequence[ClientMessage], max_frame_nodes: int) -> list[ClientMessage]:
    """The same messages, with grow frames that continue each other (same anchor, next ids) made one."""
    joined: list[ClientMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if isinstance(last, Grow) and isinstance(message, Grow) and _continues(last, message, max_frame_nodes):
            drafters = None
            if last.drafters is not None and message.drafters is not None:
                drafters = np.concatenate([last.drafters, message.drafters])
            joined[-1] = Grow(
                generation=last.generation,
                at=last.at,
                first_id=last.first_id,
                tokens=np.concatenate([last.tokens, message.tokens]),
                parents=np.concatenate([last.parents, message.parents]),
                drafters=drafters,
                proposals={**last.proposals, **message.proposals},
            )
        else:
            joined.append(message)
    return joined


def _continues(first: Grow, second: Grow, max_frame_nodes: int) -> bool:
    return (
        (first.generation, first.at) == (second.generation, second.at)
        and (first.drafters is None) == (second.drafters is None)
        and len(first.tokens) + len(second.tokens) <= max_frame_nodes
    )

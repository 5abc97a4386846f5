"""Which of the sent nodes the server's step in flight scores, as far as the client can know.

A commit ends one step and begins the next, with the nodes that had arrived by then: those that were sent a round trip
before the commit came. If none of them is left, a server near by waits for the first frame, and its step scores that.
Nodes sent later are for the step after; they take a row there only if their ancestors outlive the step in flight. So
what a node must be worth depends on where the step in flight ends.

Not here: when frames are held back (``hold``), and what nodes are worth (``drafting.policy``).
"""

from __future__ import annotations

from collections import deque

from paceline.client.drafting.controller import Controller
from paceline.client.drafting.live_tree import UNSENT, LiveTree
from paceline.shared.messages import ClientMessage, Grow

_MAX_FRAMES = 256


class Flight:
    """State of one session."""

    def __init__(self, tree: LiveTree, controller: Controller) -> None:
        self._tree = tree
        self._controller = controller
        self._frames: deque[tuple[float, int]] = deque(maxlen=_MAX_FRAMES)
        self._next_frame_counts = True
        self._was_left_bare = False
        self.server_waits = True
        self.scored_id = 0
        """Live nodes with ids below it are in the step in flight."""

    def on_sent(self, now: float, messages: list[ClientMessage]) -> list[ClientMessage]:
        """Messages leave now. Returns them."""
        for message in messages:
            if isinstance(message, Grow):
                end_id = message.first_id + len(message.tokens)
                self._frames.append((now, end_id))
                if self._next_frame_counts:
                    self.scored_id = end_id
                    self._next_frame_counts = False
        return messages

    def on_commit(self, now: float, num_scored: int) -> None:
        """A commit arrived and the tree followed it. num_scored: nodes that its step scored."""
        if self._was_left_bare:
            self.server_waits = num_scored > 0
        while self._frames and self._frames[0][0] <= now - self._controller.rtt_s:
            self.scored_id = max(self.scored_id, self._frames.popleft()[1])
        ids = self._tree.ids
        self._was_left_bare = not bool(((ids != UNSENT) & (ids < self.scored_id)).any())
        self._next_frame_counts = self._was_left_bare and self.server_waits and not self._frames

    def restart(self) -> None:
        """Another server: it knows of no nodes."""
        self._frames.clear()
        self.scored_id = 0
        self._next_frame_counts, self._was_left_bare = True, False

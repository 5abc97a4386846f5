"""When to hold the first frame below a new anchor back, so that the server's next step finds a tree and not a twig.

After a miss the server has no nodes. Near by (in round trips), it waits a moment for the next draft and starts its step
with the first frame that comes; or it is in the middle of a step already, and a frame in time for the next one is early
enough. Either way the first level need not leave alone: drafting goes on while another call raises the expected tokens
per second of the step that waits,

    gain / call seconds  >  (1 + sum of odds) / (step seconds + time since the commit),

and while the frame still arrives within the part of a step that a server waits. Far away nothing is held back: there
every millisecond decides which positions the draft is too late for.

There are no timers: every answer of the drafter is a chance to look again. Not here: the frames (``growth``).
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.client.drafting.controller import Controller
from paceline.client.drafting.live_tree import LiveTree
from paceline.client.drafting.policy import Prospect

_PART_OF_STEP = 0.28
"""Latest arrival after a commit, as part of a step: a server that waits longer than that loses by it."""


class Hold:
    """State of one session. prospect: what the main drafter's next call promises, asked for when it matters."""

    def __init__(self, tree: LiveTree, controller: Controller, prospect: Callable[[], Prospect]) -> None:
        self._tree = tree
        self._controller = controller
        self._next_prospect = prospect
        self._since: float | None = None
        self._asked: tuple[float, Prospect] | None = None

    def on_commit(self, now: float, call_s: float) -> None:
        """A commit arrived; call_s: seconds of a call for one level. Holding begins if the server has no nodes left."""
        is_near = self._controller.rtt_s + call_s <= _PART_OF_STEP * self._controller.step_s
        self._since = now if is_near and not self._tree.sent.any() else None

    def on_ask(self, now: float) -> None:
        """The main drafter is about to be asked."""
        if self._since is not None:
            self._asked = (now, self._next_prospect())

    def on_answer(self) -> None:
        """The main drafter answered."""
        self._asked = None

    def is_held(self, now: float) -> bool:
        """Whether frames stay until the main drafter's next answer. Once they do not, they go until the next miss."""
        if self._since is None:
            return False
        asked_at, prospect = self._asked or (now, self._next_prospect())
        if not self._is_worth_it(self._since, asked_at, prospect):
            self._since = None
        return self._since is not None

    def _is_worth_it(self, since: float, asked_at: float, prospect: Prospect) -> bool:
        control = self._controller
        after_commit_s = control.rtt_s + asked_at + prospect.seconds - since
        if prospect.gain <= 0.0 or after_commit_s > _PART_OF_STEP * control.step_s:
            return False
        expected = 1.0 + float(self._tree.odds[self._tree.sent].sum())
        return control.coverage * prospect.gain / prospect.seconds > expected / (control.step_s + after_commit_s)

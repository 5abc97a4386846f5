"""How long a generation without live nodes is held back because a useful draft is expected soon.

Held back, it starts its step w seconds later but with a tree; run at once, it gains one token in a step of T seconds
while the draft arrives, and keeps of that draft only what hangs below the token it chose. Waiting pays when the draft
comes reliably within a small part of T and brings at least about a token. The adaptive policy is conservative: it holds
only while the recent arrivals say so, and one vain wait makes it run freely for a while. A wish of 0 is latency first.

Pure bookkeeping: time is an argument.
"""

from __future__ import annotations

from paceline.shared.messages import StepTime

MAX_WAIT_S = 2.0
_LEARNING = 0.25
_MIN_RELIABILITY = 0.7
_FIRST_SURVIVAL = 0.6
_MAX_PART_OF_STEP = 0.5


class Patience:
    """Arrival statistics of one generation. ``wish_s``: the client's own limit in seconds, None for adaptive."""

    def __init__(self, wish_s: float | None) -> None:
        self._wish_s = None if wish_s is None else min(wish_s, MAX_WAIT_S)
        self._commit_at: float | None = None
        self._awaiting = False
        self._mean_s = 0.0
        self._spread_s = 0.0
        self._reliability = 0.0
        self._survival = _FIRST_SURVIVAL

    @property
    def is_strict(self) -> bool:
        """Whether the client asked for a wait of its own: then it is held back even while others run."""
        return bool(self._wish_s)

    def on_commit(self, now: float, *, has_nodes: bool, was_bare: bool = False) -> None:
        """A step of this generation ended. was_bare: it scored no nodes.

        has_nodes: its live tree survived, or arrived in the meantime and was right: there is nothing to wait for.
        """
        if self._awaiting:
            self._reliability *= 1.0 - _LEARNING
        if was_bare:
            self._survival += _LEARNING * (float(has_nodes) - self._survival)
        self._commit_at = now
        self._awaiting = not has_nodes

    def on_nodes(self, now: float) -> None:
        """Nodes joined the live tree."""
        if not self._awaiting or self._commit_at is None:
            return
        self._awaiting = False
        gap = now - self._commit_at
        if not self._reliability:
            self._mean_s = gap
        self._reliability += _LEARNING * (1.0 - self._reliability)
        self._spread_s += _LEARNING * (abs(gap - self._mean_s) - self._spread_s)
        self._mean_s += _LEARNING * (gap - self._mean_s)

    def hold_until(self, step_time: StepTime, accepted_per_step: float) -> float:
        """The time until which a generation without live nodes had better wait; in the past: run now."""
        if self._commit_at is None:
            return 0.0
        if self._wish_s is not None:
            return self._commit_at + self._wish_s
        wait = self._mean_s + 2.0 * self._spread_s
        if self._reliability < _MIN_RELIABILITY or wait > self.longest_wait(step_time, accepted_per_step):
            return 0.0
        return self._commit_at + wait + 0.05 * step_time.at(1)

    def longest_wait(self, step_time: StepTime, accepted_per_step: float) -> float:
        """Seconds up to which waiting yields more tokens per second than running on.

        With a accepted nodes per drafted step, steps of T seconds and a chance s that a draft which arrives during a
        bare step survives it, running on yields 1 + s (1 + a) tokens in 1 + s steps, waiting w seconds 1 + a in T + w:
        waiting pays up to w = T a / (1 + s (1 + a)). Never more than half a step: early figures are only hopes.
        """
        a = max(accepted_per_step, 0.0)
        return step_time.at(1) * min(a / (1.0 + self._survival * (1.0 + a)), _MAX_PART_OF_STEP)

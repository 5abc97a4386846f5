"""How long a generation without live nodes is held back because a useful draft is expected soon.

Held back, it starts its step w seconds later but with a tree; run at once, it gains one token in a step of T seconds
while the draft arrives, and keeps of that draft only what hangs below the token it chose. Which of the two yields more
tokens per second follows from what the connection's steps were seen to bring. With y tokens a step and a chance q
that the next step finds nodes at once, for steps that were bare, held back, or ready (nodes were there already):

    run on    (1 + q_bare R) / (T + q_bare D)          R = y_ready / (1 - q_ready): tokens of a run of ready steps
    wait      (y_held + q_held R) / (w + T' + q_held D)    D = T' / (1 - q_ready): its seconds

When a draft is to be expected is measured as well: from a commit that left no nodes to the first frame that builds on
it, however many commits later it comes. A wish of 0 is latency first.

Pure bookkeeping: time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.shared.messages import StepTime

MAX_WAIT_S = 2.0
_MEMORY = 0.95
_GAP_LEARNING = 0.3
_TRUST_LEARNING = 0.5
_LEAST_TRUST = 0.5
_MAX_COMMITS = 64
_SLACK = 0.05
"""Part of a step that a draft may be later than expected."""
_MAX_AGAIN = 0.9
_USUAL_DEPTH = 1.3
_USUAL_AGAIN = 0.45
_SURVIVAL = 0.85
"""Share of the drafts whose first guess is right that outlive a bare step, if they come early in it."""


class _Kind(StrEnum):
    """Of steps: without nodes, with nodes that were waited for, with nodes that were there when the last one ended."""

    BARE = "bare"
    HELD = "held"
    READY = "ready"


@dataclass(slots=True)
class _Mean:
    """Exponentially forgetting; ``at`` mixes in a guess that counts as some samples."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, sample: float) -> None:
        self.total = _MEMORY * self.total + sample
        self.weight = _MEMORY * self.weight + 1.0

    def at(self, guess: float, guess_weight: float = 10.0) -> float:
        return (self.total + guess_weight * guess) / (self.weight + guess_weight)


@dataclass(slots=True)
class _Steps:
    """What the steps of one kind brought: tokens, nodes scored, and whether nodes were there at their end."""

    tokens: _Mean = field(default_factory=_Mean)
    nodes: _Mean = field(default_factory=_Mean)
    again: _Mean = field(default_factory=_Mean)


@dataclass(slots=True)
class Habits:
    """What is known about the drafts of a connection. It outlives a generation, so the next one starts informed."""

    steps: dict[_Kind, _Steps] = field(default_factory=lambda: {kind: _Steps() for kind in _Kind})
    first_hit: _Mean = field(default_factory=_Mean)
    gap_s: float | None = None
    spread_s: float = 0.0
    trust: float = 1.0

    def saw_gap(self, gap_s: float) -> None:
        """A draft came that long after the commit that it builds on."""
        if self.gap_s is None:
            self.gap_s = gap_s
            return
        self.spread_s += _GAP_LEARNING * (abs(gap_s - self.gap_s) - self.spread_s)
        self.gap_s += _GAP_LEARNING * (gap_s - self.gap_s)

    def saw_step(self, kind: _Kind, num_tokens: int, num_scored: int, *, again: bool) -> None:
        """A step ended. again: nodes are there for the next one."""
        steps = self.steps[kind]
        steps.tokens.add(float(num_tokens))
        steps.nodes.add(float(num_scored))
        steps.again.add(float(again))
        if num_scored:
            self.first_hit.add(float(num_tokens > 1))

    def pays_to_wait(self, step_time: StepTime, expected: float) -> bool:
        """See the module's text. expected: nodes that a step with a full tree accepts, as the budget sees it."""
        assert self.gap_s is not None
        bare, held, ready = (self.steps[kind] for kind in (_Kind.BARE, _Kind.HELD, _Kind.READY))
        hit = min(self.first_hit.at(0.6, 4.0), max(expected, 0.0))
        usual = _USUAL_AGAIN * hit
        again = min(ready.again.at(usual), _MAX_AGAIN)
        full_s = step_time.at(1.0 + ready.nodes.at(8.0))
        run_tokens = ready.tokens.at(1.0 + _USUAL_DEPTH * hit) / (1.0 - again)
        run_s = full_s / (1.0 - again)
        bare_s = step_time.at(1.0)
        is_early = self.gap_s < 0.7 * bare_s
        survival = bare.again.at(_SURVIVAL * hit if is_early else 0.5 * hit)
        run_on = (1.0 + survival * run_tokens) / (bare_s + survival * run_s)
        kept = held.again.at(usual)
        held_tokens = held.tokens.at(1.0 + hit)
        waited_s = self.gap_s + step_time.at(1.0 + held.nodes.at(8.0))
        return (held_tokens + kept * run_tokens) / (waited_s + kept * run_s) > run_on


class Patience:
    """One generation's waits. ``wish_s``: the client's own limit in seconds, None for adaptive."""

    def __init__(self, wish_s: float | None, habits: Habits | None = None) -> None:
        self._wish_s = None if wish_s is None else min(wish_s, MAX_WAIT_S)
        self._habits = habits or Habits()
        self._commits: deque[tuple[int, float]] = deque(maxlen=_MAX_COMMITS)
        self._commit_at: float | None = None
        self._had_nodes = False
        self._deadline: float | None = None

    @property
    def is_strict(self) -> bool:
        """Whether the client asked for a wait of its own: then it is held back even while others run."""
        return bool(self._wish_s)

    def on_commit(self, now: float, length: int, *, num_tokens: int, num_scored: int, has_nodes: bool) -> None:
        """A step of this generation ended with ``length`` tokens final.

        has_nodes: its live tree survived, or arrived in the meantime and was right: there is nothing to wait for.
        """
        habits = self._habits
        if self._commit_at is not None:
            kind = _Kind.BARE if not num_scored else _Kind.READY if self._had_nodes else _Kind.HELD
            habits.saw_step(kind, num_tokens, num_scored, again=has_nodes)
            if self._deadline is not None and not num_scored:
                habits.trust *= 1.0 - _TRUST_LEARNING
        self._commit_at = now
        self._had_nodes = has_nodes
        self._deadline = None
        if not has_nodes:
            self._commits.append((length, now))

    def on_frame(self, now: float, at: int) -> None:
        """A frame arrived whose nodes hang below the first ``at`` tokens."""
        while self._commits and self._commits[0][0] < at:
            self._commits.popleft()
        if not self._commits or self._commits[0][0] != at:
            return
        gap_s = now - self._commits.popleft()[1]
        habits = self._habits
        if habits.gap_s is not None and gap_s <= habits.gap_s + 2.0 * habits.spread_s + 1e-3:
            habits.trust += _TRUST_LEARNING * (1.0 - habits.trust)
        habits.saw_gap(gap_s)

    def hold_until(self, step_time: StepTime, expected: float) -> float:
        """The time until which a generation without live nodes had better wait; in the past: run now."""
        if self._commit_at is None:
            return 0.0
        if self._wish_s is not None:
            return self._commit_at + self._wish_s
        habits = self._habits
        if habits.gap_s is None or habits.trust < _LEAST_TRUST or not habits.pays_to_wait(step_time, expected):
            return 0.0
        self._deadline = self._commit_at + habits.gap_s + 2.0 * habits.spread_s + _SLACK * step_time.at(1)
        return self._deadline

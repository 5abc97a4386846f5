"""How much to speculate, and whether at all: from what the link, the server and the drafter turn out to be.

Threshold. A step of n rows takes t(n) = a + b*n and commits E tokens, so a node pays as long as its odds exceed
E * b / t(n): beyond that it costs every other token more time than it is expected to bring.

Lateness. A draft made after a commit reaches the server one round trip and one drafter call later; meanwhile the server
has gone on at one token per step.

Switch. When the nodes that were scored did not pay for their rows, speculation goes *off*: nothing is sent, but the
drafter is still asked now and then, and its answers are compared with what gets committed. That probe costs the server
nothing and the link nothing; when it looks good again, speculation comes back. What they cost is measured, as the
server's steps against its steps without nodes: t(n) is a straight line on paper only.

Not here: which nodes (``policy``), and what a candidate's confidence is worth (``acceptance``).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.client.drafting.policy import CallCost, Conditions
from paceline.shared.messages import Commit, Limits, StepTime

_SMOOTH = 0.9
_FIRST_NODES = 64
"""Nodes that may be live before the first commits tell what they are worth."""
_SPARE = 8.0
"""Nodes sent for each one that the server would score: those that die before their step cost it nothing."""
_TRIAL_COMMITS = 8
_PROVEN_COMMITS = 48
_FEW_STEPS = 4
"""Steps without nodes from which on their length counts as known."""
_MAX_BACKOFF = 4
_LEAST_SPEED_UP = 0.98
"""A measured loss: below it speculation goes off, however often its guesses come true."""
_LEAST_GAIN = 0.03
_COMEBACK_FOLLOW = 0.08
_MAX_DUTY = 8
_LEAST_THRESHOLD = 2e-3
_TRUST_COMMITS = 2


@dataclass(slots=True)
class _Average:
    """Mean of what was seen, then exponentially smoothed."""

    value: float
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        keep = min(_SMOOTH, (self.count - 1) / self.count)
        self.value = keep * self.value + (1.0 - keep) * sample


class _LineFit:
    """Online fit of seconds = base + per_row * rows, exponentially forgetting, starting from a guess."""

    def __init__(self, guess: CallCost) -> None:
        self._moments = [0.0] * 5
        self._add(1.0, guess.base_s + guess.per_row_s)
        self._add(16.0, guess.base_s + 16.0 * guess.per_row_s)
        self.cost = guess

    def _add(self, rows: float, seconds: float) -> None:
        row = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._moments = [0.97 * old + new for old, new in zip(self._moments, row, strict=True)]

    def observe(self, rows: int, seconds: float) -> None:
        self._add(float(rows), seconds)
        n, sum_r, sum_s, sum_rr, sum_rs = self._moments
        spread = n * sum_rr - sum_r * sum_r
        slope = max(0.0, (n * sum_rs - sum_r * sum_s) / spread) if spread > 1e-9 else self.cost.per_row_s
        base = (sum_s - slope * sum_r) / n
        self.cost = CallCost(max(base, 1e-6), slope)


class Controller:
    """See the module's text. One for each generation; times in seconds."""

    def __init__(self, step_time: StepTime, limits: Limits, *, can_switch: bool = True) -> None:
        """can_switch: False keeps speculation on whatever it yields (for diagnosis and for baselines)."""
        self._step_time = step_time
        self._limits = limits
        self._can_switch = can_switch
        self._rtt_s = 0.0
        self._tokens_per_step = _Average(1.0)
        self._scored = _Average(0.0)
        self._step_s = _Average(step_time.at(1.0))
        self._bare_step_s = _Average(step_time.at(1.0))
        self._follow = _Average(0.5)
        self._calls: dict[int, _LineFit] = {}
        self._node_budget: int | None = None
        self._num_commits = 0
        self._since_switch = 0
        self._duty = 1
        self._num_failures = 0
        self.is_on = True
        self.reason = "never off so far"

    def observe_rtt(self, rtt_s: float) -> None:
        """The latest estimate of the link's round trip time."""
        self._rtt_s = max(0.0, rtt_s)

    @property
    def rtt_s(self) -> float:
        """The round trip time that counts now."""
        return self._rtt_s

    @property
    def step_s(self) -> float:
        """The server's recent step time."""
        return max(self._step_s.value, 1e-6)

    @property
    def coverage(self) -> float:
        """Chance that some candidate comes true, guessed from how often the first one does."""
        return min(1.0, self._follow.value + 0.25)

    def observe_call(self, drafter: int, rows: int, seconds: float) -> None:
        """A drafter call of that many rows took that long."""
        self._calls.setdefault(drafter, _LineFit(CallCost())).observe(max(1, rows), seconds)

    def call_cost(self, drafter: int) -> CallCost:
        """What a call is expected to cost."""
        fit = self._calls.get(drafter)
        return CallCost() if fit is None else fit.cost

    def observe_commit(self, commit: Commit, *, top_hit: bool | None) -> None:
        """A commit arrived. top_hit: whether the likeliest candidate below the anchor came true, None without one."""
        self._num_commits += 1
        self._since_switch += 1
        self._node_budget = commit.node_budget
        self._tokens_per_step.add(float(len(commit.tokens)))
        self._scored.add(float(commit.num_scored))
        if commit.step_s > 0.0 and self._num_commits > 1:  # the first step has the prompt in it
            self._step_s.add(commit.step_s)
            if not commit.num_scored:
                self._bare_step_s.add(commit.step_s)
        if top_hit is not None:
            self._follow.add(float(top_hit))
        if self._can_switch:
            self._switch()

    @property
    def speed_up(self) -> float:
        """Estimated speed against the server alone: tokens per step, over what the scored nodes cost."""
        if self._bare_step_s.count >= _FEW_STEPS:
            return self._tokens_per_step.value * self._bare_step_s.value / self.step_s
        rows = 1.0 + self._scored.value
        return self._tokens_per_step.value * self._step_time.at(1.0) / self._step_time.at(rows)

    def _switch(self) -> None:
        row_share = self._step_time.per_row_s / self._step_time.at(1.0)
        wait = _TRIAL_COMMITS << min(self._num_failures, _MAX_BACKOFF) if not self.is_on else _TRIAL_COMMITS
        if self._since_switch > _PROVEN_COMMITS and self.is_on:
            self._num_failures = 0
        if self._since_switch < wait:
            return
        is_hopeless = self._follow.value < _COMEBACK_FOLLOW and self.speed_up < 1.0 + min(_LEAST_GAIN, row_share + 0.01)
        if self.is_on and (is_hopeless or self.speed_up < _LEAST_SPEED_UP):
            rate = max(0.0, self._tokens_per_step.value - 1.0)
            self._num_failures += 1
            self._set(False, f"off (acceptance {rate:.2f}, est. speed-up {self.speed_up:.2f}x)")
        elif not self.is_on and self._follow.value >= max(_COMEBACK_FOLLOW, 2.0 * row_share):
            self._set(True, f"on (probe: {self._follow.value:.2f} of first guesses come true)")
        elif not self.is_on:
            self._duty = min(_MAX_DUTY, 1 + self._since_switch // 16)

    def _set(self, is_on: bool, reason: str) -> None:
        self.is_on = is_on
        self.reason = reason
        self._since_switch = 0
        self._duty = 1
        self._tokens_per_step = _Average(1.0)
        self._scored = _Average(0.0)

    @property
    def probes(self) -> bool:
        """Whether, while nothing is sent, the drafter should look at the present anchor."""
        duty = _MAX_DUTY if self._is_unwanted else self._duty
        return self._num_commits % duty == 0

    @property
    def _is_unwanted(self) -> bool:
        """Whether the server takes no nodes now: it is busy, or ours were wrong."""
        return self._node_budget == 0

    def conditions(self, max_depth: int, drafter: int = 0, *, scored_id: int = 0) -> Conditions:
        """The conditions of this moment. max_depth: what remaining output and context allow. scored_id: see there."""
        step_s = self.step_s
        rows = 1.0 + self._scored.value
        threshold = self._tokens_per_step.value * self._step_time.per_row_s / self._step_time.at(rows)
        lateness = (self._rtt_s + self.call_cost(drafter).base_s) / step_s
        in_flight = 1.0 + self._rtt_s / step_s
        budget = self._limits.max_frame_nodes if self._node_budget is None else self._node_budget
        nodes = min(self._limits.max_live_nodes, int(_SPARE * budget * in_flight))
        if self._num_commits < _TRUST_COMMITS:
            nodes = min(nodes, _FIRST_NODES)
        return Conditions(
            threshold=max(threshold, _LEAST_THRESHOLD),
            lateness=lateness if lateness >= 1.0 else 0.0,
            follow=min(max(self._follow.value, 0.05), 0.95),
            max_depth=max(0, min(max_depth, self._limits.max_depth)),
            max_nodes=nodes,
            sends=self.is_on and not self._is_unwanted,
            scored_id=scored_id,
            in_flight=in_flight,
        )

    def explain(self) -> str:
        """One line for people: what was chosen and the figures behind it."""
        mode = "on" if self.is_on else "off"
        state = self.conditions(self._limits.max_depth)
        return (
            f"speculation {mode}: {self._tokens_per_step.value:.2f} tokens per step, {self._scored.value:.1f} nodes "
            f"scored, step {self._step_s.value * 1e3:.1f} ms, rtt {self._rtt_s * 1e3:.0f} ms, first guesses right "
            f"{self._follow.value:.2f}, threshold {state.threshold:.4f}, at most {state.max_nodes} nodes; {self.reason}"
        )

"""What a real run measured, in the simulator's terms: step times by rows, draft calls by rows, round trips.

    step time    what the server reports for each commit, and what passes between its steps (from plain streaming)
    draft call   from the event loop to the drafting thread and back, and what the event loop does before it asks again
    round trip   pings through the relay while tokens flow, so that busy event loops are in it

Not here: running (``real``), and the simulation that is made of it (``agreement``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from paceline.bench.calibrate import fit_line
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.stats import Served

_BINS = (1, 2, 4, 7, 11, 17, 25, 34, 49, 80, 1 << 20)
"""Lowest number of rows of each bin of steps."""
_MAX_TIMED_ROWS = 40
"""Draft calls with more rows read a prompt."""
_MAX_THINK_S = 0.010
"""A drafter that was not asked for longer than this had nothing to do."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit as it reached the client. num_rows: of the step that made it, 0 for a prompt's."""

    at: float
    num_tokens: int
    num_rows: int
    num_accepted: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the draft model."""

    num_rows: int
    asked_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class RealAnswer:
    """One prompt of a real run, as the client's process tells it. Times on that process's clock."""

    opened_at: float
    prompt_len: int
    cached_len: int
    arrivals: tuple[tuple[float, tuple[int, ...]], ...]
    commits: tuple[Commit, ...]
    calls: tuple[Call, ...]
    rtts_s: tuple[float, ...]
    num_drafted: int
    bytes_up: int
    bytes_down: int

    @classmethod
    def of(cls, facts: dict[str, Any], prompt_len: int) -> Self:
        """facts: what ``worker`` writes."""
        commits = [
            Commit(at, tokens, 1 + scored if number else 0, accepted, step_s)
            for number, (at, tokens, scored, accepted, step_s) in enumerate(facts["commits"])
        ]
        return cls(
            opened_at=facts["opened_at"],
            prompt_len=prompt_len,
            cached_len=facts["cached_tokens"],
            arrivals=tuple((at, tuple(tokens)) for at, tokens in facts["arrivals"]),
            commits=tuple(commits),
            calls=tuple(Call(*call) for call in facts["calls"]),
            rtts_s=tuple(facts["rtt_s"]),
            num_drafted=facts["num_drafted"],
            bytes_up=facts["bytes_up"],
            bytes_down=facts["bytes_down"],
        )

    def served(self, max_tokens: int) -> Served:
        """Its first ``max_tokens`` tokens. Steps, nodes and bytes are those of the whole answer."""
        made = Served(self.opened_at, is_finished=True)
        for at, tokens in self.arrivals:
            made.arrive(at, tokens[: max_tokens - made.num_tokens])
        made.num_steps = len(self.commits)
        made.num_drafted = self.num_drafted
        made.num_accepted = sum(commit.num_accepted for commit in self.commits)
        made.bytes_up, made.bytes_down = self.bytes_up, self.bytes_down
        return made


@dataclass(frozen=True, slots=True)
class MeasuredCost(ServerCost):
    """Steps as they were measured. table: (rows, seconds), ascending; between them and beyond along straight lines.

    ``step_time`` is what the server believes, and tells its clients.
    """

    table: tuple[tuple[float, float], ...] = field(default=((1.0, 0.03),))

    def at(self, num_rows: int, num_context: int = 0) -> float:
        """See ``ServerCost.at``."""
        rows, seconds = (np.array(column) for column in zip(*self.table, strict=True))
        if num_rows > rows[-1]:
            slope = (seconds[-1] - seconds[0]) / max(rows[-1] - rows[0], 1.0)
            return float(seconds[-1] + slope * (num_rows - rows[-1]))
        return float(np.interp(num_rows, rows, seconds))


def between_steps_s(alone: Iterable[RealAnswer]) -> float:
    """Seconds from the end of a step to the beginning of the next: in plain streaming nothing else is between them."""
    gaps = [
        (one.commits[-1].at - one.commits[0].at - sum(commit.step_s for commit in one.commits[1:]))
        / (len(one.commits) - 1)
        for one in alone
        if len(one.commits) > 1
    ]
    return max(float(np.mean(gaps)), 0.0)


def step_table(answers: Sequence[RealAnswer], between_s: float) -> tuple[tuple[float, float], ...]:
    """(mean rows, mean seconds) of every bin of steps that occurred; steps that read a prompt are among them."""
    samples = [
        (commit.num_rows or one.prompt_len - one.cached_len, commit.step_s + between_s)
        for one in answers
        for commit in one.commits
    ]
    rows, seconds = np.array(samples).T
    where = np.searchsorted(np.array(_BINS), rows, side="right")
    return tuple(
        (float(rows[where == number].mean()), float(seconds[where == number].mean())) for number in np.unique(where)
    )


def draft_time(answers: Sequence[RealAnswer]) -> DraftTime:
    """A call of the draft model, with what the client does between an answer (or a commit) and the next question."""
    calls = [call for one in answers for call in one.calls if 0 < call.num_rows <= _MAX_TIMED_ROWS]
    if len(calls) < 2:
        return DraftTime()
    rows = np.array([call.num_rows for call in calls], np.float64)
    base, per_row = fit_line(rows, np.array([call.answered_at - call.asked_at for call in calls]))
    thinks = [think for one in answers for think in _thinks(one) if 0.0 <= think < _MAX_THINK_S]
    return DraftTime(base + (float(np.mean(thinks)) if thinks else 0.0), per_row)


def _thinks(one: RealAnswer) -> list[float]:
    """From the last commit or answer before each call to that call."""
    events = np.sort(np.array([call.answered_at for call in one.calls] + [commit.at for commit in one.commits]))
    asked = np.array([call.asked_at for call in one.calls])
    places = np.searchsorted(events, asked, side="right") - 1
    gaps: list[float] = (asked - events[np.maximum(places, 0)])[places >= 0].tolist()
    return gaps


def rtt_s(answers: Sequence[RealAnswer]) -> float:
    """The mean round trip time while tokens flowed."""
    return float(np.mean([rtt for one in answers for rtt in one.rtts_s]))

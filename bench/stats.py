"""What a run measured: one ``Served`` per request, and the rows of ``bench --json`` made of them.

Inter-token latency (ITL): k tokens that arrive together, d seconds after the tokens before them, count as k gaps of
d / k. The first token's delay is TTFT and no part of ITL. Speed counts the whole request, TTFT included.

Not here: how requests are run (``simulator``, ``baselines``, ``real``), or shown (``report``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Lane(StrEnum):
    """Where something happens, for the timeline picture."""

    DRAFT = "draft"
    UP = "up"
    STEP = "step"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``begin_s`` to ``end_s``. size: rows, nodes or tokens."""

    lane: Lane
    begin_s: float
    end_s: float
    size: int


@dataclass(slots=True)
class Served:
    """One request from open to its last token. Times in seconds on the run's clock; bytes with websocket headers.

    arrivals: (time, tokens) of every commit that brought some. drafted: nodes sent; accepted: nodes committed.
    """

    opened_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    num_reconnects: int = 0
    is_finished: bool = False
    spans: list[Span] = field(default_factory=list)

    def arrive(self, now: float, tokens: Sequence[int]) -> None:
        """Tokens reached the user."""
        if len(tokens):
            self.arrivals.append((now, len(tokens)))
            self.token_ids.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of output that arrived."""
        return len(self.token_ids)

    @property
    def ttft_s(self) -> float:
        """Seconds from open to the first token."""
        return self.arrivals[0][0] - self.opened_at

    @property
    def total_s(self) -> float:
        """Seconds from open to the last token."""
        return self.arrivals[-1][0] - self.opened_at

    def gaps(self) -> NDArray[np.float64]:
        """float64[num_tokens - first chunk]: one inter-token latency for each token behind the first chunk."""
        times = np.array([time for time, _ in self.arrivals])
        counts = np.array([count for _, count in self.arrivals])
        return np.repeat(np.diff(times) / counts[1:], counts[1:])


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the grid: a method at an RTT and a step time with a number of clients."""

    method: str
    rtt_ms: float
    step_ms: float
    clients: int
    tok_s: float
    ttft_s: float
    itl_p50_s: float
    itl_p95_s: float
    tokens_per_step: float
    bytes_up_per_token: float
    bytes_down_per_token: float
    speedup_vs_server_alone: float
    shape: str = ""
    flips: int = 0

    def plain(self) -> dict[str, Any]:
        """As ``bench --json`` holds it."""
        return {name: getattr(self, name) for name in self.__slots__}


def row_of(
    method: str,
    served: Sequence[Served],
    *,
    rtt_ms: float,
    step_ms: float,
    clients: int,
    flips: int = 0,
    shape: str = "",
) -> Row:
    """The figures of some requests. ``speedup_vs_server_alone`` is 1 until ``with_speedups`` knows the baseline."""
    gaps = np.concatenate([one.gaps() for one in served])
    num_tokens = sum(one.num_tokens for one in served)
    # Speed per stream: what one reader sees. Tokens and seconds are summed first, so long requests weigh more.
    seconds = sum(one.total_s for one in served)
    return Row(
        method=method,
        rtt_ms=rtt_ms,
        step_ms=step_ms,
        clients=clients,
        tok_s=num_tokens / seconds,
        ttft_s=float(np.mean([one.ttft_s for one in served])),
        itl_p50_s=float(np.percentile(gaps, 50)) if len(gaps) else 0.0,
        itl_p95_s=float(np.percentile(gaps, 95)) if len(gaps) else 0.0,
        tokens_per_step=num_tokens / max(sum(one.num_steps for one in served), 1),
        bytes_up_per_token=sum(one.bytes_up for one in served) / num_tokens,
        bytes_down_per_token=sum(one.bytes_down for one in served) / num_tokens,
        speedup_vs_server_alone=1.0,
        shape=shape,
        flips=flips,
    )


def with_speedups(rows: Sequence[Row], baseline: str = "server-alone") -> list[Row]:
    """The rows with their speed relative to the baseline's in the same cell; rows without one keep 1."""
    alone = {(r.rtt_ms, r.step_ms, r.clients): r.tok_s for r in rows if r.method == baseline}

    def speedup(row: Row) -> float:
        return row.tok_s / alone.get((row.rtt_ms, row.step_ms, row.clients), row.tok_s)

    return [Row(**{**row.plain(), "speedup_vs_server_alone": speedup(row)}) for row in rows]

"""How many clients one server can serve: the highest rate of requests at which p95 inter-token latency keeps an SLO.

A client asks one question every ``INTERVAL_S`` seconds on average. SLOs are multiples of the one-token step time. For
each method and SLO the rate is searched: 1 / p95 falls almost linearly with the rate (t = a / (1 - g r), ``crowd``), so
a few runs, each where the line through its neighbours crosses the SLO, are enough.

Not here: what a run is (``crowd``), and how the results look (``capacity_report``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.baselines.shapes import BestFirst, Chain, Shape
from paceline.bench.costs import DraftTime, server_cost_of
from paceline.bench.crowd import Crowd, Method, Workload, colocated, paceline, run_crowd, server_alone
from paceline.bench.recording import RecordingSet
from paceline.bench.target import renumbered
from paceline.shared.errors import UsageError

INTERVAL_S = 20.0
DEFAULT_STEPS = ("8b-h100", "70b-4xh100")
DEFAULT_RTTS_MS = (20.0,)
DEFAULT_SLOS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
SHAPES: tuple[Shape, ...] = (Chain(1), Chain(2), BestFirst(6, 3))
"""Of co-located speculation; the best one for each SLO counts."""
LEAST_VS_ALONE = 0.97
LEAST_VS_COLOCATED = 1.3
_MAX_RUNS = 4
_CLOSE = 0.01
_LEAP = 4.0
"""How far beyond the last run the next one may be."""
_LEAST_CONCURRENCY = 0.25
"""Generations at once in the least crowded run: if even that one breaks the SLO, nobody can be served."""


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """What a method can serve within an SLO. slo: in one-token steps. The other figures are those of the run nearest to
    the capacity. shape: of co-located trees.
    """

    step: str
    slo: float
    method: str
    arrivals_per_s: float
    clients: int
    mean_running: float
    itl_p95_s: float
    ttft_p95_s: float
    tokens_per_step: float
    vs_server_alone: float | None = None
    vs_colocated: float | None = None
    shape: str = ""

    def plain(self) -> dict[str, Any]:
        """As ``bench --json`` holds it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Curve:
    """p95 inter-token latency of one method by rate of arrivals, measured where it is asked for."""

    workload: Workload
    method: Method
    points: dict[float, Crowd] = field(default_factory=dict)

    def at(self, rate: float) -> Crowd:
        """The run at a rate."""
        if rate not in self.points:
            self.points[rate] = run_crowd(self.workload, rate, self.method)
        return self.points[rate]

    def capacity(self, slo_s: float, guess: float) -> tuple[float, Crowd]:
        """The highest rate that keeps the SLO, 0 if none does, and the run nearest to it."""
        least = _LEAST_CONCURRENCY / (self.workload.output_len * self.workload.plain_step_s(0.0))
        lowest = self.at(least)
        if lowest.itl_p95_s > slo_s:
            return 0.0, lowest
        rate = max(guess, least)
        for _ in range(_MAX_RUNS):
            nearest = self.at(rate)
            if abs(nearest.itl_p95_s / slo_s - 1.0) < _CLOSE:
                break
            crossing = self._crossing(slo_s)
            if abs(crossing / rate - 1.0) < _CLOSE:
                break
            rate = crossing
        rate = self._crossing(slo_s)
        return rate, min(self.points.values(), key=lambda crowd: abs(crowd.arrivals_per_s - rate))

    def _crossing(self, slo_s: float) -> float:
        """Where 1 / p95 crosses 1 / SLO, on the line through the runs on both sides, or beyond the last one."""
        points = sorted((rate, 1.0 / crowd.itl_p95_s) for rate, crowd in self.points.items())
        wanted = 1.0 / slo_s
        keeps = [point for point in points if point[1] >= wanted]
        (low, low_y) = max(keeps)
        above = [point for point in points if point[0] > low]
        before = [point for point in points if point[0] < low and point[1] > low_y]
        if not above and not before:
            return _LEAP * low
        high, high_y = above[0] if above else before[-1]
        crossing = low + (low_y - wanted) / (low_y - high_y) * (high - low)
        return crossing if above else min(crossing, _LEAP * low)


def run_capacity(
    workloads: Mapping[str, Workload],
    slos: Sequence[float] = DEFAULT_SLOS,
    shapes: Sequence[Shape] = SHAPES,
    progress: Callable[[str], None] = lambda line: None,
) -> list[CapacityRow]:
    """Rows for every workload (by the name of its step time), SLO and method."""
    rows: list[CapacityRow] = []
    for step, workload in workloads.items():
        step_s = workload.cost.at(1)
        alone, ours = Curve(workload, server_alone), Curve(workload, paceline)
        near = {shape.name: Curve(workload, colocated(shape)) for shape in shapes}
        guesses = dict.fromkeys(near, 0.6)
        for slo in sorted(slos):
            slo_s = slo * step_s
            first = alone.capacity(slo_s, 0.7 * workload.plain_rate(slo_s))
            second = ours.capacity(slo_s, first[0])
            shaped: dict[str, tuple[float, Crowd]] = {}
            for name, curve in near.items():
                shaped[name] = curve.capacity(slo_s, guesses[name] * first[0])
                guesses[name] = shaped[name][0] / first[0] if shaped[name][0] else guesses[name]
            best = max(shaped, key=lambda name: shaped[name][0])
            found = {"server-alone": (first, ""), "paceline": (second, ""), "colocated": (shaped[best], best)}
            fresh = _rows(step, slo, {name: (rate, crowd, shape) for name, ((rate, crowd), shape) in found.items()})
            rows.extend(fresh)
            served = ", ".join(f"{row.method} {row.clients}" for row in fresh)
            progress(f"{step}, p95 at most {slo:g} steps: {served} clients")
    return rows


def _rows(step: str, slo: float, found: Mapping[str, tuple[float, Crowd, str]]) -> list[CapacityRow]:
    rates = {name: rate for name, (rate, _, _) in found.items()}

    def ratio(name: str, other: str) -> float | None:
        """None where the other serves nobody, so that there is nothing to compare with."""
        return rates[name] / rates[other] if rates[other] and name == "paceline" else None

    return [
        CapacityRow(
            step=step,
            slo=slo,
            method=name,
            arrivals_per_s=rate,
            clients=int(rate * INTERVAL_S),
            mean_running=crowd.mean_running,
            itl_p95_s=crowd.itl_p95_s,
            ttft_p95_s=crowd.ttft_p95_s,
            tokens_per_step=crowd.tokens_per_step,
            vs_server_alone=ratio(name, "server-alone"),
            vs_colocated=ratio(name, "colocated"),
            shape=shape,
        )
        for name, (rate, crowd, shape) in found.items()
    ]


def fewest_vs_alone(rows: Sequence[CapacityRow]) -> float | None:
    """Ours against the server alone where it is worst; None if the server alone serves nobody anywhere."""
    return min((row.vs_server_alone for row in rows if row.vs_server_alone is not None), default=None)


def fewest_vs_colocated(rows: Sequence[CapacityRow]) -> float | None:
    """Ours against co-located speculation where it is worst; None if that serves nobody anywhere."""
    return min((row.vs_colocated for row in rows if row.vs_colocated is not None), default=None)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What to search. steps: as ``--step`` names them; rtts_ms: of the clients' links, in turn."""

    recordings: RecordingSet
    steps: Sequence[str] = DEFAULT_STEPS
    slos: Sequence[float] = DEFAULT_SLOS
    rtts_ms: Sequence[float] = DEFAULT_RTTS_MS
    draft_time: DraftTime = field(default_factory=DraftTime)
    seed: int = 0

    def workloads(self) -> dict[str, Workload]:
        """By step. Raises ``UsageError`` without greedy recordings: ids are renumbered, which noise would not bear."""
        recordings = tuple(one for one in self.recordings.recordings if not one.temperature)
        if not recordings:
            raise UsageError("expected at least one greedy recording, got none")
        made, vocab_size = renumbered(RecordingSet(recordings, self.recordings.meta))
        rtts_s = tuple(rtt_ms / 1e3 for rtt_ms in self.rtts_ms)
        return {
            step: Workload(
                made.recordings, vocab_size, server_cost_of(step)[1], rtts_s, self.draft_time, seed=self.seed
            )
            for step in self.steps
        }

"""Many clients on one server on the virtual clock: requests arrive as a Poisson process, some clients stall.

An open loop: a request comes when its time has come, however busy the server is. A run begins near the steady state
(as many generations as the server alone would hold at that rate, each somewhere in its output) and is measured after a
warm-up. All methods get the same arrivals, prompts and stalls for a seed, so that they differ by what they do only.

Every request has a prompt of its own (its first tokens name it), so that no prefix cache spares its prefill.

Not here: which rate is too much (``capacity``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paceline.bench.baselines.colocated import ColocatedServer
from paceline.bench.baselines.shapes import Shape
from paceline.bench.client import ClientModel, StreamClient
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.frames import rough_weight
from paceline.bench.link import LinkModel
from paceline.bench.methods import no_drafters, playback_drafters
from paceline.bench.recording import Recording
from paceline.bench.server import SimulatedServer
from paceline.bench.stats import Served
from paceline.bench.target import RecordedTarget
from paceline.server.engine import EngineSettings
from paceline.server.scheduler import StepLimits

STALL_S = 2.0
STALL_SHARE = 0.1
_RAMP = 0.2
_WARM_UP = 0.3
_MEASURED = 0.8
"""How long those already under way take to come, then the warm-up, then the window at least, in durations of a request.
"""
_STEPS = 60.0
"""Steps in the window if the step is twice as long as an empty one. With less load more: a percent of p95 is then a
larger part of the load, and p95 comes from the five slowest steps of a hundred.
"""
_LEAST_REQUESTS = 24
_CROWDED = 4.0
"""Times the expected number of generations at once: a server with more does not keep up."""
_MAX_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Who comes, and what the server's machine needs. rtts_s: of the clients' links, in turn. draft_time: theirs."""

    recordings: tuple[Recording, ...]
    vocab_size: int
    cost: ServerCost
    rtts_s: tuple[float, ...] = (0.02,)
    draft_time: DraftTime = field(default_factory=DraftTime)
    stall_share: float = STALL_SHARE
    seed: int = 0

    @property
    def output_len(self) -> float:
        """Tokens of output per request, on average."""
        return float(np.mean([len(one.output) for one in self.recordings]))

    @property
    def generation_s(self) -> float:
        """What one more generation adds to each step of a server without drafts, its share of prefill included."""
        prompt_len = float(np.mean([len(one.prompt) for one in self.recordings]))
        step_time = self.cost.step_time
        prefill = step_time.per_row_s * prompt_len / self.output_len
        return step_time.per_row_s + prefill + self.cost.per_context_s * (prompt_len + self.output_len / 2)

    def plain_step_s(self, arrivals_per_s: float) -> float:
        """The steady step of a server without drafts: it has r L t generations at once, so t = a + g r L t."""
        share = min(self.generation_s * arrivals_per_s * self.output_len, 0.9)
        return self.cost.step_time.base_s / (1.0 - share)

    def plain_rate(self, step_s: float) -> float:
        """The rate of arrivals at which a server without drafts has steps of that length."""
        free = max(1.0 - self.cost.step_time.base_s / step_s, 0.0)
        return free / (self.generation_s * self.output_len)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. stall: (begin, length) in seconds after it opens, of its link or its drafter; None for most."""

    number: int
    time_s: float
    recording: Recording
    rtt_s: float
    stall: tuple[float, float] | None
    is_link_stall: bool

    def link(self) -> LinkModel:
        """The link of its client."""
        link = LinkModel(self.rtt_s)
        if self.stall is None or not self.is_link_stall:
            return link
        return replace(link, freeze=(self.time_s + self.stall[0], self.stall[1]))


@dataclass(frozen=True, slots=True)
class Crowd:
    """What a run measured. gaps: float64[t], inter-token latencies of tokens that arrived within the window."""

    arrivals_per_s: float
    gaps: NDArray[np.float64]
    mean_running: float
    ttft_p95_s: float
    tokens_per_step: float
    is_keeping_up: bool

    @property
    def itl_p95_s(self) -> float:
        """Infinite for a server that falls behind."""
        return float(np.percentile(self.gaps, 95)) if self.is_keeping_up and len(self.gaps) else float("inf")


Starter = Callable[[Arrival, Callable[[], None]], Served]
"""Starts a request now, with what to call at its end."""
Method = Callable[[Workload, VirtualClock], Starter]


def arrivals_of(workload: Workload, arrivals_per_s: float) -> tuple[list[Arrival], float, float]:
    """The requests of a run, and when its window begins and ends.

    The first ones stand for those already under way when the rate sets in. Who is met under way has a long output more
    often than a short one, and is anywhere in it; what it writes until all of them are there comes on top.
    """
    rng = np.random.default_rng(workload.seed)
    step_s = workload.plain_step_s(arrivals_per_s)
    duration = workload.output_len * step_s
    num_first = round(arrivals_per_s * duration)
    num_steps = _STEPS / max(step_s / workload.plain_step_s(0.0) - 1.0, 0.1)
    window = max(_MEASURED * duration, num_steps * step_s, _LEAST_REQUESTS / arrivals_per_s)
    ramp = _RAMP * duration
    begin = ramp + _WARM_UP * duration
    end = begin + window
    arrivals: list[Arrival] = []
    lengths = np.array([len(one.output) for one in workload.recordings], np.float64)

    def add(time_s: float, *, is_under_way: bool) -> None:
        number = len(arrivals)
        stall = None
        if rng.random() < workload.stall_share:
            stall = (float(rng.random()) * duration, STALL_S)
        chosen = int(rng.choice(len(lengths), p=lengths / lengths.sum() if is_under_way else None))
        recording, left = workload.recordings[chosen], 1.0
        if is_under_way:
            left = min(float(rng.random()) + (ramp - time_s) / (lengths[chosen] * step_s), 1.0)
        rtt_s = workload.rtts_s[number % len(workload.rtts_s)]
        arrivals.append(Arrival(number, time_s, _own(recording, number, left), rtt_s, stall, bool(rng.random() < 0.5)))

    for index in range(num_first):
        add(ramp * index / num_first, is_under_way=True)
    time_s = ramp
    while (time_s := time_s + float(rng.exponential(1.0 / arrivals_per_s))) < end:
        add(time_s, is_under_way=False)
    return arrivals, begin, end


def _own(recording: Recording, number: int, left: float) -> Recording:
    """The recording with a prompt that no other request has, and the given part of its output."""
    prompt = recording.prompt.copy()
    prompt[: min(3, len(prompt))] = [number % 200, number // 200 % 200, number // 40_000][: len(prompt)]
    count = max(2, round(left * len(recording.output)))
    return replace(
        recording, prompt=prompt, output=recording.output[:count], on_path=recording.on_path.at(slice(count))
    )


def run_crowd(workload: Workload, arrivals_per_s: float, method: Method) -> Crowd:
    """One run. Deterministic."""
    arrivals, begin, end = arrivals_of(workload, arrivals_per_s)
    clock = VirtualClock()
    start = method(workload, clock)
    served: list[Served] = []
    num_running = 0
    area = last = 0.0
    limit = (
        _CROWDED * arrivals_per_s * workload.output_len * workload.plain_step_s(arrivals_per_s) + 2 * _LEAST_REQUESTS
    )
    is_keeping_up = True

    def count(change: int) -> None:
        nonlocal num_running, area, last
        area += num_running * max(min(clock.now, end) - max(last, begin), 0.0)
        num_running, last = num_running + change, clock.now

    def open_(arrival: Arrival) -> None:
        nonlocal is_keeping_up
        is_keeping_up = is_keeping_up and num_running < limit
        if is_keeping_up:
            count(1)
            served.append(start(arrival, lambda: count(-1)))

    for arrival in arrivals:
        clock.at(arrival.time_s, lambda arrival=arrival: open_(arrival))  # type: ignore[misc]
    clock.run(end)
    count(0)
    gaps = [gaps_between(one, begin, end) for one in served]
    ttfts = [one.ttft_s for one in served if one.arrivals and one.opened_at >= begin]
    steps = sum(len(one.arrivals) for one in served)
    return Crowd(
        arrivals_per_s=arrivals_per_s,
        gaps=np.concatenate(gaps) if gaps else np.zeros(0),
        mean_running=area / (end - begin),
        ttft_p95_s=float(np.percentile(ttfts, 95)) if ttfts else float("inf"),
        tokens_per_step=sum(one.num_tokens for one in served) / max(steps, 1),
        is_keeping_up=is_keeping_up,
    )


def gaps_between(served: Served, begin_s: float, end_s: float) -> NDArray[np.float64]:
    """``Served.gaps`` of the tokens that arrived within a window."""
    times = np.array([time for time, _ in served.arrivals])
    counts = np.array([count for _, count in served.arrivals], np.int64)
    if len(times) < 2:
        return np.zeros(0)
    inside = (times[1:] >= begin_s) & (times[1:] < end_s)
    return np.repeat(np.diff(times)[inside] / counts[1:][inside], counts[1:][inside])


def _streaming(workload: Workload, clock: VirtualClock, drafters: Callable[[Recording], Sequence[object]]) -> Starter:
    settings = EngineSettings(
        max_running=_MAX_ROWS, step_limits=StepLimits(max_rows=_MAX_ROWS), step_time=workload.cost.step_time
    )
    target = RecordedTarget(workload.vocab_size, num_blocks=1 << 16)
    server = SimulatedServer(clock, target, workload.cost, settings)

    def start(arrival: Arrival, on_done: Callable[[], None]) -> Served:
        stall = None if arrival.is_link_stall else arrival.stall
        model = ClientModel(drafters, workload.draft_time, stall=stall)  # type: ignore[arg-type]
        client = StreamClient(
            clock,
            server,
            arrival.recording,
            arrival.link(),
            model,
            number=arrival.number + 1,
            seed=arrival.number,
            on_done=on_done,
            weigh=rough_weight,
        )
        client.start()
        return client.served

    return start


def server_alone(workload: Workload, clock: VirtualClock) -> Starter:
    """Plain streaming."""
    return _streaming(workload, clock, no_drafters)


def paceline(workload: Workload, clock: VirtualClock) -> Starter:
    """Ours."""
    return _streaming(workload, clock, playback_drafters)


def colocated(shape: Shape) -> Method:
    """Speculation inside the server, always with this shape."""

    def method(workload: Workload, clock: VirtualClock) -> Starter:
        server = ColocatedServer(clock, workload.cost, shape, StepLimits(max_rows=_MAX_ROWS), weigh=rough_weight)

        def start(arrival: Arrival, on_done: Callable[[], None]) -> Served:
            return server.open(arrival.recording, arrival.link(), arrival.number, on_done)

        return start

    return method

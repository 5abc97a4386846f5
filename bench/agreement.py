"""The simulator, calibrated by a real run, beside that run: the same prompts, tokens, costs and round trips.

Both serve every prompt a second time (its KV is in the prefix cache) and one after another, so that what is compared is
decoding. Not here: running for real (``real``), and what was measured (``measured``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.bench.baselines.shapes import Shape
from paceline.bench.baselines.waiting import VerifyServer, WaitingClient
from paceline.bench.client import ClientModel, StreamClient
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime
from paceline.bench.link import LinkModel
from paceline.bench.measured import MeasuredCost
from paceline.bench.methods import no_drafters
from paceline.bench.playback import PlaybackDrafter
from paceline.bench.recording import Recording
from paceline.bench.server import SimulatedServer
from paceline.bench.stats import Served
from paceline.bench.target import RecordedTarget
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.server.engine import EngineSettings
from paceline.shared.messages import Limits

_WARM_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Replay:
    """One method at one RTT, in the simulator's terms. cached_lens: tokens of each prompt whose KV the server has."""

    recordings: tuple[Recording, ...]
    vocab_size: int
    cost: MeasuredCost
    rtt_s: float
    draft_time: DraftTime
    cached_lens: tuple[int, ...]
    max_context: int = 8192


def replay(method: str, shape: Shape | None, conditions: Replay) -> list[Served]:
    """The method's requests on a virtual clock, one after another."""
    if shape is not None:
        return _wait(shape, conditions, is_proactive=method == "specedge")
    return _stream(conditions, no_drafters if method == "server-alone" else _drafters)


def _drafters(recording: Recording) -> Sequence[Drafter]:
    return (PlaybackDrafter(recording), NGramDrafter())


def _stream(conditions: Replay, make_drafters: Callable[[Recording], Sequence[Drafter]]) -> list[Served]:
    clock = VirtualClock()
    cost, link = conditions.cost, LinkModel(conditions.rtt_s)
    settings = EngineSettings(step_time=cost.step_time, limits=Limits(max_context=conditions.max_context))
    server = SimulatedServer(clock, RecordedTarget(conditions.vocab_size), cost, settings)
    plain = ClientModel(no_drafters)
    mine = ClientModel(make_drafters, conditions.draft_time, acceptance=Acceptance())
    warm = [replace(one, output=one.output[:_WARM_TOKENS]) for one in conditions.recordings]
    clients = [StreamClient(clock, server, one, link, plain, number=number) for number, one in enumerate(warm, 1)]
    clients += [
        StreamClient(clock, server, one, link, mine, number=number)
        for number, one in enumerate(conditions.recordings, 1 + len(warm))
    ]
    for client in clients:
        client.served.opened_at = clock.now
        client.start()
        clock.run()
    return [client.served for client in clients[len(warm) :]]


def _wait(shape: Shape, conditions: Replay, *, is_proactive: bool) -> list[Served]:
    clock = VirtualClock()
    server, link = VerifyServer(clock, conditions.cost), LinkModel(conditions.rtt_s)
    served: list[Served] = []
    for recording, cached_len in zip(conditions.recordings, conditions.cached_lens, strict=True):
        client = WaitingClient(
            clock,
            server,
            recording,
            shape,
            conditions.draft_time,
            link,
            is_proactive=is_proactive,
            cached_len=cached_len,
        )
        client.served.opened_at = clock.now
        client.start()
        clock.run()
        served.append(client.served)
    return served


def best_shape(method: str, shapes: Sequence[Shape], conditions: Replay) -> Shape:
    """The shape that a baseline does best with here, by the simulator."""

    def seconds(shape: Shape) -> float:
        return sum(one.total_s for one in replay(method, shape, conditions))

    return min(shapes, key=seconds)


@dataclass(frozen=True, slots=True)
class Margin:
    """Speed against the server alone, prompt by prompt: geometric mean, and two standard errors each way."""

    speed_up: float
    low: float
    high: float

    @property
    def loses(self) -> bool:
        """Slower than the server alone by more than noise."""
        return self.high < 1.0


def margin(mine: Sequence[Served], alone: Sequence[Served]) -> Margin:
    """mine, alone: the same prompts in the same order."""
    logs = np.log([theirs.total_s / one.total_s for one, theirs in zip(mine, alone, strict=True)])
    error = 2.0 * float(logs.std(ddof=1)) / np.sqrt(len(logs)) if len(logs) > 1 else 0.0
    mean = float(logs.mean())
    return Margin(float(np.exp(mean)), float(np.exp(mean - error)), float(np.exp(mean + error)))

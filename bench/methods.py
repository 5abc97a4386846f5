"""The methods that are compared, each as a function from a cell of the grid to the requests it served.

    server-alone   plain streaming: the same engine, no drafts
    chain          stop-and-wait, one path                 (the best of a few lengths in each cell)
    tree           stop-and-wait, SpecInfer's static tree  (the best of a few shapes)
    specedge       stop-and-wait, best-first tree, one-guess proactive drafting (the best of a few budgets)
    paceline       ours: full duplex, free-running
    colocated      speculation inside the server at RTT 0, drafting on the server's own clock: the ceiling of the others

Baselines may pick their best shape in each cell with hindsight; ours adapts by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.bench.baselines.colocated import ColocatedServer
from paceline.bench.baselines.shapes import BestFirst, Chain, Expansion, Shape
from paceline.bench.baselines.waiting import VerifyServer, WaitingClient
from paceline.bench.client import ClientModel, StreamClient
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime, ServerCost
from paceline.bench.link import LinkModel
from paceline.bench.playback import PlaybackDrafter
from paceline.bench.recording import Recording
from paceline.bench.server import SimulatedServer
from paceline.bench.stats import Served
from paceline.bench.target import RecordedTarget
from paceline.client.drafting.drafter import Drafter
from paceline.server.engine import EngineSettings
from paceline.shared.errors import ParameterError
from paceline.shared.messages import StepTime

CHAINS: tuple[Shape, ...] = tuple(Chain(length) for length in (1, 2, 4, 6, 8))
TREES: tuple[Shape, ...] = (
    Expansion((1, 1, 3, 1, 1, 1, 1, 1)),
    Expansion((3, 2, 1, 1)),
    Expansion((4, 2, 2)),
    Expansion((6, 2)),
    Expansion((8,)),
)
BEST_FIRST: tuple[Shape, ...] = tuple(
    BestFirst(budget, depth) for budget, depth in ((8, 2), (16, 3), (16, 6), (32, 4), (32, 8))
)


def playback_drafters(recording: Recording) -> Sequence[Drafter]:
    """The recorded draft model."""
    return (PlaybackDrafter(recording),)


def no_drafters(recording: Recording) -> Sequence[Drafter]:
    """Plain streaming."""
    del recording
    return ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid: conditions that all methods share. seed: of the link's dice."""

    recordings: tuple[Recording, ...]
    vocab_size: int
    step_time: StepTime
    link: LinkModel = field(default_factory=LinkModel)
    draft_time: DraftTime = field(default_factory=DraftTime)
    clients: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a method served in a cell, and the shape that it did best with."""

    served: list[Served]
    shape: str = ""

    @property
    def tok_s(self) -> float:
        """Tokens per second of the mean stream."""
        return sum(one.num_tokens for one in self.served) / sum(one.total_s for one in self.served)


Starter = Callable[[Recording, int, Callable[[], None]], Served]
"""Starts the request of a recording, with a seed and what to call at its end."""


def closed_loop(clock: VirtualClock, cell: Cell, start: Starter) -> list[Served]:
    """``cell.clients`` clients, each with one request after another, until every recording was served once (or every
    client had one). They start a fraction of a step apart.
    """
    count = max(len(cell.recordings), cell.clients)
    served: list[Served] = []

    def begin() -> None:
        number = len(served)
        if number < count:
            served.append(start(cell.recordings[number % len(cell.recordings)], cell.seed * 7919 + number, begin))

    for client in range(cell.clients):
        clock.at(client * cell.step_time.at(1) * 0.37, begin)
    clock.run()
    return served


def stream(
    cell: Cell,
    model: ClientModel,
    settings: EngineSettings | None = None,
    others: Mapping[int, ClientModel] | None = None,
) -> list[Served]:
    """Requests through the real engine and the real session. others: requests, by number from 0, that differ."""
    clock = VirtualClock()
    settings = replace(settings or EngineSettings(), step_time=cell.step_time)
    target = RecordedTarget(cell.vocab_size)
    server = SimulatedServer(clock, target, ServerCost(cell.step_time), settings)
    numbers = iter(range(1, 1 << 30))

    def start(recording: Recording, seed: int, on_done: Callable[[], None]) -> Served:
        number = next(numbers)
        mine = (others or {}).get(number - 1, model)
        client = StreamClient(clock, server, recording, cell.link, mine, number=number, seed=seed, on_done=on_done)
        client.start()
        return client.served

    return closed_loop(clock, cell, start)


def wait(cell: Cell, shape: Shape, *, is_proactive: bool = False) -> list[Served]:
    """Requests by stop-and-wait speculation."""
    clock = VirtualClock()
    server = VerifyServer(clock, cell.step_time)

    def start(recording: Recording, seed: int, on_done: Callable[[], None]) -> Served:
        client = WaitingClient(
            clock,
            server,
            recording,
            shape,
            cell.draft_time,
            cell.link,
            seed=seed,
            is_proactive=is_proactive,
            on_done=on_done,
        )
        client.start()
        return client.served

    return closed_loop(clock, cell, start)


def colocate(cell: Cell, shape: Shape) -> list[Served]:
    """Requests by speculation inside the server, streamed over the link."""
    clock = VirtualClock()
    server = ColocatedServer(clock, ServerCost(cell.step_time, draft=cell.draft_time), shape)

    def start(recording: Recording, seed: int, on_done: Callable[[], None]) -> Served:
        return server.open(recording, cell.link, seed, on_done)

    return closed_loop(clock, cell, start)


def _best(shapes: Sequence[Shape], run: Callable[[Shape], list[Served]]) -> Outcome:
    return max((Outcome(run(shape), shape.name) for shape in shapes), key=lambda outcome: outcome.tok_s)


def server_alone(cell: Cell) -> Outcome:
    """Plain streaming."""
    return Outcome(stream(cell, ClientModel(no_drafters)))


def chain(cell: Cell) -> Outcome:
    """Classic speculative decoding over the link."""
    return _best(CHAINS, lambda shape: wait(cell, shape))


def tree(cell: Cell) -> Outcome:
    """SpecInfer split over the link."""
    return _best(TREES, lambda shape: wait(cell, shape))


def specedge(cell: Cell) -> Outcome:
    """SpecEdge's rule."""
    return _best(BEST_FIRST, lambda shape: wait(cell, shape, is_proactive=True))


def paceline(cell: Cell) -> Outcome:
    """Ours."""
    return Outcome(stream(cell, ClientModel(playback_drafters, cell.draft_time)))


def colocated(cell: Cell) -> Outcome:
    """Speculation in the server; RTT 0, so that it is the same ceiling in every column."""
    near = replace(cell, link=replace(cell.link, rtt_s=0.0, jitter_s=0.0))
    return _best((*CHAINS, *TREES, *BEST_FIRST), lambda shape: colocate(near, shape))


METHODS: dict[str, Callable[[Cell], Outcome]] = {
    "server-alone": server_alone,
    "chain": chain,
    "tree": tree,
    "specedge": specedge,
    "paceline": paceline,
    "colocated": colocated,
}


def find_method(name: str) -> Callable[[Cell], Outcome] | None:
    """A method by name: one of the above, or ``static-N`` or ``dynamic-N`` (``node_count``)."""
    from paceline.bench.node_count import find_node_count_method  # which is made of what is defined here

    return METHODS.get(name) or find_node_count_method(name)


def method_names(text: str | None) -> tuple[str, ...]:
    """The methods of ``--methods``, server-alone always among them. Raises ``ParameterError`` that lists them."""
    if not text:
        return tuple(METHODS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ParameterError("methods", f"expected --methods with commas between, got {text!r}")
    for name in names:
        if find_method(name) is None:
            known = ", ".join((*METHODS, "static-N", "dynamic-N"))
            raise ParameterError("methods", f"expected methods among {known}, got {name!r}")
    others = dict.fromkeys(name for name in names if name not in METHODS)
    return (*(name for name in METHODS if name in names or name == "server-alone"), *others)

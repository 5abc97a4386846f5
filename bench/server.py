"""The simulated server: the real engine core on a virtual clock, charged t(n) for each step of n rows, or t(n, c).

Not here: sockets and threads (``paceline.server``), clients (``client``), and the methods that are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.clock import VirtualClock
from paceline.bench.costs import ServerCost
from paceline.bench.playback import Oracle
from paceline.bench.stats import Lane, Span
from paceline.bench.target import RecordedTarget
from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan, Wake
from paceline.shared.errors import PacelineError
from paceline.shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Fault,
    Grow,
    Limits,
    Open,
    ServerMessage,
    Welcome,
)

Deliver = Callable[[ServerMessage], None]


@dataclass(frozen=True, slots=True)
class Connection:
    """One client's end: where its messages go, and what its generations recite."""

    oracle: Oracle
    deliver: Deliver
    on_step: Callable[[Span], None]


class SimulatedServer:
    """Steps as long as there is something to do, like the engine thread, without a thread."""

    def __init__(self, clock: VirtualClock, target: RecordedTarget, cost: ServerCost, settings: EngineSettings) -> None:
        self._clock = clock
        self._target = target
        self._cost = cost
        self.engine = Engine(target, settings)
        self._connections: dict[int, Connection] = {}
        self._is_stepping = False
        self._wake_at: float | None = None
        self.limits: Limits = settings.limits
        self.busy_s = 0.0

    def welcome(self) -> Welcome:
        """What a client is told when it connects."""
        info = self._target.info
        step_time = self.engine.step_times.current
        return Welcome(PROTOCOL_VERSION, info.name, "", info.vocab_size, (), None, self.limits, step_time)

    def connect(self, number: int, connection: Connection) -> None:
        """A new connection. Numbers are never used twice."""
        self._connections[number] = connection

    def disconnect(self, number: int) -> None:
        """The connection is gone; what belonged to it is freed."""
        self._connections.pop(number, None)
        self.engine.disconnect(number)

    def receive(self, number: int, message: Open | Grow | Cancel) -> None:
        """A message arrives. A step begins at once if none is under way."""
        if number not in self._connections:
            return
        key = (number, message.generation)
        match message:
            case Open():
                try:
                    self.engine.open(key, message, self._clock.now)
                except PacelineError as error:
                    self._connections[number].deliver(Fault(error.code, str(error), message.generation))
            case Grow():
                self.engine.grow(key, message, self._clock.now)
            case Cancel():
                self.engine.cancel(key)
        self._flush()
        self._step()

    def _step(self) -> None:
        if self._is_stepping:
            return
        plan = self.engine.next_step(self._clock.now)
        self._flush()
        if isinstance(plan, Wake):
            self._sleep_until(plan.at)
        elif plan is not None:
            self._is_stepping = True
            self._wake_at = None
            seconds = self._cost.at(plan.batch.num_rows, sum(part.base_len for part in plan.parts))
            self.busy_s += seconds
            self._clock.after(seconds, lambda: self._finish(plan))

    def _sleep_until(self, time_s: float) -> None:
        if self._wake_at is not None and self._wake_at <= time_s:
            return
        self._wake_at = time_s

        def wake() -> None:
            if self._wake_at == time_s:
                self._wake_at = None
                self._step()

        self._clock.at(time_s, wake)

    def _finish(self, plan: StepPlan) -> None:
        now = self._clock.now
        contexts: list[tuple[Oracle, int]] = []
        for part in plan.parts:
            connection = self._connections.get(part.participant.key[0])
            # Whoever left during the step is still part of it; what is chosen for it is dropped.
            oracle = connection.oracle if connection is not None else _NOBODY
            contexts.append((oracle, part.participant.generation.num_output))
            if connection is not None:
                rows = part.num_tokens + len(part.laid_out.tree)
                connection.on_step(Span(Lane.STEP, plan.started_at, now, rows))
        self._target.prepare(contexts)
        self._is_stepping = False
        self._send(self.engine.finish(plan, self._target.forward(plan.batch), now))
        self._step()

    def _flush(self) -> None:
        self._send(self.engine.take_messages())

    def _send(self, messages: list[tuple[tuple[int, int], ServerMessage]]) -> None:
        for (number, _), message in messages:
            connection = self._connections.get(number)
            if connection is not None:
                connection.deliver(message)


class _Nobody(Oracle):
    """The oracle of a client that left."""

    def __init__(self) -> None:
        self.prompt_len = 0
        self.output = []


_NOBODY = _Nobody()

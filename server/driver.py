"""The engine thread: it alone touches the model, everything else talks to it through queues.

Orders come in with the time of their arrival; news goes out once per step, in one hop to the event loop. Neither side
ever waits for the other: the event loop only appends, the thread only sleeps when there is nothing to run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.server.engine import Engine, Outbox
from paceline.server.plan import StepPlan, Wake
from paceline.server.text import TargetText
from paceline.shared.errors import PacelineError
from paceline.shared.messages import Cancel, Fault, Grow, Open, ServerMessage

log = logging.getLogger("paceline.server")

Sink = Callable[[Sequence[ServerMessage]], None]
"""Takes a connection's news, on the event loop; must not wait."""
Order = Open | Grow | Cancel | None
"""What a connection asks for; None: it is gone."""
_STOP_S = 5.0


class Health(StrEnum):
    """What the engine thread is doing."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Served:
    """What loading gives: the engine, what its target calls itself to clients, and its text side if it has one."""

    engine: Engine
    fingerprint: str
    text: TargetText | None = None


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    connection: int
    order: Order
    on_accepted: Callable[[], None] | None = None


class EngineDriver:
    """See the module's text. Its methods belong to the event loop's thread.

    load: makes what is served, in the thread. stall_s: a step that takes longer than this makes the server not ready.
    """

    def __init__(self, load: Callable[[], Served], *, stall_s: float) -> None:
        self._load = load
        self._stall_s = stall_s
        self._inbox: deque[_Arrival] = deque()
        self._condition = threading.Condition()
        self._sinks: dict[int, Sink] = {}
        self._pending: dict[int, int] = {}
        self._next_connection = 0
        self._step_began: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._failed = False
        self.served: Served | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, None while it loads. Its counters may be read from anywhere, nothing else."""
        return None if self.served is None else self.served.engine

    @property
    def health(self) -> Health:
        """What the engine thread is doing now."""
        if self._failed:
            return Health.FAILED
        if self.served is None:
            return Health.LOADING
        if not self._thread.is_alive():
            return Health.STOPPED
        began = self._step_began
        return Health.STALLED if began is not None and time.monotonic() - began > self._stall_s else Health.READY

    @property
    def is_idle(self) -> bool:
        """Whether no generation runs or waits."""
        return self.engine is None or (self.engine.is_idle and not self._inbox)

    def start(self) -> None:
        """Starts the thread. News goes to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Until the engine is ready. Raises the error that kept it from it."""
        await self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Lets the step in flight end and the thread with it. A model that still loads is left to itself."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self.served is not None:
            self._thread.join(_STOP_S)

    def connect(self, sink: Sink) -> int:
        """A new connection's number. ``sink`` gets its news until ``disconnect``."""
        connection, self._next_connection = self._next_connection, self._next_connection + 1
        self._sinks[connection] = sink
        self._pending[connection] = 0
        return connection

    def submit(self, connection: int, order: Order, on_accepted: Callable[[], None] | None = None) -> None:
        """Hands an order to the engine. ``on_accepted`` runs on the event loop if it takes it, else a fault comes."""
        with self._condition:
            self._inbox.append(_Arrival(time.monotonic(), connection, order, on_accepted))
            self._pending[connection] = self._pending.get(connection, 0) + 1
            self._condition.notify()

    def num_pending(self, connection: int) -> int:
        """Orders of a connection that the engine has not taken yet."""
        return self._pending.get(connection, 0)

    def disconnect(self, connection: int) -> None:
        """Frees everything of a connection, at the end of the step in flight at the latest."""
        if self._sinks.pop(connection, None) is not None:
            self.submit(connection, None)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            served = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the command reports it and ends
            self._failed = True
            self._tell_loop(self._set_ready, error)
            return
        self.served = served
        self._tell_loop(self._set_ready, None)
        try:
            while not self._stopping:
                self._turn(served.engine)
        except Exception:
            self._failed = True
            log.exception("the engine stopped")
            self._tell_loop(self._fail_all)

    def _turn(self, engine: Engine) -> None:
        """One step, or a sleep until there is something to do."""
        self._feed(engine)
        plan = engine.next_step(time.monotonic())
        self._send(engine.take_messages())
        if isinstance(plan, StepPlan):
            self._send(self._step(engine, plan))
        else:
            self._sleep(None if plan is None else plan)

    def _step(self, engine: Engine, plan: StepPlan) -> Outbox:
        self._step_began = time.monotonic()
        try:
            logits = engine.target.forward(plan.batch)
            # What came in meanwhile is fed first: cancelled generations are not committed to.
            self._feed(engine)
            return engine.finish(plan, logits, time.monotonic())
        except (RuntimeError, MemoryError, ValueError) as error:
            log.exception("a step of %d rows failed", plan.batch.num_rows)
            what = "out of memory" if "memory" in str(error).lower() else "internal error"
            return engine.abort(plan, PacelineError(f"the step failed on the server: {what}"), time.monotonic())
        finally:
            self._step_began = None

    def _sleep(self, wake: Wake | None) -> None:
        with self._condition:
            if self._inbox or self._stopping:
                return
            self._condition.wait(None if wake is None else max(wake.at - time.monotonic(), 0.0))

    def _feed(self, engine: Engine) -> None:
        """Hands over all orders so far."""
        with self._condition:
            arrivals, self._inbox = self._inbox, deque()
        for arrival in arrivals:
            left = self._pending.get(arrival.connection, 1) - 1
            self._pending[arrival.connection] = left
            self._feed_one(engine, arrival)

    def _feed_one(self, engine: Engine, arrival: _Arrival) -> None:
        order = arrival.order
        if order is None:
            engine.disconnect(arrival.connection)
            self._pending.pop(arrival.connection, None)
            return
        key = (arrival.connection, order.generation)
        try:
            if isinstance(order, Open):
                engine.open(key, order, arrival.at)
            elif isinstance(order, Grow):
                engine.grow(key, order, arrival.at)
            else:
                engine.cancel(key)
            if arrival.on_accepted is not None:
                self._tell_loop(arrival.on_accepted)
        except PacelineError as error:
            fault = Fault(error.code, str(error), order.generation, getattr(error, "param", ""))
            self._send([(key, fault)])

    def _send(self, messages: Outbox) -> None:
        """One hop to the event loop for all news of a step."""
        if not messages:
            return
        news: dict[int, list[ServerMessage]] = {}
        for (connection, _), message in messages:
            news.setdefault(connection, []).append(message)
        self._tell_loop(self._dispatch, news)

    def _dispatch(self, news: dict[int, list[ServerMessage]]) -> None:
        for connection, messages in news.items():
            sink = self._sinks.get(connection)
            if sink is not None:
                sink(messages)

    def _set_ready(self, error: Exception | None) -> None:
        self._error = error
        self._ready.set()

    def _fail_all(self) -> None:
        for sink in list(self._sinks.values()):
            sink([Fault(PacelineError.code, "the engine stopped; the server must be restarted")])

    def _tell_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: the process ends and nobody listens any more.
            self._stopping = True

"""The websocket route ``/v1/stream``: moves bytes between a socket, a ``ServerSession`` and the engine's driver.

One reader and one writer for each connection. The reader never outruns the engine (a bound on orders not taken yet);
the writer never waits for anybody but its own peer, and a peer that does not read is cut off: its buffer is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from paceline.server.driver import EngineDriver
from paceline.server.gate import error_body, error_headers
from paceline.server.metrics import ServerMetrics
from paceline.server.session import ServerSession, State
from paceline.server.settings import ServerSettings
from paceline.shared.errors import BusyError
from paceline.shared.messages import Closing, Commit, Open, ServerMessage, Welcome
from paceline.shared.wire import encode

ABORT = "paceline.abort"
"""ASGI extension of our websocket protocol: drops the connection without waiting for the peer."""
MAX_PENDING = 64
_GOODBYE_S = 1.0


class Connection:
    """One client. ``end`` may be called from anywhere on the event loop; the socket closes with that code."""

    def __init__(
        self,
        socket: WebSocket,
        session: ServerSession,
        driver: EngineDriver,
        settings: ServerSettings,
        metrics: ServerMetrics,
    ) -> None:
        self._socket = socket
        self._session = session
        self._driver = driver
        self._settings = settings
        self._metrics = metrics
        self._outbound: deque[bytes] = deque()
        self._num_bytes = 0
        self._stirred = asyncio.Event()
        self._ending: tuple[int, str] | None = None
        self._opened_at: dict[int, float] = {}
        self._number = driver.connect(self.push)

    @property
    def num_active(self) -> int:
        """Generations that have not ended."""
        return self._session.num_active

    async def run(self) -> None:
        """Serves the connection until it ends."""
        writer = asyncio.create_task(self._write())
        try:
            await self._read()
        except WebSocketDisconnect:
            pass
        finally:
            self._driver.disconnect(self._number)
            self.end(1000, "")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer, self._settings.send_timeout + _GOODBYE_S)

    def push(self, messages: Sequence[ServerMessage]) -> None:
        """Queues news. Too much of it unread ends the connection: the client resumes when it can read again."""
        for message in self._session.emit(messages):
            self._observe(message)
            self._queue(encode(message, self._session.padding))
        if self._num_bytes > self._settings.send_buffer:
            self._outbound.clear()
            self.end(1013, "the client reads too slowly")

    def end(self, code: int, reason: str) -> None:
        """Closes the connection once what is queued has gone out."""
        if self._ending is None:
            self._ending = (code, reason)
            self._driver.disconnect(self._number)
        self._stirred.set()

    def _queue(self, data: bytes) -> None:
        self._outbound.append(data)
        self._num_bytes += len(data)
        self._stirred.set()

    def _observe(self, message: ServerMessage) -> None:
        if isinstance(message, Commit):
            self._metrics.step.observe(message.step_s)
            self._metrics.run.observe(len(message.tokens))
            began = self._opened_at.pop(message.generation, None)
            if began is not None:
                self._metrics.ttft.observe(time.monotonic() - began)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(self._settings.hello_timeout):
                while self._session.state is State.HELLO:
                    if not await self._read_one():
                        return
        except TimeoutError:
            self.end(1008, f"expected hello within {self._settings.hello_timeout:g} s")
            return
        while await self._read_one():
            await _until(lambda: self._driver.num_pending(self._number) <= MAX_PENDING, 60.0, every_s=0.002)

    async def _read_one(self) -> bool:
        """One message from the peer; False if none will follow."""
        event = await self._socket.receive()
        if event["type"] != "websocket.receive" or self._ending is not None:
            return False
        data = event.get("bytes")
        if data is not None:
            self._metrics.wire_bytes.labels("up").inc(len(data))
        reaction = self._session.receive_text() if data is None else self._session.receive_bytes(data)
        for message in reaction.send:
            self._queue(encode(message, self._session.padding))
        if reaction.order is not None:
            if isinstance(reaction.order, Open):
                self._opened_at[reaction.order.generation] = time.monotonic()
            self._driver.submit(self._number, reaction.order)
        if reaction.close_code is not None:
            self.end(reaction.close_code, reaction.reason)
            return False
        return True

    async def _write(self) -> None:
        try:
            while self._outbound or self._ending is None:
                if not self._outbound:
                    self._stirred.clear()
                    await self._stirred.wait()
                    continue
                data = self._outbound.popleft()
                async with asyncio.timeout(self._settings.send_timeout):
                    await self._socket.send_bytes(data)
                self._num_bytes -= len(data)
                self._metrics.wire_bytes.labels("down").inc(len(data))
            await self._close(*(self._ending or (1000, "")))
        except TimeoutError:
            self._driver.disconnect(self._number)
            self._abort()
        except (WebSocketDisconnect, RuntimeError):
            # The peer is gone; the reader learns it too.
            self._driver.disconnect(self._number)
        self._ending = self._ending or (1006, "")

    async def _close(self, code: int, reason: str) -> None:
        if self._socket.application_state is WebSocketState.CONNECTED:
            async with asyncio.timeout(_GOODBYE_S):
                await self._socket.close(code, reason)

    def _abort(self) -> None:
        abort: Callable[[], None] | None = self._socket.scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort()


class StreamRoute:
    """Accepts connections, and ends them all when the server drains."""

    def __init__(
        self,
        driver: EngineDriver,
        settings: ServerSettings,
        metrics: ServerMetrics,
        welcome: Callable[[], Welcome],
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._metrics = metrics
        self._welcome = welcome
        self._connections: set[Connection] = set()

    @property
    def num_active(self) -> int:
        """Generations on all connections that have not ended."""
        return sum(connection.num_active for connection in self._connections)

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def serve(self, socket: WebSocket) -> None:
        """One connection, from accept to close. The gate has let it in already."""
        if len(self._connections) >= self._settings.max_connections:
            self._metrics.refused.labels("connections").inc()
            # Closed before it is accepted, it would look like a wrong key (HTTP 403).
            error = BusyError(
                f"expected at most {self._settings.max_connections} connections; see --max-connections", 5.0
            )
            await socket.send_denial_response(
                JSONResponse(error_body(error), error.http_status, headers=error_headers(error))
            )
            return
        await socket.accept()
        session = ServerSession(self._welcome, self._welcome().limits, self._settings.padding)
        connection = Connection(socket, session, self._driver, self._settings, self._metrics)
        self._connections.add(connection)
        self._metrics.connections.inc()
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._metrics.connections.dec()

    async def drain(self, grace_s: float) -> None:
        """Tells everybody, lets generations finish for ``grace_s`` seconds, then closes what is left."""
        for connection in list(self._connections):
            connection.push([Closing(grace_s)])
            if not connection.num_active:
                connection.end(1001, "the server goes away")
        await _until(lambda: not self.num_active and self._driver.is_idle, grace_s)
        for connection in list(self._connections):
            connection.end(1012 if connection.num_active else 1001, "the server goes away")
        await _until(lambda: not self._connections, _GOODBYE_S)


async def _until(condition: Callable[[], bool], limit_s: float, every_s: float = 0.02) -> None:
    """Waits for what another thread brings about: nothing to await, and a few looks a second cost nothing."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - the engine thread sets no event
        await asyncio.sleep(every_s)

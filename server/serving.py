"""Listens: one process, uvicorn on the main thread, the engine on its own. Start, ready line, drain, exit code.

The port is bound before the model loads, so that a port in use is known at once and probes get answers meanwhile:
``/livez`` 200, ``/readyz`` 503. On SIGTERM or Ctrl-C the server refuses new work, tells its clients, lets generations
end for ``--grace`` seconds and exits with 0; a second signal exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from paceline.server.app import ServerState, create_app
from paceline.server.driver import EngineDriver, Health, Served
from paceline.server.engine import Engine, EngineSettings
from paceline.server.scheduler import StepLimits
from paceline.server.settings import ServerSettings
from paceline.server.stream import ABORT
from paceline.shared.errors import EXIT_FAILURE, PacelineError, UsageError
from paceline.shared.messages import Limits

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

log = logging.getLogger("paceline.server")

HEADER_S = 15.0
"""Seconds that a client has for a request's headers."""
MAX_UNREAD_BYTES = 2 << 20
"""Bytes that may wait for a websocket's peer below the bound on its messages, before it is dropped."""
MAX_FRAGMENTS = 1024
"""Frames that a websocket message may be cut into."""


def load(settings: ServerSettings) -> Served:
    """The target, its text side and the engine around them. Takes seconds; heavy imports happen here.

    Raises ``ModelError`` or ``UsageError``.
    """
    from paceline.models.tokenizer_hash import target_fingerprint
    from paceline.server.calibrate import calibrate
    from paceline.server.loading import load_target
    from paceline.server.text import TargetText

    target = load_target(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_memory=settings.kv_memory,
        attention=settings.attention,
        quantize=settings.quantize,
        max_context=settings.max_context,
    )
    info = target.info
    text = None if info.tokenizer_path is None else TargetText(info.tokenizer_path, info.chat_template_path)
    fingerprint = info.fingerprint
    if info.tokenizer_path is not None:
        try:
            fingerprint = target_fingerprint(info.tokenizer_path.parent)
        except PacelineError:
            # No safetensors to name it by: a draft then cannot be checked against these weights, only its tokenizer.
            fingerprint = info.fingerprint
    step_time = calibrate(target)
    log.info("a step takes %.1f ms and %.2f ms a row", step_time.base_s * 1e3, step_time.per_row_s * 1e3)
    engine_settings = EngineSettings(
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        max_nodes=settings.max_nodes,
        patience_s=settings.patience,
        limits=Limits(),
        step_limits=StepLimits(max_rows=settings.max_step_rows),
        step_time=step_time,
    )
    return Served(Engine(target, engine_settings, None if text is None else text.decode), fingerprint, text)


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket. Raises ``UsageError`` for a port in use or an address that is not ours."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {reason}; see --port") from None
    return listener


class StreamProtocol(WebSocketsSansIOProtocol):
    """uvicorn's websocket protocol, with a way to drop a peer that does not read (``stream``).

    What the protocol itself answers or collects is bounded too: pongs that nobody reads, and fragments of a message.
    """

    def handle_ping(self) -> None:
        """Answers a ping, unless answers pile up."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def handle_cont(self, event: Frame) -> None:
        """Takes one more fragment of a message."""
        if len(self.frames) >= MAX_FRAGMENTS:
            self.transport.abort()
            return
        super().handle_cont(event)

    async def send(self, message: ASGISendEvent) -> None:
        """Sends for the application. After a refusal no handshake is missing: it is not reported as a fault."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True

    async def run_asgi(self) -> None:
        """Runs the application for one connection."""
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[ABORT] = self.transport.abort
        await super().run_asgi()


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with a deadline for a request's headers: a slow drip holds no connection for long."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock starts with the connection."""
        super().connection_made(transport)
        self._arm()

    def on_response_complete(self) -> None:
        """The next request on the connection gets a new deadline."""
        super().on_response_complete()
        self._arm()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Another protocol takes over, with a deadline of its own."""
        self._disarm()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEADER_S, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn with our way to stop."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._num_signals = 0
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: out, at once. Runs between two instructions of the main thread."""
        self._num_signals += 1
        if self._num_signals > 1:
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        """Refuses new work, lets the rest end, then stops listening."""
        grace_s = self._state.settings.grace
        log.info("shutting down within %g s; a second signal exits at once", grace_s)
        self._state.is_draining = True
        await self._state.stream.drain(grace_s)
        self.should_exit = True


def serve(settings: ServerSettings) -> int:
    """Serves until told to stop. Returns the exit code.

    Raises ``UsageError``, ``ModelError`` or ``BundleError`` if it cannot start.
    """
    driver = EngineDriver(lambda: load(settings), stall_s=settings.stall_timeout)
    state = ServerState(settings, driver)
    if not settings.is_loopback and not state.keys.digests:
        log.warning("anybody who can reach %s may use this server: set --api-key-file", settings.host)
    listener = bind(settings)
    try:
        return asyncio.run(run_server(settings, state, listener))
    finally:
        listener.close()


async def run_server(settings: ServerSettings, state: ServerState, listener: socket.socket) -> int:
    """The event loop's part. Raises the error that kept the model from loading."""
    config = uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        http=DeadlineProtocol,
        ws=StreamProtocol,
        ws_max_size=Limits().max_frame_bytes,
        ws_ping_interval=settings.ping_interval,
        ws_ping_timeout=settings.ping_timeout,
        ws_per_message_deflate=settings.compression,
        h11_max_incomplete_event_size=64 << 10,
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        server_header=False,
    )
    server = DrainingServer(config, state)
    serving = asyncio.create_task(server.serve([listener]))
    ready = asyncio.create_task(state.driver.wait_ready())
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and ready.exception() is not None:
        server.should_exit = True
        await serving
        raise ready.exception() or AssertionError
    if ready.done():
        host = f"[{settings.host}]" if ":" in settings.host and "[" not in settings.host else settings.host
        log.info("listening on %s://%s:%d", settings.scheme, host, listener.getsockname()[1])
    await serving
    ready.cancel()
    return EXIT_FAILURE if state.driver.health is Health.FAILED else 0

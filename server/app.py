"""The server's ASGI application: routes and what stands in front of them. Who listens, and how long, is ``serving``.

/v1/stream                                websocket, MessagePack frames (``stream``)
/v1/models, /v1/completions, /v1/chat/…   OpenAI's API on the server alone (``openai``)
/v1/drafts/…                              draft bundles (``drafts``)
/livez, /readyz, /health, /metrics        for probes and Prometheus
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from paceline.server.auth import Doorkeeper, KeyRing
from paceline.server.drafts import DraftShelf, make_drafts_router, own_bundle
from paceline.server.driver import EngineDriver, Health
from paceline.server.gate import Gate, error_body, error_headers
from paceline.server.metrics import CONTENT_TYPE, ServerMetrics
from paceline.server.openai.router import make_openai_router
from paceline.server.settings import ServerSettings
from paceline.server.stream import StreamRoute
from paceline.shared.errors import BusyError, PacelineError, ParameterError
from paceline.shared.messages import PROTOCOL_VERSION, Welcome


class ServerState:
    """What the routes share: the engine's driver, the connections, and whether the server drains."""

    def __init__(self, settings: ServerSettings, driver: EngineDriver) -> None:
        """Raises ``UsageError``, ``ModelError`` or ``BundleError`` for keys or bundles that cannot be read."""
        self.settings = settings
        self.driver = driver
        self.keys = KeyRing.load(settings.api_key_file)
        self.shelf = DraftShelf(settings.draft or own_bundle(settings.model))
        self.metrics = ServerMetrics(driver)
        self.stream = StreamRoute(driver, settings, self.metrics, self.welcome)
        self.is_draining = False

    def welcome(self) -> Welcome:
        """What a client learns at the handshake. Raises ``BusyError`` while there is nothing to say."""
        served = self.driver.served
        if served is None:
            raise BusyError("expected a server that is ready, but the model loads", 5.0)
        engine = served.engine
        return Welcome(
            protocol=PROTOCOL_VERSION,
            model=engine.target.info.name,
            tokenizer="" if served.text is None else served.text.hash,
            vocab_size=engine.rules.vocab_size,
            eos_ids=engine.rules.eos_ids,
            bos_id=engine.target.info.bos_token_id,
            limits=replace(engine.settings.limits, max_context=engine.rules.max_context),
            step_time=engine.step_times.current,
            fingerprint=served.fingerprint,
        )

    def why_closed(self) -> str | None:
        """Why nothing new is served now, None if it is."""
        if self.is_draining:
            return "it shuts down"
        reasons = {
            Health.LOADING: "the model loads",
            Health.STALLED: "a step takes too long",
            Health.FAILED: "the engine failed",
            Health.STOPPED: "the engine stopped",
        }
        return reasons.get(self.driver.health)


def create_app(state: ServerState) -> FastAPI:
    """The application. Its lifespan starts and stops the engine thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.driver.start()
        yield
        state.driver.stop()

    app = FastAPI(title="paceline", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.include_router(make_openai_router(state.driver, state.settings, state.metrics))
    app.include_router(make_drafts_router(state.shelf))
    _add_probes(app, state)
    _add_errors(app)

    @app.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        await state.stream.serve(socket)

    settings = state.settings
    app.add_middleware(
        Gate,
        doorkeeper=Doorkeeper.of(settings.host, settings.allowed_hosts, settings.cors_origins),
        keys=state.keys,
        metrics=state.metrics,
        why_closed=state.why_closed,
    )
    if settings.cors_origins:
        origins = [origin for origin in settings.cors_origins if origin != "localhost"]
        local = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?" if "localhost" in settings.cors_origins else None
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=local,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_probes(app: FastAPI, state: ServerState) -> None:
    @app.get("/livez")
    async def livez() -> Response:
        failed = state.driver.health in {Health.FAILED, Health.STOPPED}
        return PlainTextResponse("the engine failed" if failed else "ok", 503 if failed else 200)

    @app.get("/readyz")
    @app.get("/health")
    async def readyz() -> Response:
        reason = state.why_closed()
        return PlainTextResponse(reason or "ok", 200 if reason is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in one shape, never in the framework's own."""

    @app.exception_handler(PacelineError)
    async def on_error(_: Request, error: PacelineError) -> Response:
        return JSONResponse(error_body(error), error.http_status, headers=error_headers(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(ParameterError("body", str(error.errors()[0]["msg"]).lower())), 400)

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        body = error_body(PacelineError(str(error.detail).lower()))
        body["error"] |= {"type": "invalid_request_error", "code": "not_found" if error.status_code == 404 else "http"}
        return JSONResponse(body, error.status_code, headers=error.headers)

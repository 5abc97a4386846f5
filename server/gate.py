"""What every request passes before any route sees it: readiness, Host, Origin, key. For HTTP and websockets alike.

A websocket is refused with an HTTP answer, before it is accepted. Errors have the OpenAI shape. Not here: what keys and
headers mean (``auth``).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.auth import Doorkeeper, KeyRing
from paceline.server.metrics import ServerMetrics
from paceline.shared.errors import AuthError, BusyError, PacelineError

log = logging.getLogger("paceline.server")

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""Probes: no key, no readiness."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ForbiddenError(PacelineError):
    """The Host or Origin header is not one of this server's."""

    code = "forbidden"
    close_code = 1008
    http_status = 403


def error_body(error: PacelineError) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``, as OpenAI's clients expect it."""
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(error.http_status, kind)
    param = getattr(error, "param", None)
    message = str(error).encode("utf-8", "backslashreplace").decode()  # it may quote half a character
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def error_headers(error: PacelineError) -> dict[str, str]:
    """Retry-After where waiting helps, WWW-Authenticate where a key does."""
    if isinstance(error, BusyError):
        return {"retry-after": str(max(1, round(error.retry_after_s)))}
    return {"www-authenticate": "Bearer"} if isinstance(error, AuthError) else {}


class UnreadyError(BusyError):
    """The model loads, the engine stalls or the server drains."""

    code = "unavailable"
    http_status = 503


class Gate:
    """ASGI middleware. ``why_closed``: a reason why nothing is served now, or None."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        doorkeeper: Doorkeeper,
        keys: KeyRing,
        metrics: ServerMetrics,
        why_closed: Callable[[], str | None],
    ) -> None:
        self._app = app
        self._doorkeeper = doorkeeper
        self._keys = keys
        self._metrics = metrics
        self._why_closed = why_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        try:
            self._check(scope, headers)
        except PacelineError as error:
            self._metrics.refused.labels(error.code).inc()
            await _refuse(scope, receive, send, error, request_id)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: MutableMapping[str, str]) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if not self._doorkeeper.admits_host(host):
            raise ForbiddenError("expected a Host header that names this server; see --allowed-hosts")
        if not self._doorkeeper.admits_origin(origin, host):
            raise ForbiddenError("expected a request from an allowed origin; see --cors-origins")
        if scope["path"] in OPEN_PATHS:
            return
        scope["state"]["caller"] = self._keys.check(headers.get("authorization"))
        reason = self._why_closed()
        if reason is not None and scope["path"] != "/metrics":
            raise UnreadyError(f"expected a server that is ready, but {reason}", 5.0)


async def _refuse(scope: Scope, receive: Receive, send: Send, error: PacelineError, request_id: str) -> None:
    body = json.dumps(error_body(error)).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
        **error_headers(error),
    }
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": error.close_code})
            return
    await send({"type": f"{prefix}.start", "status": error.http_status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})

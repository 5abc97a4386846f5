"""Server addresses: what a user may type, and the URLs that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline.shared.errors import UsageError

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
STREAM_PATH = "/v1/stream"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server. base: ``http(s)://host[:port][/prefix]`` without a trailing slash."""

    base: str

    @property
    def stream_url(self) -> str:
        """Where the websocket is."""
        scheme, rest = self.base.split("://", 1)
        return f"{_SCHEMES[scheme]}://{rest}{STREAM_PATH}"

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine: no proxy belongs in between."""
        return urlsplit(self.base).hostname in _LOOPBACK


def parse_address(text: str) -> ServerAddress:
    """``http://host:8765``, ``https://…``, ``ws(s)://…`` or ``host:port``. Raises ``UsageError``."""
    stripped = text.strip()
    with_scheme = stripped if "://" in stripped else f"http://{stripped}"
    parts = urlsplit(with_scheme)
    try:
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        port_is_good = False
    if parts.scheme not in _SCHEMES or not parts.hostname or not port_is_good or " " in stripped:
        raise UsageError(f"expected a server URL such as http://127.0.0.1:8765, got {text!r}")
    scheme = "https" if _SCHEMES[parts.scheme] == "wss" else "http"
    path = parts.path.rstrip("/").removesuffix(STREAM_PATH)
    return ServerAddress(f"{scheme}://{parts.netloc}{path}")


def parse_addresses(urls: str | Sequence[str]) -> tuple[ServerAddress, ...]:
    """One or several addresses; a text may hold several, separated by commas. Raises ``UsageError`` for none."""
    texts = urls.split(",") if isinstance(urls, str) else [part for url in urls for part in url.split(",")]
    addresses = tuple(parse_address(text) for text in texts if text.strip())
    if not addresses:
        raise UsageError("expected a server URL such as http://127.0.0.1:8765, got none")
    return addresses

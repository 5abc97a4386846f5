"""One websocket to one server, greeting included: messages in, messages out, bytes counted.

Keep-alive is the websocket's own ping, answered by the server's event loop, which no model ever blocks: a long prefill
is silent but alive (U061). Not here: what to do when the link is lost (``transport``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.http11 import Response

from paceline.client.address import ServerAddress
from paceline.client.faults import error_from_fault
from paceline.shared.errors import AuthError, BusyError, LinkError, PacelineError, ProtocolError, WireError
from paceline.shared.messages import (
    PROTOCOL_VERSION,
    Closing,
    Commit,
    Fault,
    Hello,
    Opened,
    ServerMessage,
    Welcome,
)
from paceline.shared.padding import MAX_UNIT
from paceline.shared.wire import decode, encode


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """connect_s: for the handshake and the greeting. ping_s, dead_s: how often to ping, and silence that means dead.

    max_frame_bytes: largest frame that the server may send. compression: permessage-deflate, off by default.
    """

    connect_s: float = 10.0
    ping_s: float = 5.0
    dead_s: float = 60.0
    max_frame_bytes: int = 1 << 22
    compression: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A message, its size on the wire, and the link's round trip time at that moment."""

    message: ServerMessage
    num_bytes: int
    rtt_s: float


class Link:
    """An open connection on which both sides have greeted each other."""

    def __init__(self, socket: ClientConnection, address: ServerAddress, welcome: Welcome, rtt_s: float) -> None:
        self._socket = socket
        self._first_rtt_s = rtt_s
        self.address = address
        self.welcome = welcome
        self.is_draining = False

    @classmethod
    async def connect(cls, address: ServerAddress, hello: Hello, api_key: str | None, settings: LinkSettings) -> Self:
        """Connect and greet. Raises ``AuthError``, ``BusyError``, ``LinkError``, ``ModelError``, ``ProtocolError``."""
        try:
            async with asyncio.timeout(settings.connect_s):
                socket = await _open(address, api_key, settings)
                try:
                    welcome = await _greet(socket, hello)
                    rtt_s = await (await socket.ping())
                except BaseException:
                    await socket.close()
                    raise
        except TimeoutError as error:
            raise LinkError(
                f"expected {address.base} to answer within {settings.connect_s:g} s, got silence"
            ) from error
        except ConnectionClosed as error:
            raise LinkError(f"expected {address.base} to greet, got a closed connection: {_reason(error)}") from error
        return cls(socket, address, welcome, rtt_s)

    @property
    def padding(self) -> int:
        """The unit that frames are padded to on this connection, 0 for none."""
        return self.welcome.padding

    @property
    def rtt_s(self) -> float:
        """The latest round trip time of a ping."""
        return self._socket.latency or self._first_rtt_s

    async def send(self, data: bytes) -> None:
        """Send one encoded message. Raises ``LinkError`` if the link is gone."""
        try:
            await self._socket.send(data)
        except ConnectionClosed as error:
            raise LinkError(f"lost the connection to {self.address.base}: {_reason(error)}") from error

    async def messages(self) -> AsyncIterator[Received]:
        """All messages, until ``LinkError`` when the link is lost or closed, or ``WireError`` for rubbish."""
        try:
            async for data in self._socket:
                if isinstance(data, str):
                    raise WireError("expected binary frames, got text")
                message = decode(data)
                if isinstance(message, Closing):
                    self.is_draining = True
                if isinstance(message, Opened | Commit | Fault | Closing | Welcome):
                    yield Received(message, len(data), self.rtt_s)
                else:
                    raise ProtocolError(f"expected a server's message, got {type(message).__name__.lower()}")
        except ConnectionClosed as error:
            raise LinkError(f"lost the connection to {self.address.base}: {_reason(error)}") from error
        raise LinkError(f"{self.address.base} closed the connection")

    async def close(self) -> None:
        """Say goodbye."""
        await self._socket.close()


async def _open(address: ServerAddress, api_key: str | None, settings: LinkSettings) -> ClientConnection:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return await connect(
            address.stream_url,
            additional_headers=headers,
            compression="deflate" if settings.compression else None,
            proxy=None if address.is_loopback else True,
            open_timeout=None,
            ping_interval=settings.ping_s,
            ping_timeout=settings.dead_s,
            close_timeout=1.0,
            max_size=settings.max_frame_bytes,
            max_queue=256,
        )
    except InvalidStatus as error:
        raise _refusal(address, error.response) from error
    except InvalidURI as error:
        raise LinkError(f"expected a server URL, got {address.base!r}: {error}") from error
    except InvalidHandshake as error:
        raise LinkError(f"expected a Paceline server at {address.base}, got: {error}") from error
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise LinkError(f"cannot connect to {address.base}: {reason}") from error


def _refusal(address: ServerAddress, response: Response) -> PacelineError:
    status = response.status_code
    reason = f"HTTP {status}{_said(response)}"
    if status == 401:
        return AuthError(f"{address.base} refused the API key ({reason}); set --api-key or PACELINE_API_KEY")
    if status == 403:
        return AuthError(f"{address.base} refused the connection ({reason})")
    if status in (429, 503):
        return BusyError(f"{address.base} has no room now ({reason})")
    return LinkError(f"expected a Paceline server at {address.base}, got HTTP {status}")


def _said(response: Response) -> str:
    """The sentence in a refusal's body, if it has one in our shape."""
    try:
        sentence = json.loads(response.body or b"")["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return f": {sentence[:200]}" if isinstance(sentence, str) else ""


async def _greet(socket: ClientConnection, hello: Hello) -> Welcome:
    await socket.send(encode(hello, hello.padding))
    data = await socket.recv()
    if isinstance(data, str):
        raise WireError("expected a binary greeting, got text")
    message = decode(data)
    if isinstance(message, Fault):
        raise error_from_fault(message)
    if not isinstance(message, Welcome):
        raise ProtocolError(f"expected welcome, got {type(message).__name__.lower()}")
    if message.protocol != PROTOCOL_VERSION:
        raise ProtocolError(f"expected protocol {PROTOCOL_VERSION}, got {message.protocol}: update the older side")
    if not hello.padding <= message.padding <= MAX_UNIT:
        raise ProtocolError(f"expected a padding of {hello.padding} to {MAX_UNIT} bytes, got {message.padding}")
    return message


def _reason(error: ConnectionClosed) -> str:
    close = error.rcvd or error.sent
    if close is None:
        return "no close frame"
    return f"code {close.code}" + (f", {close.reason}" if close.reason else "")

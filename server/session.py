"""The server's end of one ``/v1/stream`` connection, sans-IO: messages in, messages and orders out.

    HELLO  --hello-->  READY  --garbage or a broken rule-->  CLOSED

It knows the handshake and which generation numbers are in use; what frames mean is the engine's business. An error that
one generation caused is answered and the connection goes on; bytes that are no message end the connection, because
nothing after them can be trusted. Not here: sockets and deadlines (``stream``), keys (``auth``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.shared.errors import LimitError, ModelError, OpeningError, PacelineError, ProtocolError
from paceline.shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Closing,
    Commit,
    Fault,
    Grow,
    Hello,
    Limits,
    Open,
    ServerMessage,
    Welcome,
)
from paceline.shared.padding import MAX_UNIT
from paceline.shared.wire import decode


class State(Enum):
    """Where a connection stands."""

    HELLO = "hello"
    READY = "ready"
    CLOSED = "closed"


@dataclass(slots=True)
class Reaction:
    """What follows from a message. send: answers; order: for the engine; close_code: set if the connection ends."""

    send: list[ServerMessage] = field(default_factory=list)
    order: Open | Grow | Cancel | None = None
    close_code: int | None = None
    reason: str = ""


class ServerSession:
    """See the module's text. ``welcome`` is asked for at the handshake, so that it carries fresh figures."""

    def __init__(self, welcome: Callable[[], Welcome], limits: Limits, padding: int = 0) -> None:
        """padding: the unit that this server asks for; what holds, once the client has greeted, is ``padding``."""
        self.padding = padding
        self._welcome = welcome
        self._limits = limits
        self._active: set[int] = set()
        self.state = State.HELLO

    @property
    def num_active(self) -> int:
        """Generations that were opened and have not ended."""
        return len(self._active)

    def receive_bytes(self, data: bytes) -> Reaction:
        """One binary websocket message."""
        try:
            message = decode(data, self._limits)
            if not isinstance(message, Hello | Open | Grow | Cancel):
                raise ProtocolError(f"expected a client's message, got {type(message).__name__.lower()}")
            return self.receive(message)
        except OpeningError as error:
            return self._refuse(error)
        except PacelineError as error:
            return self._close(error)

    def receive_text(self) -> Reaction:
        """One text websocket message: this protocol has none."""
        self.state = State.CLOSED
        return Reaction(close_code=1003, reason="expected binary messages, got text")

    def receive(self, message: ClientMessage) -> Reaction:
        """One message. Raises ``ProtocolError`` or ``ModelError`` where the connection cannot go on."""
        if self.state is State.CLOSED:
            return Reaction()
        if isinstance(message, Hello):
            return self._greet(message)
        if self.state is State.HELLO:
            raise ProtocolError(f"expected hello first, got {type(message).__name__.lower()}")
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Cancel) and message.generation not in self._active:
            return Reaction()
        return Reaction(order=message)

    def emit(self, messages: Iterable[ServerMessage]) -> list[ServerMessage]:
        """What goes out of the engine's news: nothing about a generation that has ended."""
        passed: list[ServerMessage] = []
        for message in messages:
            generation = None if isinstance(message, Welcome | Closing) else message.generation
            if generation is not None and generation not in self._active:
                continue
            passed.append(message)
            if isinstance(message, Fault) or (isinstance(message, Commit) and message.finish is not None):
                self._active.discard(generation if generation is not None else -1)
        return passed

    def _greet(self, hello: Hello) -> Reaction:
        if self.state is not State.HELLO:
            raise ProtocolError("expected one hello, got a second")
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"expected protocol version {PROTOCOL_VERSION}, got {hello.protocol}")
        if hello.padding > MAX_UNIT:
            raise ProtocolError(f"expected a padding of at most {MAX_UNIT} bytes, got {hello.padding}")
        self.padding = max(self.padding, hello.padding)
        welcome = replace(self._welcome(), padding=self.padding)
        if hello.model and hello.model != welcome.model:
            raise ModelError(f"expected the model {welcome.model}, which this server has, got {hello.model}")
        self.state = State.READY
        return Reaction(send=[welcome])

    def _refuse(self, error: OpeningError) -> Reaction:
        """An opening with values out of range: answered like one that the engine refuses."""
        if self.state is not State.READY or error.generation in self._active:
            return self._close(error)
        fault = Fault(error.cause.code, str(error.cause), error.generation, getattr(error.cause, "param", ""))
        return Reaction(send=[fault])

    def _open(self, message: Open) -> Reaction:
        if message.generation in self._active:
            raise ProtocolError(f"expected a new generation number, got {message.generation}, which is in use")
        if len(self._active) >= self._limits.max_generations:
            limit = f"max_generations={self._limits.max_generations} at once on a connection"
            return Reaction(send=[Fault(LimitError.code, f"expected at most {limit}", message.generation)])
        self._active.add(message.generation)
        return Reaction(order=message)

    def _close(self, error: PacelineError) -> Reaction:
        self.state = State.CLOSED
        fault = Fault(error.code, str(error), None, getattr(error, "param", ""))
        return Reaction(send=[fault], close_code=error.close_code, reason=str(error)[:120])

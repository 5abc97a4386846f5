"""The tree of errors that every room raises, each with its code on the wire and its websocket close code.

    PacelineError
    ├── UsageError            what the user typed or set is wrong (exit code 2)
    │   └── ParameterError    one named parameter is out of range, unsupported or of the wrong type (HTTP 400)
    ├── TreeError             arrays that are not a token tree
    ├── WireError             bytes that are not a message of this protocol
    │   └── OpeningError      a whole message that opens a generation with values that are refused: it alone ends
    ├── ProtocolError         a well-formed message that the session's state does not allow
    │   └── LimitError        a negotiated limit is exceeded
    ├── AuthError             no key, or a wrong one
    ├── BusyError             the queue is full or the server drains: try later
    ├── ContextError          prompt and output do not fit the target's context
    ├── ModelError            a model cannot be found, loaded or supported
    │   └── BundleError       a draft bundle is broken or belongs to another target
    ├── NumericsError         the target's output is unusable for one generation (NaN, or every token ruled out)
    ├── LinkError             the server cannot be reached, or the link broke for good
    └── RemoteError           an error that the server reported

Messages are one sentence in lower case without a full stop: what was expected, what was got, which setting to change.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_FAILURE = 1
EXIT_USAGE = 2


class PacelineError(Exception):
    """Root of all errors that are meant to be read by a person or a peer.

    ``code`` travels in error frames and HTTP bodies; ``close_code`` (RFC 6455 section 7.4) is what a websocket closes
    with when the error ends the connection; ``http_status`` is the answer's status; ``exit_code`` the command's.
    """

    code: ClassVar[str] = "internal"
    close_code: ClassVar[int] = 1011
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_FAILURE


class UsageError(PacelineError):
    """A command, option or setting is wrong."""

    code = "usage"
    close_code = 1008
    http_status = 400
    exit_code = EXIT_USAGE


class ParameterError(UsageError, ValueError):
    """A request's parameter is out of range, of the wrong type or not supported. ``param`` names it."""

    code = "invalid_parameter"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class TreeError(PacelineError, ValueError):
    """Tokens and parents do not describe a token tree."""

    code = "invalid_tree"
    close_code = 1007
    http_status = 400


class WireError(PacelineError, ValueError):
    """Bytes that are not a well-formed message of this protocol version."""

    code = "malformed"
    close_code = 1007
    http_status = 400


class OpeningError(WireError):
    """A well-formed message that asks for a generation with values out of range.

    generation: the one it asked for. cause: the ``ParameterError`` or ``ContextError`` to answer with.
    """

    def __init__(self, generation: int, cause: UsageError) -> None:
        super().__init__(str(cause))
        self.generation = generation
        self.cause = cause


class ProtocolError(PacelineError):
    """A well-formed message that the peer may not send now, or with values that the state excludes."""

    code = "protocol"
    close_code = 1008
    http_status = 400


class LimitError(ProtocolError):
    """A negotiated limit (nodes, bytes, generations) is exceeded."""

    code = "limit"
    close_code = 1009
    http_status = 413


class AuthError(PacelineError):
    """The key is missing or wrong."""

    code = "unauthorized"
    close_code = 1008
    http_status = 401


class BusyError(PacelineError):
    """No room now. ``retry_after_s`` is the server's advice in seconds."""

    code = "busy"
    close_code = 1013
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ContextError(UsageError):
    """The prompt leaves no room in the target's context."""

    code = "context_length_exceeded"


class ModelError(PacelineError):
    """A model cannot be found, loaded or served. ``exit_code`` is 2: the user named it."""

    code = "model"
    http_status = 404
    exit_code = EXIT_USAGE


class BundleError(ModelError):
    """A draft bundle is incomplete, damaged, or made for another target or tokenizer."""

    code = "bundle"


class NumericsError(PacelineError):
    """The target gave a row without any possible token: it ends that generation and no other."""

    code = "numerics"


class LinkError(PacelineError):
    """The server cannot be reached, or the link broke and could not be restored."""

    code = "link"
    http_status = 502


class RemoteError(PacelineError):
    """An error that the server reported; ``remote_code`` is its wire code."""

    code = "remote"
    http_status = 502

    def __init__(self, remote_code: str, message: str) -> None:
        super().__init__(message)
        self.remote_code = remote_code

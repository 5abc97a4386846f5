"""From an error frame to the exception that fits it, so that a user sees the same error wherever it was found.

Not here: errors of the link itself (``transport``).
"""

from __future__ import annotations

from paceline.shared.errors import (
    AuthError,
    BusyError,
    ContextError,
    LimitError,
    ModelError,
    PacelineError,
    ParameterError,
    ProtocolError,
    RemoteError,
    TreeError,
)
from paceline.shared.messages import Fault

_TYPES: tuple[type[PacelineError], ...] = (AuthError, BusyError, ContextError, LimitError, ModelError)
_OURS = {ProtocolError.code, TreeError.code}
"""Codes that name a mistake of this program, not of its user."""


def error_from_fault(fault: Fault) -> PacelineError:
    """The exception that a fault stands for; ``RemoteError`` for codes that mean nothing special to a client."""
    if fault.code == ParameterError.code:
        return ParameterError(fault.param or "request", fault.message)
    if fault.code not in _OURS:
        for error_type in _TYPES:
            if fault.code == error_type.code:
                return error_type(fault.message)
    return RemoteError(fault.code, f"server: {fault.message}")

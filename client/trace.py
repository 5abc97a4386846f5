"""What one generation's driver did and when: drafter calls, messages out, messages in. For benchmarks and pictures.

Times are seconds of the driver's clock. Nothing is recorded unless a trace is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.shared.messages import ClientMessage, ServerMessage


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One call of a drafter that is not instant. num_rows: tokens and nodes that it had to compute.

    asked_at: handed to the drafting thread. answered_at: its answer was on the event loop.
    """

    drafter: int
    num_rows: int
    asked_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way out, and the bytes of its payload."""

    at: float
    message: ClientMessage
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that came in, the bytes of its payload, and the link's round trip time as it was known then."""

    at: float
    message: ServerMessage
    num_bytes: int
    rtt_s: float


@dataclass(slots=True)
class Trace:
    """Everything of one generation, in order."""

    calls: list[DraftCall] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)

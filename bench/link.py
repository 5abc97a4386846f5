"""The link model: how long a frame is under way between client and server, on a virtual clock.

One TCP connection, seen from above: frames arrive in order (a late one holds up those behind it), a lost packet
shows as a stall, each direction has its own bandwidth, and a disconnection loses whatever is in flight. Deterministic
by seed.

Not here: real sockets (``relay``), and what is in a frame (``paceline.shared.wire``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.shared.errors import ParameterError

MIN_STALL_S = 0.2
"""The least retransmission time-out of Linux (TCP_RTO_MIN): what a loss costs that no later frame reveals."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A link between one client and the server.

    rtt_s: round trip without jitter. jitter_s: largest extra delay of a frame, one way, uniform from 0.
    loss: chance that a frame's packet is lost, which stalls the direction by a retransmission.
    up_bytes_per_s, down_bytes_per_s: bandwidth. frame_overhead_bytes: headers that travel with each frame.
    mean_uptime_s: mean time between forced disconnections (exponential); None for never.
    downtime_s: how long a lost connection stays unreachable before a new one may begin.
    handshake_rtts: round trips from the first packet to the answered hello (TCP 1, upgrade 1, hello 1).
    freeze: (begin, length) in seconds on the run's clock: what would arrive within it arrives at its end.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    up_bytes_per_s: float = 2.5e6
    down_bytes_per_s: float = 12.5e6
    frame_overhead_bytes: int = 52
    mean_uptime_s: float | None = None
    downtime_s: float = 0.05
    handshake_rtts: float = 3.0
    freeze: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("rtt_s", "jitter_s", "downtime_s", "handshake_rtts"):
            if getattr(self, name) < 0:
                raise ParameterError(name, f"expected {name} of at least 0, got {getattr(self, name)}")
        if not 0.0 <= self.loss < 1.0:
            raise ParameterError("loss", f"expected loss in [0, 1), got {self.loss}")
        if min(self.up_bytes_per_s, self.down_bytes_per_s) <= 0:
            raise ParameterError("bandwidth", "expected bandwidths above 0")


class Pipe:
    """One direction of one connection: ``send`` says when a frame arrives."""

    def __init__(self, model: LinkModel, *, is_up: bool, seed: int) -> None:
        self._model = model
        self._bytes_per_s = model.up_bytes_per_s if is_up else model.down_bytes_per_s
        self._rng = np.random.default_rng([seed, int(is_up)])
        self._free_at = 0.0
        self._last_arrival = 0.0
        self.num_frames = 0
        self.num_bytes = 0

    def send(self, now: float, num_bytes: int) -> float:
        """The time at which a frame of ``num_bytes`` payload, sent now, arrives. Never before an earlier frame."""
        model = self._model
        self.num_frames += 1
        self.num_bytes += num_bytes
        begin = max(now, self._free_at)
        self._free_at = begin + (num_bytes + model.frame_overhead_bytes) / self._bytes_per_s
        delay = model.rtt_s / 2
        if model.jitter_s:
            delay += model.jitter_s * float(self._rng.random())
        if model.loss and float(self._rng.random()) < model.loss:
            delay += max(MIN_STALL_S, 1.5 * model.rtt_s)
        self._last_arrival = max(self._last_arrival, self._free_at + delay)
        if model.freeze is not None and model.freeze[0] <= self._last_arrival < sum(model.freeze):
            self._last_arrival = sum(model.freeze)
        return self._last_arrival


class Outages:
    """When a client's connections break: an endless, seeded list of times."""

    def __init__(self, model: LinkModel, seed: int) -> None:
        self._mean = model.mean_uptime_s
        self._rng = np.random.default_rng([seed, 2])

    def next_after(self, now: float) -> float:
        """The time of the next forced disconnection, infinity if there is none."""
        if self._mean is None:
            return float("inf")
        return now + float(self._rng.exponential(self._mean))

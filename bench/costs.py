"""What virtual time costs: the server's step-time model t(n) = a + b n, and what a draft model's call takes.

Where many generations share a server, a step also reads the KV of each one's context: t(n, c) = a + b n + k c for c
tokens of context in all. The grid leaves that out (k c is small for one generation), the capacity search does not.

Presets are roofline estimates from published figures, named with their source, so that two people mean the same by
"8b-h100". ``--calibrate`` measures the embedded pair on this machine instead.

Not here: the link (``link``), and measuring (``calibrate``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.shared.errors import ParameterError
from paceline.shared.messages import StepTime


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What one call of the draft model takes: base_s + per_row_s for each row it computes.

    A row is a committed token that it has not seen, or a node. The defaults are the embedded draft on one core.
    """

    base_s: float = 0.0025
    per_row_s: float = 0.00015

    def at(self, num_rows: int) -> float:
        """Seconds for a call with ``num_rows`` rows."""
        return self.base_s + self.per_row_s * num_rows


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a server's machine needs. per_context_s: to read one token's KV. draft: for the pair's draft model, were it
    to run there.
    """

    step_time: StepTime
    per_context_s: float = 0.0
    draft: DraftTime = field(default_factory=DraftTime)

    def at(self, num_rows: int, num_context: int = 0) -> float:
        """Seconds for a step of packed rows behind that many tokens of context, all generations together."""
        return self.step_time.at(num_rows) + self.per_context_s * num_context


@dataclass(frozen=True, slots=True)
class StepPreset:
    """A server's costs with a name and where the figures come from."""

    name: str
    cost: ServerCost
    source: str

    @property
    def step_time(self) -> StepTime:
        """Without context."""
        return self.cost.step_time


_DRAFT_1B = DraftTime(0.0011, 0.0000045)
_DRAFT_SOURCE = "the draft is a 1B model on one GPU: 2.5 GB at 67 % of 3.35 TB/s = 1.1 ms, a row 2.5 GFLOP at 55 %"

_PRESETS = (
    StepPreset(
        "8b-h100",
        ServerCost(StepTime(0.0072, 0.000030), 58e-9, _DRAFT_1B),
        "8.0e9 bf16 weights (16.1 GB) over 3.35 TB/s HBM3 (H100 SXM data sheet) = 4.8 ms at 67 % of peak; a row "
        "is 16 GFLOP at 55 % of 989 TFLOP/s; a token of context is 131 kB of KV (32 layers, 8 KV heads of 128) at 67 % "
        f"of peak; {_DRAFT_SOURCE}",
    ),
    StepPreset(
        "70b-4xh100",
        ServerCost(StepTime(0.0180, 0.000075), 37e-9, _DRAFT_1B),
        "70.6e9 bf16 weights (141 GB) over 4 x 3.35 TB/s = 10.5 ms at 67 % of peak plus 160 all-reduces of 15 us; "
        "a row is 141 GFLOP at 48 % of 4 x 989 TFLOP/s; a token of context is 328 kB of KV (80 layers, 8 KV heads of "
        f"128); {_DRAFT_SOURCE}",
    ),
    StepPreset(
        "135m-cpu",
        ServerCost(StepTime(0.0385, 0.0025)),
        "SmolLM2-135M-Instruct fp32 on two shared x86 cores: one token 41 ms, 32 nodes 120 ms (measured); the draft is "
        "the embedded one",
    ),
)
PRESETS = {preset.name: preset for preset in _PRESETS}
DEFAULT_ROW_SHARE = 0.004
"""For a step time that is given in milliseconds: what one row adds, as a share of the one-token step (70b-4xh100's)."""


def step_time_of(text: str) -> tuple[str, StepTime]:
    """A step-time model from ``--step``: a preset's name, milliseconds of a one-token step, or ``BASE+ROW`` in ms.

    Raises ``ParameterError`` that lists the presets.
    """
    name = text.strip()
    if name in PRESETS:
        return name, PRESETS[name].step_time
    try:
        if "+" in name:
            base, row = (float(part) / 1e3 for part in name.split("+", 1))
        else:
            whole = float(name) / 1e3
            row = DEFAULT_ROW_SHARE * whole
            base = whole - row
    except ValueError:
        base = row = -1.0
    if base < 0 or row < 0 or not 0 < base + row < math.inf:
        known = ", ".join(PRESETS)
        raise ParameterError(
            "step", f"expected milliseconds, BASE+ROW in milliseconds, or one of {known}, got {text!r}"
        )
    return name, StepTime(base, row)


def server_cost_of(text: str) -> tuple[str, ServerCost]:
    """As ``step_time_of``. What has no preset reads context for nothing and has a draft model of an eighth its size."""
    name, step_time = step_time_of(text)
    if name in PRESETS:
        return name, PRESETS[name].cost
    return name, ServerCost(step_time, draft=DraftTime(step_time.base_s / 8, step_time.per_row_s / 8))

"""What the engine counts while it runs. Plain numbers: ``metrics`` shows them, tests assert them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it started. num_scored counts nodes evaluated, num_accepted those committed."""

    num_steps: int = 0
    num_rows: int = 0
    num_drafted_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_committed: int = 0
    num_scored: int = 0
    num_accepted: int = 0
    num_stale: int = 0
    num_opened: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_faults: int = 0
    kv_bytes_moved: int = 0
    step_seconds: float = 0.0

"""The results as a table for people and as JSON for programs (DESIGN.md section 9)."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.bench.stats import Row
from paceline.shared.errors import UsageError

CAVEATS = (
    "speed-up is against the server alone in the same cell: higher is better, below 1 is a loss",
    "baselines pick their best tree in each cell with hindsight; paceline adapts by itself",
    "inter-token latency spreads the tokens of one commit evenly over the gap before it",
)


TABLE_WIDTH = 132
"""Characters that the table needs; a narrower terminal wraps its lines instead of losing columns."""


def table(rows: Sequence[Row]) -> Table:
    """One line per row; cells apart by a rule."""
    made = Table(title="speed against the server alone (higher is better)", title_justify="left")
    for name in ("rtt ms", "step ms", "method"):
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for name in ("tok/s", "speed-up", "ttft s", "itl p50 ms", "itl p95 ms", "tok/step", "B up/tok", "B down/tok"):
        made.add_column(name, justify="right")
    made.add_column("shape")
    last: tuple[float, float] | None = None
    for row in rows:
        cell = (row.rtt_ms, row.step_ms)
        if last is not None and cell != last:
            made.add_section()
        last = cell
        made.add_row(
            f"{row.rtt_ms:g}",
            f"{row.step_ms:g}",
            row.method,
            f"{row.tok_s:.1f}",
            f"{row.speedup_vs_server_alone:.2f}",
            f"{row.ttft_s:.3f}",
            f"{1e3 * row.itl_p50_s:.1f}",
            f"{1e3 * row.itl_p95_s:.1f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.bytes_up_per_token:.0f}",
            f"{row.bytes_down_per_token:.0f}",
            row.shape,
            style="bold" if row.method == "paceline" else "",
        )
    return made


def meta(mode: str, **more: Any) -> dict[str, Any]:
    """What a reader must know to compare two files."""
    return {
        "mode": mode,
        "caveats": list(CAVEATS),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **more,
    }


def as_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """``{"meta": ..., "rows": [...]}``."""
    return json.dumps({"meta": dict(about), "rows": [row.plain() for row in rows]}, indent=1)


def check_writable(*paths: Path | None) -> None:
    """Whether files can be written here: asked before anything is measured. Raises ``UsageError``."""
    for path in paths:
        if path is None:
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder")
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UsageError(f"expected a writable file at {path}, got {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Raises ``UsageError`` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"expected a writable file at {path}, got {error.strerror or error}") from error

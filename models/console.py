"""Where the commands of this room show progress: stderr, because stdout is for data."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_console() -> Console:
    return Console(stderr=True)


def counted_progress() -> Progress:
    """Bars with counts, time spent and an estimate of the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=progress_console())

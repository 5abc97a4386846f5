"""Where the commands of this room show progress: stderr, because stdout is for data."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_console() -> Console:
    return Console(stderr=True)


class LateProgress(Progress):
    """Bars that appear with the first progress: an error before that stands alone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.live.is_started:
            self.stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As of ``Progress``."""
        self.start()
        super().update(task_id, **changes)


def counted_progress() -> Progress:
    """Late bars with counts, time spent and an estimate of the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return LateProgress(*columns, console=progress_console())

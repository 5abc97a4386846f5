"""Measures the embedded pair on this machine: the target's step time by rows, and the draft model's call time by rows.

Not here: models of machines that are not at hand (``costs``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.bench.costs import DraftTime
from paceline.bench.recording import RecordingSet
from paceline.server.batch import Batch, Segment
from paceline.server.target import Target
from paceline.shared.messages import StepTime
from paceline.shared.tree import TokenTree

STEP_ROWS = (1, 4, 8, 16, 32)
CONTEXT_LEN = 128


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted models, and what was measured: milliseconds by number of rows."""

    step_time: StepTime
    step_ms: dict[int, float]


def fit_line(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * rows by least squares, weighted by 1/seconds; neither is negative."""
    table = np.stack([np.ones_like(rows), rows], axis=1) / seconds[:, None]
    base, per_row = np.linalg.lstsq(table, np.ones_like(seconds), rcond=None)[0].tolist()
    return max(base, 0.0), max(per_row, 0.0)


def calibrate_target(target: Target, repeats: int = 5) -> Calibration:
    """Steps with a tree of n - 1 nodes behind a context of ``CONTEXT_LEN`` tokens; the median of some repeats."""
    pool = target.pool
    context = (np.arange(CONTEXT_LEN) % max(target.info.vocab_size - 8, 1) + 4).astype(np.int32)
    sequence = 1 << 30
    pool.open(sequence, context)
    try:
        pool.reserve(sequence, CONTEXT_LEN + max(STEP_ROWS))
        target.forward(Batch((Segment(sequence, 0, context[:-1], TokenTree.empty()),)))
        runs = {rows: partial(_step, target, sequence, context, rows) for rows in STEP_ROWS}
        step_ms = {rows: 1e3 * _median(run, repeats) for rows, run in runs.items()}
    finally:
        pool.free(sequence)
    rows = np.array(list(step_ms), np.float64)
    base, per_row = fit_line(rows, np.array(list(step_ms.values())) / 1e3)
    return Calibration(StepTime(base, per_row), step_ms)


def _step(target: Target, sequence: int, context: NDArray[np.int32], rows: int) -> None:
    count = rows - 1
    tree = TokenTree(context[:count], np.maximum(np.arange(count) // 2 * 2 - 1, -1).astype(np.int32))
    segment = Segment(sequence, CONTEXT_LEN - 1, context[-1:], tree)
    target.forward(Batch((segment,)))


def _median(run: Callable[[], None], repeats: int) -> float:
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def draft_time_of(recordings: RecordingSet) -> DraftTime:
    """The call times that were measured while recording, or the defaults if there are too few."""
    measured = {int(rows): ms / 1e3 for rows, ms in dict(recordings.meta.get("draft_ms", {})).items()}
    if len(measured) < 2:
        seconds = next(iter(measured.values()), None)
        default = DraftTime()
        return default if seconds is None else DraftTime(max(seconds - default.per_row_s, 1e-4), default.per_row_s)
    base, per_row = fit_line(np.array(list(measured), np.float64), np.array(list(measured.values())))
    return DraftTime(base, per_row)

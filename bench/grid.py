"""Runs every method in every cell of a grid of RTTs and step times, and keeps what the report needs.

Not here: what a method does (``methods``), and how results look (``report``, ``plots``, ``page``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.bench.costs import DraftTime, step_time_of
from paceline.bench.link import LinkModel
from paceline.bench.methods import METHODS, Cell, Outcome, find_method
from paceline.bench.recording import Recording, RecordingSet
from paceline.bench.stats import Row, row_of, with_speedups
from paceline.bench.target import renumbered
from paceline.shared.errors import UsageError

DEFAULT_RTTS_MS = (0.0, 10.0, 20.0, 40.0, 80.0, 150.0, 300.0)
DEFAULT_STEPS = ("30",)
CellKey = tuple[float, str]
"""(rtt in ms, step as the user named it)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What to run. link: everything but its RTT. jitter_share: largest jitter as a share of the RTT."""

    recordings: RecordingSet
    rtts_ms: Sequence[float] = DEFAULT_RTTS_MS
    steps: Sequence[str] = DEFAULT_STEPS
    methods: Sequence[str] = tuple(METHODS)
    link: LinkModel = field(default_factory=LinkModel)
    jitter_share: float = 0.0
    draft_time: DraftTime = field(default_factory=DraftTime)
    clients: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Results:
    """rows: one for each method and cell. outcomes: what was served, by cell and method."""

    rows: list[Row]
    outcomes: dict[CellKey, dict[str, Outcome]]


def run_grid(grid: Grid, progress: Callable[[str], None] = lambda line: None) -> Results:
    """Raises ``UsageError`` for an empty set of recordings."""
    rows: list[Row] = []
    outcomes: dict[CellKey, dict[str, Outcome]] = {}
    for (rtt_ms, step), cell in cells_of(grid):
        found = outcomes.setdefault((rtt_ms, step), {})
        for name in grid.methods:
            progress(f"rtt {rtt_ms:g} ms, step {step}, {name}")
            found[name] = _method(name)(cell)
            rows.append(_row(name, found[name], cell, rtt_ms))
    return Results(with_speedups(rows), outcomes)


def cells_of(grid: Grid) -> Iterator[tuple[CellKey, Cell]]:
    """The cells, step times outermost. Raises ``UsageError`` for an empty set of recordings."""
    if not grid.recordings.recordings:
        raise UsageError("expected at least one recorded prompt, got none")
    is_greedy = all(not recording.temperature for recording in grid.recordings.recordings)
    recordings, vocab_size = renumbered(grid.recordings) if is_greedy else (grid.recordings, _vocab(grid.recordings))
    for step in grid.steps:
        _, step_time = step_time_of(step)
        for rtt_ms in grid.rtts_ms:
            link = replace(grid.link, rtt_s=rtt_ms / 1e3, jitter_s=grid.jitter_share * rtt_ms / 1e3)
            cell = Cell(recordings.recordings, vocab_size, step_time, link, grid.draft_time, grid.clients, grid.seed)
            yield (rtt_ms, step), cell


def _method(name: str) -> Callable[[Cell], Outcome]:
    found = find_method(name)
    if found is None:
        raise UsageError(f"expected a method, got {name!r}")
    return found


def _row(name: str, outcome: Outcome, cell: Cell, rtt_ms: float) -> Row:
    return row_of(
        name,
        outcome.served,
        rtt_ms=rtt_ms,
        step_ms=round(1e3 * cell.step_time.at(1), 3),
        clients=cell.clients,
        shape=outcome.shape,
        flips=flips_of(outcome, cell),
    )


def flips_of(outcome: Outcome, cell: Cell) -> int:
    """Tokens of all requests that are missing or not the recorded ones."""
    recordings = cell.recordings
    return sum(count_flips(one.token_ids, recordings[i % len(recordings)]) for i, one in enumerate(outcome.served))


def count_flips(token_ids: Sequence[int], recording: Recording) -> int:
    """Positions at which an output is not the recorded one, missing tokens included."""
    wanted: list[int] = recording.output.tolist()
    same = sum(mine == theirs for mine, theirs in zip(token_ids, wanted, strict=False))
    return max(len(wanted), len(token_ids)) - same


def _vocab(recordings: RecordingSet) -> int:
    highest = max(
        int(array.max(initial=0))
        for r in recordings.recordings
        for array in (r.prompt, r.output, r.on_path.token_ids, r.off_path.token_ids)
    )
    return max(highest + 1, 256)

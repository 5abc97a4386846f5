"""``paceline bench --promises``: the grid's promises, checked cell by cell, each with its worst cell and a verdict.

The grid is RTT 0 to 300 ms by one-token steps of 15, 30 and 60 ms. The promises, speed being tokens per second:

    never slower     ours is at least 0.99 x the server alone on the same link in every cell, also with a drafter
                     that is always wrong, with one that stalls for 2 s, and with jitter of half the RTT
    never beaten     ours is at least 0.98 x the best baseline, which picks its tree with hindsight, in every cell
    worth it         the geometric mean of ours / alone over RTT <= 80 ms at a step of 30 ms is at least 1.35
    as if co-located ours is at least 0.95 x speculation inside the server (RTT 0) where RTT <= 10 ms
    the target's own every token of every method and variant above is there, once, and the recorded one

Not here: the methods (``methods``), the cells (``grid``), clients that share a server (``capacity``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.client import ClientModel
from paceline.bench.crowd import STALL_S
from paceline.bench.grid import Grid, cells_of, flips_of
from paceline.bench.methods import METHODS, Cell, Outcome, playback_drafters, stream
from paceline.bench.report import TABLE_WIDTH, meta, write_text
from paceline.bench.trial import wrong_drafters
from paceline.shared.errors import PacelineError

BASELINES = ("chain", "tree", "specedge")
ALONE, OURS, COLOCATED = "server-alone", "paceline", "colocated"
WRONG, STALLED, JITTER, JITTER_ALONE = "wrong", "stalled", "jitter", "server-alone-jitter"
VARIANTS = (OURS, WRONG, STALLED, JITTER)

STALL_AT_S = 0.3
JITTER_SHARE = 0.5

LEAST_VS_ALONE = 0.99
LEAST_VS_BEST = 0.98
LEAST_MEAN, MEAN_RTT_MS, MEAN_STEP_MS = 1.35, 80.0, 30.0
LEAST_VS_COLOCATED, COLOCATED_RTT_MS = 0.95, 10.0


@dataclass(frozen=True, slots=True)
class CellFigures:
    """What was measured in a cell, by method and variant.

    step: as the user named it. tok_s: of the mean stream. kept: share of the tokens that are there and the target's.
    """

    rtt_ms: float
    step: str
    step_ms: float
    tok_s: Mapping[str, float]
    kept: Mapping[str, float]
    shapes: Mapping[str, str]

    @property
    def place(self) -> str:
        """Which cell it is, for people."""
        return f"rtt {self.rtt_ms:g} ms, step {self.step}"

    @property
    def best(self) -> str:
        """The baseline that is fastest here."""
        return max(BASELINES, key=lambda name: self.tok_s[name])

    @property
    def vs_best(self) -> float:
        """Ours / the best baseline."""
        return self.tok_s[OURS] / self.tok_s[self.best]

    @property
    def vs_colocated(self) -> float | None:
        """Ours / co-located speculation, where the promise holds them together."""
        return self.tok_s[OURS] / self.tok_s[COLOCATED] if self.rtt_ms <= COLOCATED_RTT_MS else None

    def vs_alone(self, variant: str = OURS) -> float:
        """A variant of ours / the server alone on the same link."""
        return self.tok_s[variant] / self.tok_s[JITTER_ALONE if variant == JITTER else ALONE]

    def plain(self) -> dict[str, Any]:
        """As ``--json`` holds it."""
        return {
            "rtt_ms": self.rtt_ms,
            "step": self.step,
            "step_ms": self.step_ms,
            "vs_alone": {name: self.vs_alone(name) for name in VARIANTS},
            "vs_best": self.vs_best,
            "best": self.best,
            "vs_colocated": self.vs_colocated,
            "tok_s": dict(self.tok_s),
            "kept": dict(self.kept),
            "shapes": dict(self.shapes),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """A promise and the figure it stands or falls with; None where the grid has no cell for it. where: of the worst."""

    promise: str
    least: float
    got: float | None
    where: str = ""

    @property
    def word(self) -> str:
        """PASS, FAIL or SKIP."""
        if self.got is None:
            return "SKIP"
        return "PASS" if self.got >= self.least else "FAIL"

    @property
    def line(self) -> str:
        """For people."""
        end = "no cell of this grid" if self.got is None else f"{self.got:.4f}, {self.where}"
        return f"{self.word}  {self.promise} >= {self.least:g}: {end}"

    def plain(self) -> dict[str, Any]:
        """As ``--json`` holds it."""
        return {
            "promise": self.promise,
            "least": self.least,
            "got": self.got,
            "where": self.where,
            "verdict": self.word,
        }


def measure(grid: Grid, progress: Callable[[str], None] = lambda line: None) -> list[CellFigures]:
    """Everything that the promises speak of, in every cell; the grid's own methods and jitter play no part.

    Raises ``UsageError`` for an empty set of recordings.
    """
    figures: list[CellFigures] = []
    # Its link has no RTT whatever the cell's, so one run serves all cells of a step time.
    ceilings: dict[str, Outcome] = {}
    for (rtt_ms, step), cell in cells_of(replace(grid, jitter_share=0.0)):
        progress(f"rtt {rtt_ms:g} ms, step {step}")
        if step not in ceilings:
            ceilings[step] = METHODS[COLOCATED](cell)
        found = _outcomes(cell) | {COLOCATED: ceilings[step]}
        served = max(len(cell.recordings), cell.clients)
        wanted = sum(len(cell.recordings[i % len(cell.recordings)].output) for i in range(served))
        figures.append(
            CellFigures(
                rtt_ms,
                step,
                round(1e3 * cell.step_time.at(1), 3),
                tok_s={name: one.tok_s for name, one in found.items()},
                kept={name: 1.0 - flips_of(one, cell) / wanted for name, one in found.items()},
                shapes={name: one.shape for name, one in found.items() if one.shape},
            )
        )
    return figures


def _outcomes(cell: Cell) -> dict[str, Outcome]:
    shaken = replace(cell, link=replace(cell.link, jitter_s=JITTER_SHARE * cell.link.rtt_s))
    wrong = ClientModel(wrong_drafters, cell.draft_time)
    stalled = ClientModel(playback_drafters, cell.draft_time, stall=(STALL_AT_S, STALL_S))
    return {
        **{name: METHODS[name](cell) for name in (ALONE, *BASELINES, OURS)},
        WRONG: Outcome(stream(cell, wrong)),
        STALLED: Outcome(stream(cell, stalled)),
        JITTER_ALONE: METHODS[ALONE](shaken),
        JITTER: METHODS[OURS](shaken),
    }


def judge(cells: Sequence[CellFigures]) -> list[Verdict]:
    """One verdict for each promise, in the order of the module's docstring."""
    alone = ((cell.vs_alone(name), f"{cell.place}, {name}") for cell in cells for name in VARIANTS)
    best = ((cell.vs_best, f"{cell.place}, {cell.best} {cell.shapes.get(cell.best, '')}".rstrip()) for cell in cells)
    near = ((value, cell.place) for cell in cells if (value := cell.vs_colocated) is not None)
    kept = ((value, f"{cell.place}, {name}") for cell in cells for name, value in cell.kept.items())
    return [
        _worst("ours / alone in every cell and variant", LEAST_VS_ALONE, alone),
        _worst("ours / best baseline in every cell", LEAST_VS_BEST, best),
        _mean([cell for cell in cells if cell.step_ms == MEAN_STEP_MS and cell.rtt_ms <= MEAN_RTT_MS]),
        _worst(f"ours / co-located at RTT <= {COLOCATED_RTT_MS:g} ms", LEAST_VS_COLOCATED, near),
        _worst("share of tokens that are the target's own", 1.0, kept),
    ]


def _worst(promise: str, least: float, values: Iterable[tuple[float, str]]) -> Verdict:
    found = min(values, default=None)
    return Verdict(promise, least, None) if found is None else Verdict(promise, least, found[0], f"worst at {found[1]}")


def _mean(cells: Sequence[CellFigures]) -> Verdict:
    promise = f"geometric mean of ours / alone over RTT <= {MEAN_RTT_MS:g} ms at a step of {MEAN_STEP_MS:g} ms"
    if not cells:
        return Verdict(promise, LEAST_MEAN, None)
    mean = math.exp(sum(math.log(cell.vs_alone()) for cell in cells) / len(cells))
    worst = min(cells, key=CellFigures.vs_alone)
    where = f"of {len(cells)} cells, worst {worst.vs_alone():.4f} at {worst.place}"
    return Verdict(promise, LEAST_MEAN, mean, where)


def promise_table(cells: Sequence[CellFigures]) -> Table:
    """One line per cell; step times apart by a rule."""
    made = Table(title="speed of paceline over others in the same cell (higher is better)", title_justify="left")
    for name in ("step", "rtt ms", "ours/alone", "wrong/alone", "stalled/alone", "jitter/alone", "ours/best"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("best baseline")
    made.add_column("ours/co-located", justify="right", no_wrap=True)
    last: str | None = None
    for cell in cells:
        if last is not None and cell.step != last:
            made.add_section()
        last = cell.step
        made.add_row(
            cell.step,
            f"{cell.rtt_ms:g}",
            *(f"{cell.vs_alone(name):.3f}" for name in VARIANTS),
            f"{cell.vs_best:.3f}",
            f"{cell.best} {cell.shapes.get(cell.best, '')}",
            "" if cell.vs_colocated is None else f"{cell.vs_colocated:.3f}",
        )
    return made


def check_promises(grid: Grid, json_path: Path | None, progress: Callable[[str], None] = lambda line: None) -> None:
    """Measures, prints table and verdicts, and writes the JSON. Raises ``PacelineError`` if a promise is broken."""
    cells = measure(grid, progress)
    verdicts = judge(cells)
    out = Console(width=max(Console().width, TABLE_WIDTH), highlight=False, markup=False)
    out.print(promise_table(cells))
    for verdict in verdicts:
        out.print(verdict.line, soft_wrap=True)
    if json_path is not None:
        write_text(json_path, as_json(grid, cells, verdicts))
    broken = [verdict.promise for verdict in verdicts if verdict.word == "FAIL"]
    if broken:
        raise PacelineError(f"expected every promise kept, got {len(broken)} broken: {'; '.join(broken)}")


def as_json(grid: Grid, cells: Sequence[CellFigures], verdicts: Sequence[Verdict]) -> str:
    """``{"meta": ..., "promises": [...], "cells": [...]}``."""
    about = meta(
        "promises",
        recordings=grid.recordings.meta,
        prompts=len(grid.recordings.recordings),
        draft_ms={"base": 1e3 * grid.draft_time.base_s, "per_row": 1e3 * grid.draft_time.per_row_s},
        loss=grid.link.loss,
        clients=grid.clients,
        seed=grid.seed,
        stall_s=[STALL_AT_S, STALL_S],
        jitter_share=JITTER_SHARE,
    )
    plain = {
        "meta": about,
        "promises": [verdict.plain() for verdict in verdicts],
        "cells": [cell.plain() for cell in cells],
    }
    return json.dumps(plain, indent=1)

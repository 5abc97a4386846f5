"""The capacity search for people: conditions, table, picture, JSON.

Not here: the search (``capacity``).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paceline.bench.capacity import (
    INTERVAL_S,
    LEAST_VS_ALONE,
    LEAST_VS_COLOCATED,
    CapacityRow,
    fewest_vs_alone,
    fewest_vs_colocated,
)
from paceline.bench.crowd import STALL_S
from paceline.bench.page import STYLE, check_plot_path, svg
from paceline.bench.plots import COLOURS
from paceline.bench.report import meta, write_text
from paceline.shared.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAVEATS = (
    f"clients: each asks a question every {INTERVAL_S:g} s on average (Poisson arrivals); more is better",
    "SLO: on the 95th percentile over tokens of inter-token latency as the user sees it, in one-token steps; "
    "tokens that arrive together share the gap before them evenly; the first token's delay is not part of it",
    f"one client in ten stalls once for {STALL_S:g} s: the link of one half of them, the drafter of the other",
    "co-located speculation picks its best fixed tree for each SLO with hindsight and never stops drafting",
    "a ratio is left out where the other serves nobody: below 1 the server alone cannot",
)

_FIGURES = ("clients", "vs alone", "vs co-located", "requests/s", "at once", "itl p95 ms", "ttft p95 ms", "tok/step")


def about_capacity(**facts: Any) -> dict[str, Any]:
    """What a reader must know to compare two runs."""
    return {**meta("capacity", **facts), "caveats": list(CAVEATS), "interval_s": INTERVAL_S}


def capacity_table(rows: Sequence[CapacityRow]) -> Table:
    """One line per row; SLOs apart by a rule."""
    made = Table(title="clients that one server can serve (higher is better)", title_justify="left")
    for name in ("step", "slo", "method"):
        made.add_column(name, justify="right" if name == "slo" else "left", no_wrap=True)
    for name in _FIGURES:
        made.add_column(name, justify="right")
    made.add_column("shape")
    last: tuple[str, float] | None = None
    for row in rows:
        if last is not None and (row.step, row.slo) != last:
            made.add_section()
        last = (row.step, row.slo)
        made.add_row(
            row.step,
            f"{row.slo:g}",
            row.method,
            *_figures(row),
            row.shape,
            style="bold" if row.method == "paceline" else "",
        )
    return made


def _figures(row: CapacityRow) -> list[str]:
    return [
        str(row.clients),
        "" if row.vs_server_alone is None else f"{row.vs_server_alone:.2f}",
        "" if row.vs_colocated is None else f"{row.vs_colocated:.2f}",
        f"{row.arrivals_per_s:.1f}",
        f"{row.mean_running:.0f}",
        f"{1e3 * row.itl_p95_s:.1f}",
        f"{1e3 * row.ttft_p95_s:.0f}",
        f"{row.tokens_per_step:.2f}",
    ]


def verdict(rows: Sequence[CapacityRow]) -> str:
    """The promises and the worst cases in one line."""
    worst = {"the server alone": fewest_vs_alone(rows), "co-located": fewest_vs_colocated(rows)}
    wanted = {"the server alone": LEAST_VS_ALONE, "co-located": LEAST_VS_COLOCATED}
    parts = [
        f"{value:.2f} x {name} (at least {wanted[name]:g})" if value is not None else f"{name}: nothing to compare"
        for name, value in worst.items()
    ]
    return f"paceline at its worst SLO: {', '.join(parts)}"


def capacity_json(rows: Sequence[CapacityRow], about: Mapping[str, Any]) -> str:
    """``{"meta": ..., "rows": [...]}``."""
    return json.dumps({"meta": dict(about), "rows": [row.plain() for row in rows]}, indent=1)


def capacity_figure(rows: Sequence[CapacityRow]) -> Figure:
    """Clients against SLO, one panel for each step time."""
    from matplotlib.figure import Figure

    steps = list(dict.fromkeys(row.step for row in rows))
    figure = Figure(figsize=(6.5 * len(steps), 4.5), layout="constrained")
    panels = figure.subplots(1, len(steps), squeeze=False)
    for axes, step in zip(panels[0], steps, strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            points = [(row.slo, row.clients) for row in rows if (row.step, row.method) == (step, method)]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker="o", markersize=3, color=COLOURS.get(method), label=method)
        axes.set_xlabel("SLO on p95 inter-token latency (one-token steps)")
        axes.set_ylabel(f"clients (one request per {INTERVAL_S:g} s each)")
        axes.set_title(f"{step} (higher is better)")
        axes.legend(fontsize=8)
    return figure


def write_capacity_plot(path: Path, rows: Sequence[CapacityRow], about: Mapping[str, Any]) -> None:
    """A PNG, or a page that needs nothing else. Raises ``UsageError`` if it cannot be written."""
    check_plot_path(path)
    figure = capacity_figure(rows)
    if path.suffix.lower() == ".html":
        write_text(path, _page(rows, about, svg(figure)))
        return
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UsageError(f"expected a writable file at {path}, got {error.strerror or error}") from error


def _page(rows: Sequence[CapacityRow], about: Mapping[str, Any], picture: str) -> str:
    caveats = "".join(f"<li>{html.escape(line)}</li>" for line in about["caveats"])
    head = "".join(f"<th>{name}</th>" for name in ("step", "slo", "method", *_FIGURES, "shape"))
    lines = ""
    for row in rows:
        values = (row.step, f"{row.slo:g}", row.method, *_figures(row), row.shape)
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        lines += f"<tr class='{'ours' if row.method == 'paceline' else ''}'>{cells}</tr>"
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>paceline bench --capacity</title>"
        f"<style>{STYLE}</style><h1>Clients on one server</h1><ul>{caveats}</ul>{picture}"
        f"<table><tr>{head}</tr>{lines}</table></html>\n"
    )

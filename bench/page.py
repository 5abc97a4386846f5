"""Writes the pictures: a PNG, or one HTML page that needs nothing else (pictures inline as SVG, figures as a table)."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.grid import Results
from paceline.bench.plots import overview, timeline
from paceline.bench.report import write_text
from paceline.bench.stats import Row
from paceline.shared.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 2px 10px; text-align: right; }
th { border-bottom: 1px solid #888; } td.name, th.name { text-align: left; } tr.ours { font-weight: 600; }
tr.cell td { border-top: 1px solid #ccc; } svg { max-width: 100%; height: auto; }
"""
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("rtt_ms", "{:g}"),
    ("step_ms", "{:g}"),
    ("method", "{}"),
    ("tok_s", "{:.1f}"),
    ("speedup_vs_server_alone", "{:.2f}"),
    ("ttft_s", "{:.3f}"),
    ("itl_p50_s", "{:.4f}"),
    ("itl_p95_s", "{:.4f}"),
    ("tokens_per_step", "{:.2f}"),
    ("bytes_up_per_token", "{:.0f}"),
    ("bytes_down_per_token", "{:.0f}"),
    ("shape", "{}"),
)


def check_plot_path(path: Path, suffixes: Sequence[str] = (".png", ".html")) -> None:
    """Raises ``UsageError`` unless the name ends with one of them; called before anything is measured."""
    if path.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise UsageError(f"expected --plot to name a {known} file, got {path.name!r}")


def write_plot(path: Path, results: Results, about: Mapping[str, Any]) -> list[Path]:
    """Writes the picture or the page; beside a PNG the timeline goes to ``<name>-timeline.png``. Returns the files."""
    check_plot_path(path)
    if path.suffix.lower() == ".html":
        write_text(path, page(results, about))
        return [path]
    second = path.with_name(f"{path.stem}-timeline{path.suffix}")
    for file, figure in ((path, overview(results)), (second, timeline(results))):
        try:
            figure.savefig(file, dpi=130)
        except OSError as error:
            raise UsageError(f"expected a writable file at {file}, got {error.strerror or error}") from error
    return [path, second]


def svg(figure: Figure) -> str:
    """The picture as markup for a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue().partition("<svg")[2].join(("<svg", ""))


def page(results: Results, about: Mapping[str, Any]) -> str:
    """The whole page."""
    facts = "".join(
        f"<li>{html.escape(str(key))}: {html.escape(str(value))}</li>"
        for key, value in about.items()
        if key != "caveats"
    )
    caveats = "".join(f"<li>{html.escape(str(line))}</li>" for line in about.get("caveats", ()))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>paceline bench</title>"
        f"<style>{STYLE}</style><h1>paceline bench</h1><ul>{caveats}</ul>"
        f"{svg(overview(results))}<h2>Where the time goes</h2>{svg(timeline(results))}"
        f"<h2>Figures</h2>{_table(results.rows)}<h2>Conditions</h2><ul>{facts}</ul></html>\n"
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th class='{'name' if form == '{}' else ''}'>{name}</th>" for name, form in _COLUMNS)
    lines: list[str] = []
    last: tuple[float, float] | None = None
    for row in rows:
        cell = (row.rtt_ms, row.step_ms)
        names = ("cell " if cell != last else "") + ("ours" if row.method == "paceline" else "")
        last = cell
        values = "".join(
            f"<td class='{'name' if form == '{}' else ''}'>{html.escape(form.format(getattr(row, name)))}</td>"
            for name, form in _COLUMNS
        )
        lines.append(f"<tr class='{names}'>{values}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"

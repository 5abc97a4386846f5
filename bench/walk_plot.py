"""Accepted length against draft time, one line of trees for each set of drafters. Not here: measuring (``walk``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
"""Of the pictures that ``save`` writes."""

_COLOURS = ("#00798c", "#d1495b", "#c9a227", "#8d5a97", "#2e4057")
_MARKERS = {"chain": "s", "static": "^", "dynamic": "o"}


def draw(rows: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> Figure:
    """One panel for each mode; rows as ``walk.compare`` makes them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(modes), 5), layout="constrained")
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    names = list(dict.fromkeys(str(row["drafters"]) for row in rows))
    for axes, mode in zip(panels, modes, strict=True):
        for name, colour in zip(names, _COLOURS * len(names), strict=False):
            mine = [row for row in rows if row["drafters"] == name]
            dynamic = [row for row in mine if str(row["tree"]).startswith("dynamic")]
            axes.plot([row["draft_ms"] for row in dynamic], [row[mode] for row in dynamic], color=colour, linewidth=0.8)
            for row in mine:
                marker = _MARKERS[str(row["tree"]).split()[0]]
                axes.plot(row["draft_ms"], row[mode], marker, color=colour)
                axes.annotate(str(row["tree"]).split()[-1], (row["draft_ms"], row[mode]), fontsize=6)
            axes.plot([], [], "o", color=colour, label=name)
        axes.set_xlabel("ms to draft a tree (median, one thread)")
        axes.set_ylabel("tokens per verification step")
        axes.set_title(f"{mode} (square: chain, triangle: static, circle: dynamic trees of n nodes; higher is better)")
        axes.title.set_fontsize(8)
        axes.legend(fontsize=8)
    return figure


def save(rows: Sequence[Mapping[str, Any]], modes: Sequence[str], path: Path) -> None:
    """Writes the picture; its format follows the suffix."""
    draw(rows, modes).savefig(path, dpi=150)

"""The figures of an evaluation as lines of text. Not here: how they come about (``evaluate``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_lines(figures: Mapping[str, Any]) -> list[str]:
    """A table by category (higher is better), then draft time, drafters, and kinds of trees if they were compared."""
    modes = [mode for mode in ("greedy", "sampled") if mode in figures]
    categories = sorted({category for mode in modes for category in figures[mode]["by_category"]})
    width = max(len("category"), *(len(category) for category in categories))
    lines = [f"{'category':<{width}}" + "".join(f"  {mode:>8} top-1 top-5" for mode in modes)]
    for name in [*categories, "mean"]:
        cells = [figures[mode] if name == "mean" else figures[mode]["by_category"].get(name) for mode in modes]
        lines.append(f"{name:<{width}}" + "".join(_cell(cell) for cell in cells))
    timing = figures["draft_ms"]
    lines.append(
        f"draft: {timing['median']:.1f} ms a tree of {timing['nodes']} nodes (median; {timing['cpu_median']:.1f} ms of "
        f"CPU) at {timing['context']} tokens"
    )
    for name, share in figures["drafters"].items():
        alone = share.get("alone", {})
        tail = ", alone " + ", ".join(f"{mode} {value:.2f}" for mode, value in alone.items()) if alone else ""
        lines.append(f"{name}: proposed {share['share_of_accepted']:.1%} of the accepted nodes first{tail}")
    lines += [_tree_line(row, modes) for row in figures.get("trees", [])]
    return lines


def _tree_line(row: Mapping[str, Any], modes: list[str]) -> str:
    values = ", ".join(f"{mode} {row[mode]:.2f}" for mode in modes)
    return f"{row['drafters']}, {row['tree']}: {values} tokens per step, {row['draft_ms']:.1f} ms to draft"


def _cell(cell: Mapping[str, float] | None) -> str:
    if cell is None:
        return f"  {'-':>8} {'-':>5} {'-':>5}"
    return f"  {cell['tokens_per_step']:>8.2f} {cell['top1']:>5.2f} {cell['top5']:>5.2f}"

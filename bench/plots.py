"""Pictures of a run with matplotlib: speed-up against RTT, latencies, tokens per step, bytes, one generation's time.

Not here: the page around them (``page``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.grid import Results
from paceline.bench.stats import Lane, Row, Served

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "server-alone": "#888888",
    "chain": "#c9a227",
    "tree": "#d1495b",
    "specedge": "#8d5a97",
    "paceline": "#00798c",
    "colocated": "#2e4057",
}
_LANES = {Lane.DRAFT: "drafting", Lane.UP: "frames up", Lane.STEP: "server step", Lane.DOWN: "commits down"}
_LANE_COLOURS = {Lane.DRAFT: "#c9a227", Lane.UP: "#00798c", Lane.STEP: "#d1495b", Lane.DOWN: "#2e4057"}
TIMELINE_S = 0.8
"""How much of a generation the timeline shows."""


def overview(results: Results) -> Figure:
    """Four panels in one figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    speedup_panel(axes[0][0], results.rows)
    latency_panel(axes[0][1], results)
    bars_panel(axes[1][0], results.rows, "tokens_per_step", "tokens per verification step")
    bars_panel(axes[1][1], results.rows, "bytes_up_per_token", "bytes up per token")
    return figure


def _steps(rows: Sequence[Row]) -> list[float]:
    return sorted({row.step_ms for row in rows})


def speedup_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """One line per method; step times by line style."""
    styles = ("-", "--", ":", "-.")
    for index, step in enumerate(_steps(rows)):
        for method, colour in COLOURS.items():
            points = sorted(
                (r.rtt_ms, r.speedup_vs_server_alone) for r in rows if (r.method, r.step_ms) == (method, step)
            )
            if points:
                label = f"{method}, {step:g} ms" if len(_steps(rows)) > 1 else method
                x, y = zip(*points, strict=True)
                axes.plot(x, y, styles[index % len(styles)], color=colour, marker="o", markersize=3, label=label)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlabel("RTT (ms)")
    axes.set_ylabel("speed against the server alone")
    axes.set_title("speed-up against RTT (higher is better)")
    axes.legend(fontsize=7)


def latency_panel(axes: Axes, results: Results) -> None:
    """Distribution of inter-token latency in the middle cell."""
    keys = sorted(results.outcomes)
    rtt_ms, step = keys[len(keys) // 2]
    for method, outcome in results.outcomes[rtt_ms, step].items():
        gaps = np.sort(np.concatenate([one.gaps() for one in outcome.served])) * 1e3
        if len(gaps):
            axes.plot(gaps, np.linspace(0, 1, len(gaps)), color=COLOURS.get(method), label=method)
    axes.set_xlabel("inter-token latency (ms)")
    axes.set_ylabel("share of tokens")
    axes.set_title(f"inter-token latency at RTT {rtt_ms:g} ms, step {step}")
    axes.legend(fontsize=7)


def bars_panel(axes: Axes, rows: Sequence[Row], name: str, title: str) -> None:
    """One group per RTT, one bar per method, at the first step time."""
    step = _steps(rows)[0]
    chosen = [row for row in rows if row.step_ms == step]
    rtts = sorted({row.rtt_ms for row in chosen})
    methods = [method for method in COLOURS if any(row.method == method for row in chosen)]
    width = 0.8 / max(len(methods), 1)
    for index, method in enumerate(methods):
        values = {row.rtt_ms: float(getattr(row, name)) for row in chosen if row.method == method}
        places = [place + index * width for place, rtt in enumerate(rtts) if rtt in values]
        axes.bar(places, [values[rtt] for rtt in rtts if rtt in values], width, color=COLOURS[method], label=method)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(rtts))], [f"{rtt:g}" for rtt in rtts])
    axes.set_xlabel("RTT (ms)")
    axes.set_title(f"{title} (step {step:g} ms)")
    axes.legend(fontsize=7)


def timeline(results: Results, methods: Sequence[str] = ("tree", "paceline")) -> Figure:
    """Where the time goes in one generation: drafting, frames in flight, steps, commits."""
    from matplotlib.figure import Figure

    keys = sorted(results.outcomes)
    rtt_ms, step = keys[len(keys) // 2]
    shown = [name for name in methods if name in results.outcomes[rtt_ms, step]]
    shown = shown or list(results.outcomes[rtt_ms, step])[:1]
    figure = Figure(figsize=(13, 1.0 + 2.2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False)
    for index, name in enumerate(shown):
        timeline_panel(panels[index][0], results.outcomes[rtt_ms, step][name].served[0], name)
    panels[-1][0].set_xlabel(f"ms since open (RTT {rtt_ms:g} ms, step {step})")
    return figure


def timeline_panel(axes: Axes, served: Served, title: str) -> None:
    """One lane per kind of work; ticks on top are tokens that arrive."""
    lanes = list(_LANES)
    for level, lane in enumerate(reversed(lanes)):
        is_frame = lane in (Lane.UP, Lane.DOWN)
        height = 0.25 if is_frame else 0.7
        axes.broken_barh(
            _bars(served, lane),
            (level - height / 2, height),
            color=_LANE_COLOURS[lane],
            alpha=0.5 if is_frame else 0.85,
            linewidth=0,
        )
    for time, count in served.arrivals:
        if time - served.opened_at <= TIMELINE_S:
            axes.text(1e3 * (time - served.opened_at), len(lanes) - 0.45, str(count), fontsize=6, ha="center")
    axes.set_yticks(range(len(lanes)), [_LANES[lane] for lane in reversed(lanes)])
    axes.set_xlim(0, 1e3 * TIMELINE_S)
    axes.set_ylim(-0.6, len(lanes) - 0.1)
    axes.set_title(f"{title}: one generation (numbers: tokens that arrive)", fontsize=9)


def _bars(served: Served, lane: Lane) -> list[tuple[float, float]]:
    """(begin, length) in ms of what happened in a lane while the timeline lasts."""
    shown = [span for span in served.spans if span.lane is lane and span.begin_s - served.opened_at <= TIMELINE_S]
    return [(1e3 * (s.begin_s - served.opened_at), max(1e3 * (s.end_s - s.begin_s), 0.3)) for s in shown]

"""`paceline models eval`: parse, call the measuring room, print. No measuring here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.models.catalogue import EMBEDDED
from paceline.models.console import counted_progress
from paceline.models.store import write_bytes

_EXAMPLES = """
Examples:

  paceline models eval smollm2 --prompts prompts.jsonl --max-tokens 128 --nodes 32 --json figures.json

  paceline models eval ./my-model --draft ./bundle --prompts prompts.jsonl --every 13
"""


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command("eval", epilog=_EXAMPLES)(evaluate)


def evaluate(
    model: Annotated[
        str, typer.Argument(help="the pair: a target's name or folder", envvar="PACELINE_MODELS_TARGET")
    ] = EMBEDDED,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with turns or prompt, or plain text [default: a few of our own]",
            envvar="PACELINE_MODELS_PROMPTS",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="tokens of output a prompt", envvar="PACELINE_MODELS_MAX_TOKENS")
    ] = 64,
    nodes: Annotated[int, typer.Option(min=1, max=128, help="nodes of a tree", envvar="PACELINE_MODELS_NODES")] = 32,
    draft: Annotated[
        str | None, typer.Option(help="a draft bundle [default: the pair's own]", envvar="PACELINE_MODELS_DRAFT")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="take every k-th prompt only", envvar="PACELINE_MODELS_EVERY")] = 1,
    max_prompt: Annotated[
        int, typer.Option(min=1, help="leave longer prompts out, in tokens", envvar="PACELINE_MODELS_MAX_PROMPT")
    ] = 4096,
    levels: Annotated[int, typer.Option(min=1, help="draft model calls a tree", envvar="PACELINE_MODELS_LEVELS")] = 4,
    width: Annotated[int, typer.Option(min=1, help="nodes expanded a call", envvar="PACELINE_MODELS_WIDTH")] = 5,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="compare chains, static and dynamic trees, each drafter alone and all merged, on the same texts",
            envvar="PACELINE_MODELS_ALONE",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="picture of accepted length against draft time, implies --alone", envvar="PACELINE_MODELS_PLOT"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the sampled half", envvar="PACELINE_MODELS_SEED")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", envvar="PACELINE_MODELS_JSON")
    ] = None,
) -> None:
    """Measure a pair: tokens per step, coverage, draft time, by category, greedy and at temperature 1."""
    from paceline.bench.evaluate import EvalSettings, evaluate_pair
    from paceline.bench.evaluate_report import as_lines
    from paceline.bench.report import check_writable

    if plot is not None:
        from paceline.bench.page import check_plot_path
        from paceline.bench.walk_plot import SUFFIXES

        check_plot_path(plot, SUFFIXES)
    check_writable(json_path, plot)
    settings = EvalSettings(
        max_tokens=max_tokens,
        num_nodes=nodes,
        num_levels=levels,
        width=width,
        every=every,
        max_prompt_len=max_prompt,
        seed=seed,
        compares=alone or plot is not None,
    )
    with counted_progress() as progress:
        task = progress.add_task("loading", total=None)

        def on_progress(what: str, done: int, of: int) -> None:
            progress.update(task, description=what, completed=done, total=of)

        figures = evaluate_pair(model, draft, prompts, settings, on_progress)
    for line in as_lines(figures):
        typer.echo(line)
    if plot is not None:
        from paceline.bench.walk_plot import save

        save(figures["trees"], ("greedy", "sampled"), plot)
    if json_path is not None:
        write_bytes(json_path, (json.dumps(figures, indent=2) + "\n").encode())

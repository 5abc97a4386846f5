"""`paceline models ensemble`: parse, measure drafts together, print. No measuring here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.shared.errors import ModelError, ParameterError

_EXAMPLES = """
Examples:

  paceline models ensemble ./one --work-dir work                 one draft

  paceline models ensemble ./one ./another --work-dir work       two that share each budget

  paceline models ensemble ./boosted --work-dir work --nodes 16  all drafts of a bundle
"""


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command("ensemble", epilog=_EXAMPLES)(ensemble)


def ensemble(
    bundles: Annotated[list[Path], typer.Argument(help="draft bundles; all their drafts are measured together")],
    work_dir: Annotated[
        Path,
        typer.Option(help="of the `distill` whose held-out documents are the texts", envvar="PACELINE_MODELS_WORK_DIR"),
    ],
    nodes: Annotated[
        str, typer.Option(help="budgets, with commas between", envvar="PACELINE_MODELS_BUDGETS")
    ] = "1,2,4,8,16,32",
    texts: Annotated[int, typer.Option(min=1, help="texts at most", envvar="PACELINE_MODELS_TEXTS")] = 24,
    levels: Annotated[int, typer.Option(min=1, help="calls a tree and draft", envvar="PACELINE_MODELS_LEVELS")] = 4,
    width: Annotated[int, typer.Option(min=1, help="nodes expanded a call", envvar="PACELINE_MODELS_WIDTH")] = 5,
) -> None:
    """Measure drafts that share one budget of nodes: coverage, tokens per step, draft time."""
    from paceline.models.ensemble import greedy_texts, measure_together
    from paceline.models.evaluate import TreeShape
    from paceline.models.manifest import verify_bundle
    from paceline.models.runtime import GraphRunner
    from paceline.models.samples import Corpus

    budgets = _budgets(nodes)
    files = [bundle / entry.file for bundle in bundles for entry in verify_bundle(bundle).drafters]
    found = greedy_texts(Corpus.load(work_dir / "corpus"), texts, max_len=448)
    if not found:
        raise ModelError(f"{work_dir} holds no greedy answer that was kept out of training")
    capacity = 448 + levels * width
    runners = [GraphRunner(file, capacity) for file in files]
    typer.echo(f"{len(files)} drafts, {len(found)} texts, {sum(len(answer) for _, answer in found)} tokens")
    typer.echo(f"{'nodes':>6}  {'coverage':>8}  {'tokens/step':>11}  {'draft ms':>8}")
    for budget in budgets:
        worth = measure_together(runners, found, TreeShape(budget, levels, width, min(budget, 8)))
        typer.echo(
            f"{worth.num_nodes:>6}  {worth.coverage:>8.3f}  {worth.tokens_per_step:>11.3f}  {worth.draft_ms:>8.1f}"
        )


def _budgets(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 <= int(part) <= 128 for part in parts):
        raise ParameterError("nodes", f"expected --nodes as numbers from 1 to 128 with commas between, got {text!r}")
    return [int(part) for part in parts]

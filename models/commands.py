"""`paceline models …` on the command line. Thin: every command parses, calls its module, and prints."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.models.catalogue import EMBEDDED, bundle_folder, list_bundles, list_targets, target_folder

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Build, make and evaluate draft models.", rich_markup_mode=None
)
WHEEL_BYTES = 92_871_040


def _console() -> Console:
    """Progress goes to stderr: stdout is for data."""
    return Console(stderr=True)


@app.callback()
def _root() -> None:
    """Draft models."""


@app.command()
def build(
    name: Annotated[str, typer.Argument(help="the embedded pair's name")] = EMBEDDED,
    force: Annotated[bool, typer.Option(help="build again what is already there")] = False,
) -> None:
    """Fetch the embedded target, de-quantise it, and build its draft. Does nothing when both are there."""
    from paceline.models.build import build_pair

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(), transient=True) as progress:
        task = progress.add_task("checking", total=None)

        def on_stage(stage: str) -> None:
            progress.update(task, description=stage, completed=0, total=WHEEL_BYTES if "fetching" in stage else None)

        pair = build_pair(name, on_stage, lambda size: progress.update(task, completed=min(size, WHEEL_BYTES)), force)
    made = " and ".join(pair.made)
    typer.echo(f"{name}: {'built ' + made if made else 'up to date'}")
    typer.echo(f"  target  {pair.target}")
    typer.echo(f"  draft   {pair.bundle}")


@app.command("list")
def list_models() -> None:
    """Show which targets and drafts are on this machine."""
    for title, names, folder in (("targets", list_targets(), target_folder), ("drafts", list_bundles(), bundle_folder)):
        typer.echo(f"{title}:" if names else f"{title}: none")
        for name in names:
            typer.echo(f"  {name}  {folder(name)}")

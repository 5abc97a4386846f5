"""`paceline models …` on the command line: what is here, the embedded pair, and transfers. Thin: parse, call, print.

Not here: the commands that make drafts (`maker_commands`) and those that measure them (`eval_command`,
`ensemble_command`).
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from paceline.models import ensemble_command, eval_command, maker_commands
from paceline.models.catalogue import EMBEDDED, bundle_folder, list_bundles, list_targets, target_folder
from paceline.models.console import LateProgress, progress_console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Build, make and evaluate draft models.",
)
maker_commands.register(app)
eval_command.register(app)
ensemble_command.register(app)
WHEEL_BYTES = 92_871_040

_BUILD_EXAMPLES = """
Examples:

  paceline models build              fetch the target once, build its draft

  paceline models build --force      build both again
"""
_LIST_EXAMPLES = """
Example:

  paceline models list
"""
_PULL_EXAMPLES = """
Examples:

  paceline models pull http://127.0.0.1:8765

  PACELINE_API_KEY=… paceline models pull https://gpu.example.com
"""


@app.callback()
def _root() -> None:
    """Draft models."""


@app.command(epilog=_BUILD_EXAMPLES)
def build(
    name: Annotated[
        str, typer.Argument(help="the embedded pair's name", envvar="PACELINE_MODELS_BUILD_NAME")
    ] = EMBEDDED,
    force: Annotated[
        bool, typer.Option("--force", help="build again what is already there", envvar="PACELINE_MODELS_FORCE")
    ] = False,
) -> None:
    """Fetch the embedded target, de-quantise it, and build its draft. Does nothing when both are up to date."""
    from paceline.models.build import build_pair

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console(), transient=True) as progress:
        task = progress.add_task("checking", total=None)

        def on_stage(stage: str) -> None:
            progress.update(task, description=stage, completed=0, total=WHEEL_BYTES if "fetching" in stage else None)

        pair = build_pair(name, on_stage, lambda size: progress.update(task, completed=min(size, WHEEL_BYTES)), force)
    made = " and ".join(pair.made)
    typer.echo(f"{name}: {'built ' + made if made else 'up to date'}")
    typer.echo(f"  target  {pair.target}")
    typer.echo(f"  draft   {pair.bundle}")


@app.command("list", epilog=_LIST_EXAMPLES)
def list_models() -> None:
    """Show which targets and drafts are on this machine."""
    for title, names, folder in (("targets", list_targets(), target_folder), ("drafts", list_bundles(), bundle_folder)):
        typer.echo(f"{title}:" if names else f"{title}: none")
        for name in names:
            typer.echo(f"  {name}  {folder(name)}")


@app.command(epilog=_PULL_EXAMPLES)
def pull(
    server: Annotated[str, typer.Argument(help="the server's URL", envvar="PACELINE_SERVER")],
    name: Annotated[
        str | None, typer.Option(help="which of its drafts [default: all]", envvar="PACELINE_MODELS_PULL_NAME")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="the server's API key", envvar="PACELINE_API_KEY")] = None,
) -> None:
    """Fetch draft bundles from a server into the cache. Goes on where an interrupted pull stopped; checks sha-256."""
    from paceline.models.transfer import pull_bundles

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with LateProgress(*columns, console=progress_console()) as progress:
        tasks = {}

        def on_bytes(bundle: str, file: str, done: int, of: int) -> None:
            if (bundle, file) not in tasks:
                tasks[bundle, file] = progress.add_task(f"{bundle}/{file}", total=of)
            progress.update(tasks[bundle, file], completed=done)

        folders = pull_bundles(server, name, api_key, on_bytes)
    for folder in folders:
        typer.echo(f"{folder.name}: {folder}")

"""`paceline models …` on the command line. Thin: every command parses, calls its module, and prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline.models.catalogue import EMBEDDED, bundle_folder, find_target, list_bundles, list_targets, target_folder
from paceline.shared.errors import UsageError

if TYPE_CHECKING:
    from paceline.models.pipeline import Distilled, PipelineSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Build, make and evaluate draft models.",
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


@app.command()
def distill(
    target: Annotated[str, typer.Argument(help="a target's name, or a Hugging Face model folder")],
    work_dir: Annotated[Path, typer.Option(help="where text and checkpoints are kept; a killed run goes on from it")],
    out: Annotated[
        Path | None, typer.Option(help="the bundle's folder [default: the cache, under the target's name]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of its own text that the target writes")] = 500_000,
    layers: Annotated[str, typer.Option(help="number of layers, or their ids: 6, or 0,1,2,27,28,29")] = "6",
    vocab: Annotated[int, typer.Option(min=16, help="size of the output vocabulary")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="optimiser steps")] = 1200,
    batch_rows: Annotated[int, typer.Option(min=1, help="rows a step")] = 4,
    row_len: Annotated[int, typer.Option(min=32, help="tokens a row")] = 512,
    learning_rate: Annotated[float, typer.Option(help="peak of the schedule")] = 8e-4,
    rows: Annotated[int, typer.Option(min=1, help="texts that the target writes at once")] = 192,
    slots: Annotated[int, typer.Option(min=16, help="longest text, in tokens")] = 384,
    bits: Annotated[int, typer.Option(help="weights of the exported graph: 32, 8 or 4")] = 8,
    min_agreement: Annotated[
        float, typer.Option(help="refuse a quantised graph below this agreement with fp32")
    ] = 0.85,
    seed: Annotated[int, typer.Option(help="of text, order and training")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 lets torch choose")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Make a draft from a target alone: it writes its own text, the draft learns from it, and is exported."""
    import torch

    from paceline.models.corpus import CorpusSettings
    from paceline.models.distill import DistillSettings
    from paceline.models.pipeline import PipelineSettings, pick_device

    if threads:
        torch.set_num_threads(threads)
    folder = find_target(target)
    micro = min(4, batch_rows)
    settings = PipelineSettings(
        num_tokens=tokens,
        num_layers=1 if "," in layers else _integer("--layers", layers),
        layer_ids=tuple(_integer("--layers", part) for part in layers.split(",")) if "," in layers else (),
        vocab_size=vocab,
        corpus=CorpusSettings(seed=seed, num_rows=rows, num_slots=slots),
        training=DistillSettings(
            seed=seed,
            num_steps=steps,
            batch_rows=batch_rows,
            micro_rows=micro,
            row_len=row_len,
            learning_rate=learning_rate,
        ),
    )
    result = _distill_with_bars(folder, work_dir, settings, pick_device(device))
    name = target if target in list_targets() else folder.name
    _export({"ssm-0": result}, folder, out or bundle_folder(name), name, bits, min_agreement)


def _integer(option: str, text: str) -> int:
    if not text.strip().isdigit():
        raise UsageError(f"{option} expects whole numbers, got {text!r}")
    return int(text)


def _distill_with_bars(folder: Path, work: Path, settings: PipelineSettings, device: object) -> Distilled:
    """Runs the pipeline under two progress bars with an estimate of the time left."""
    import torch

    from paceline.models.distill import Progress as StepProgress
    from paceline.models.pipeline import PipelineHooks, run_pipeline

    assert isinstance(device, torch.device)
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_console()) as progress:
        text = progress.add_task("text, tokens", total=settings.num_tokens)
        step = progress.add_task("training, steps", total=settings.training.num_steps, start=False)

        def on_text(done: int, of: int) -> None:
            progress.update(text, completed=done, total=of)

        def on_step(now: StepProgress) -> None:
            progress.start_task(step)
            progress.update(step, completed=now.step, description=f"training, loss {now.loss:.3f}")

        hooks = PipelineHooks(on_stage=lambda stage: progress.log(stage), on_text=on_text, on_step=on_step)
        return run_pipeline(folder, work, settings, device, hooks)


def _export(drafts: dict[str, Distilled], target: Path, out: Path, name: str, bits: int, min_agreement: float) -> None:
    from paceline.models.export import ExportSettings, export_bundle

    first = next(iter(drafts.values()))
    settings = ExportSettings(bits=bits, head_bits=32 if bits == 32 else 8, min_agreement=min_agreement)
    _, reports = export_bundle(
        {drafter: made.draft for drafter, made in drafts.items()},
        target,
        out,
        name=name,
        settings=settings,
        provenance={drafter: dict(made.provenance) for drafter, made in drafts.items()},
        licence="as the target's",
        texts=first.texts,
    )
    for drafter, report in reports.items():
        typer.echo(
            f"{drafter}: agrees with fp32 on {report.agreement:.1%} of {report.num_tokens} tokens, "
            f"{report.file_bytes / 1e6:.1f} MB of {report.float_bytes / 1e6:.1f} MB"
        )
    typer.echo(f"bundle: {out}")

"""What the commands that make drafts share: distilling under progress bars, and writing the bundle with its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from paceline.models.catalogue import bundle_folder, list_targets
from paceline.models.console import counted_progress
from paceline.models.distill import Progress
from paceline.models.export import ExportSettings, export_bundle
from paceline.models.pipeline import Distilled, PipelineHooks, PipelineSettings, run_pipeline


@dataclass(frozen=True, slots=True)
class ExportWish:
    """What a user may say about an export, see ``ExportSettings``."""

    bits: int = 8
    min_agreement: float = 0.85
    num_candidates: int = 128
    context_len: int = 8192

    def settings(self) -> ExportSettings:
        return ExportSettings(
            bits=self.bits,
            head_bits=32 if self.bits == 32 else 8,
            num_candidates=self.num_candidates,
            context_len=self.context_len,
            min_agreement=self.min_agreement,
        )


def distill_with_bars(folder: Path, work: Path, settings: PipelineSettings, device: torch.device) -> Distilled:
    """Runs the pipeline under two progress bars with an estimate of the time left."""
    with counted_progress() as progress:
        text = progress.add_task("text, tokens", total=settings.num_tokens)
        step = progress.add_task("training, steps", total=settings.training.num_steps, start=False)

        def on_text(done: int, of: int) -> None:
            progress.update(text, completed=done, total=of)

        def on_step(now: Progress) -> None:
            progress.start_task(step)
            progress.update(step, completed=now.step, description=f"training, loss {now.loss:.3f}")

        hooks = PipelineHooks(on_stage=lambda stage: progress.log(stage), on_text=on_text, on_step=on_step)
        return run_pipeline(folder, work, settings, device, hooks)


def write_bundle(
    drafts: Mapping[str, Distilled], target_name: str, target: Path, out: Path | None, wish: ExportWish
) -> None:
    """Exports the drafts to `out` (default: the cache, under the target's name) and prints what they are worth."""
    name = target_name if target_name in list_targets() else target.name
    folder = out or bundle_folder(name)
    first = next(iter(drafts.values()))
    _, reports = export_bundle(
        {drafter: made.draft for drafter, made in drafts.items()},
        target,
        folder,
        name=name,
        settings=wish.settings(),
        provenance={drafter: dict(made.provenance) for drafter, made in drafts.items()},
        licence="as the target's",
        texts=first.texts,
    )
    for drafter, report in reports.items():
        typer.echo(
            f"{drafter}: agrees with fp32 on {report.agreement:.1%} of {report.num_tokens} tokens, "
            f"{report.file_bytes / 1e6:.1f} MB of {report.float_bytes / 1e6:.1f} MB"
        )
    typer.echo(f"bundle: {folder}")

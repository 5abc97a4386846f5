"""`paceline models distill|boost|export|pack`: the commands that make drafts. Thin: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.models.catalogue import find_target
from paceline.models.console import counted_progress
from paceline.shared.errors import UsageError

_DISTILL_EXAMPLES = """
Examples:

  paceline models distill smollm2 --work-dir work

  paceline models distill ./my-model --work-dir work --layers 4 --vocab 16384 --device cuda

  paceline models distill ./my-model --work-dir work       goes on where a killed run stopped

  paceline models distill ./my-model --work-dir more --start-from work --tokens 1000000 --vocab 16384
"""
_BOOST_EXAMPLES = """
Examples:

  paceline models boost smollm2 --work-dir work --num-drafts 2 --steps 600
"""
_EXPORT_EXAMPLES = """
Examples:

  paceline models export ./small-model --target ./large-model --out bundle

  paceline models export work/draft --target smollm2 --bits 4
"""
_PACK_EXAMPLES = """
Examples:

  paceline models pack smollm2 --work-dir work --out models/weights/smollm2

  paceline models pack smollm2 --work-dir work --out try --step 0.7 --from-checkpoint
"""

Target = Annotated[
    str, typer.Argument(help="a target's name, or a Hugging Face model folder", envvar="PACELINE_MODELS_TARGET")
]
WorkDir = Annotated[
    Path,
    typer.Option(
        help="where text and checkpoints are kept; a killed run goes on from it", envvar="PACELINE_MODELS_WORK_DIR"
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="the bundle's folder [default: the cache, under the target's name]", envvar="PACELINE_MODELS_OUT"
    ),
]


def _known_bits(bits: int) -> int:
    if bits not in (32, 8, 4):
        raise UsageError(f"expected --bits 32, 8 or 4, got {bits}")
    return bits


Bits = Annotated[
    int,
    typer.Option(callback=_known_bits, help="weights of the exported graph: 32, 8 or 4", envvar="PACELINE_MODELS_BITS"),
]
MinAgreement = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="refuse a quantised graph below this agreement with fp32",
        envvar="PACELINE_MODELS_MIN_AGREEMENT",
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="optimiser steps", envvar="PACELINE_MODELS_STEPS")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 lets torch choose", envvar="PACELINE_MODELS_THREADS")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda", envvar="PACELINE_MODELS_DEVICE")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command(epilog=_DISTILL_EXAMPLES)(distill)
    app.command(epilog=_BOOST_EXAMPLES)(boost)
    app.command(epilog=_EXPORT_EXAMPLES)(export)
    app.command(epilog=_PACK_EXAMPLES)(pack)


def distill(
    target: Target,
    work_dir: WorkDir,
    out: Out = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="tokens of its own text that the target writes", envvar="PACELINE_MODELS_TOKENS")
    ] = 500_000,
    layers: Annotated[
        str,
        typer.Option(help="number of layers, or their ids: 6, or 0,1,2,27,28,29", envvar="PACELINE_MODELS_LAYERS"),
    ] = "6",
    vocab: Annotated[
        int, typer.Option(min=16, help="size of the output vocabulary", envvar="PACELINE_MODELS_VOCAB")
    ] = 8192,
    steps: Steps = 1200,
    batch_rows: Annotated[int, typer.Option(min=1, help="rows a step", envvar="PACELINE_MODELS_BATCH_ROWS")] = 4,
    row_len: Annotated[int, typer.Option(min=32, help="tokens a row", envvar="PACELINE_MODELS_ROW_LEN")] = 512,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="peak of the schedule", envvar="PACELINE_MODELS_LEARNING_RATE")
    ] = 8e-4,
    rows: Annotated[
        int, typer.Option(min=1, help="texts that the target writes at once", envvar="PACELINE_MODELS_ROWS")
    ] = 192,
    slots: Annotated[int, typer.Option(min=16, help="longest text, in tokens", envvar="PACELINE_MODELS_SLOTS")] = 384,
    start: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            help="work folder of a finished run whose draft is trained on, with more text or a larger vocabulary",
            envvar="PACELINE_MODELS_START_FROM",
        ),
    ] = None,
    bits: Bits = 8,
    min_agreement: MinAgreement = 0.85,
    seed: Annotated[int, typer.Option(min=0, help="of text, order and training", envvar="PACELINE_MODELS_SEED")] = 0,
    threads: Threads = 0,
    device: Device = "auto",
) -> None:
    """Make a draft from a target alone: it writes its own text, the draft learns from it, and is exported."""
    from paceline.models.conversation import CorpusSettings
    from paceline.models.distill import DistillSettings
    from paceline.models.making import ExportWish, distill_with_bars, write_bundle
    from paceline.models.pipeline import PipelineSettings, pick_device

    _set_threads(threads)
    folder = find_target(target)
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
            micro_rows=min(4, batch_rows),
            row_len=row_len,
            learning_rate=learning_rate,
        ),
        start=start,
    )
    result = distill_with_bars(folder, work_dir, settings, pick_device(device))
    write_bundle({"ssm-0": result}, target, folder, out, ExportWish(bits, min_agreement))


def boost(
    target: Target,
    work_dir: WorkDir,
    out: Out = None,
    num_drafts: Annotated[
        int, typer.Option(min=2, max=8, help="drafts in the bundle", envvar="PACELINE_MODELS_NUM_DRAFTS")
    ] = 2,
    keep: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="weight of positions that earlier drafts get right",
            envvar="PACELINE_MODELS_BOOST_KEEP",
        ),
    ] = 0.1,
    top: Annotated[
        int,
        typer.Option(min=1, help="right: the target's choice is in the first TOP", envvar="PACELINE_MODELS_BOOST_TOP"),
    ] = 1,
    steps: Steps = 600,
    bits: Bits = 8,
    min_agreement: MinAgreement = 0.85,
    threads: Threads = 0,
    device: Device = "auto",
) -> None:
    """Train further drafts where the earlier ones fail (SpecInfer, section 3), on the text of a finished `distill`."""
    from paceline.models.boost import BoostSettings, run_boost
    from paceline.models.making import ExportWish, write_bundle
    from paceline.models.pipeline import pick_device

    _set_threads(threads)
    folder = find_target(target)
    settings = BoostSettings(num_drafts=num_drafts, num_steps=steps, keep=keep, top=top)
    with counted_progress() as progress:
        task = progress.add_task("training, steps", total=(num_drafts - 1) * steps)

        def on_step(done: int, loss: float) -> None:
            progress.update(task, completed=done, description=f"training, loss {loss:.3f}")

        drafts = run_boost(folder, work_dir, settings, pick_device(device), lambda stage: progress.log(stage), on_step)
    coverage = next(reversed(drafts.values())).provenance["coverage"]
    typer.echo(f"held-out positions covered by the first candidate: {', '.join(f'{value:.1%}' for value in coverage)}")
    write_bundle(drafts, target, folder, out, ExportWish(bits, min_agreement))


def export(
    model: Annotated[
        Path,
        typer.Argument(
            help="a Hugging Face model folder, or a draft that `distill` made (WORK/draft)",
            envvar="PACELINE_MODELS_EXPORT_MODEL",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="the target that it drafts for [default: itself]", envvar="PACELINE_MODELS_TARGET"),
    ] = None,
    out: Out = None,
    bits: Bits = 8,
    candidates: Annotated[
        int, typer.Option(min=1, max=1024, help="candidates a row", envvar="PACELINE_MODELS_CANDIDATES")
    ] = 128,
    context: Annotated[
        int, typer.Option(min=16, help="longest text to continue", envvar="PACELINE_MODELS_CONTEXT")
    ] = 8192,
    min_agreement: MinAgreement = 0.85,
    threads: Threads = 0,
) -> None:
    """Turn a model into a draft bundle: ONNX graph, tokenizer, manifest. Checks the graph against fp32."""
    from paceline.models.adopt import adopt_draft
    from paceline.models.making import ExportWish, write_bundle

    _set_threads(threads)
    folder = find_target(target if target is not None else str(model))
    wish = ExportWish(bits, min_agreement, candidates, context)
    write_bundle({"ssm-0": adopt_draft(model, folder)}, target or model.name, folder, out, wish)


def pack(
    target: Target,
    work_dir: WorkDir,
    out: Annotated[Path, typer.Option(help="folder for the weights", envvar="PACELINE_MODELS_PACK_OUT")],
    step: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=2.0,
            help="grid, in standard deviations: 0.5 is 3.1 bits a weight, 0.7 is 2.6",
            envvar="PACELINE_MODELS_STEP",
        ),
    ] = 0.5,
    min_agreement: MinAgreement = 0.85,
    from_checkpoint: Annotated[
        bool,
        typer.Option(
            "--from-checkpoint",
            help="the latest checkpoint of a run that goes on",
            envvar="PACELINE_MODELS_FROM_CHECKPOINT",
        ),
    ] = False,
    threads: Threads = 0,
) -> None:
    """Pack what training added to the target's layers, a few bits a weight, for a repository."""
    from paceline.models.pack import PackSettings
    from paceline.models.pack import pack as write_packed

    _set_threads(threads)
    with counted_progress() as progress:
        made = write_packed(
            find_target(target),
            work_dir,
            out,
            PackSettings(step=step, min_agreement=min_agreement),
            from_checkpoint=from_checkpoint,
            on_stage=lambda stage: progress.log(stage),
        )
    typer.echo(f"{out}: {made.num_bytes / 1e6:.2f} MB in {len(made.files)} files, {made.bits:.2f} bits a weight")
    for name, agreement in (("before", made.before), ("after", made.after)):
        typer.echo(f"  {name:<6}  loss {agreement.loss:.3f}  top-1 {agreement.top1:.3f}  top-5 {agreement.top5:.3f}")


def _set_threads(threads: int) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)


def _integer(option: str, text: str) -> int:
    if not text.strip().isdigit():
        raise UsageError(f"{option} expects whole numbers, got {text!r}")
    return int(text)

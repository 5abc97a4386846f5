"""Packs a distilled draft for a repository: the difference to its target, a probe text, a recipe, and a check of all.

What `build` reads. The rounding costs a little agreement, so it is measured before the files are kept. Not for: drafts
that are shipped whole, as bundles (`export`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.models.delta import load_delta, save_delta
from paceline.models.distill import Agreement, measure
from paceline.models.draft import Draft
from paceline.models.pipeline import held_out_texts, load_target
from paceline.models.samples import Corpus, Packer
from paceline.models.store import read_json, write_arrays
from paceline.shared.errors import ModelError

PROBE_NAME = "probe.npz"
NUM_PROBE_ROWS = 32
PROBE_ROW_LEN = 64
MAX_LOSS_ADDED = 0.05


@dataclass(frozen=True, slots=True)
class PackSettings:
    """step: grid of the difference in standard deviations of a row (0.5 is about 3.1 bits a weight, 0.7 about 2.6).

    min_agreement: what `build` demands of the quantised graph. num_candidates: that a row of it returns; where output
    is sampled, the shared noise can lift any of them to the first place. max_loss_added: nats that rounding may cost.
    """

    step: float = 0.5
    min_agreement: float = 0.85
    num_candidates: int = 128
    max_loss_added: float = MAX_LOSS_ADDED


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written, and what the rounding cost on held-out text."""

    files: tuple[Path, ...]
    num_bytes: int
    bits: float
    before: Agreement
    after: Agreement


def pack(
    target: Path,
    work: Path,
    out: Path,
    settings: PackSettings,
    *,
    from_checkpoint: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Packed:
    """Writes `out` from a work folder of `distill`; from_checkpoint: the latest checkpoint of a run that goes on.

    Raises: ModelError when the run is not finished, or the rounding costs too much.
    """
    draft, recipe = _read_run(work, from_checkpoint)
    on_stage("loading the target")
    model, _ = load_target(target, torch.device("cpu"))
    base = Draft.from_target(model, recipe["layer_ids"], draft.vocabulary.numpy())
    corpus = Corpus.load(work / "corpus")
    vocab_rows = model.get_input_embeddings().weight.shape[0]
    training = recipe["settings"]["training"]
    packer = Packer(corpus, draft.vocabulary.numpy(), vocab_rows, training["row_len"], training["user_weight"])
    on_stage("measuring the draft")
    before = measure(draft, packer)
    on_stage("packing the difference")
    recipe["export"] = {
        "bits": 8,
        "head_bits": 8,
        "num_candidates": settings.num_candidates,
        "min_agreement": settings.min_agreement,
    }
    recipe["step"] = settings.step
    files = save_delta(out, draft, base, settings.step, recipe)
    texts = held_out_texts(corpus, NUM_PROBE_ROWS, PROBE_ROW_LEN)
    if texts is not None:
        write_arrays(out / PROBE_NAME, {"texts": texts.astype("int32")})
        files.append(out / PROBE_NAME)
    on_stage("measuring what was packed")
    after = measure(load_delta(out, model), packer)
    if after.loss > before.loss + settings.max_loss_added:
        raise ModelError(
            f"packing at step {settings.step:g} costs {after.loss - before.loss:.3f} nats, "
            f"expected at most {settings.max_loss_added:g}: pack with a smaller --step"
        )
    num_bytes = sum(path.stat().st_size for path in files)
    num_weights = sum(p.numel() for p in draft.parameters()) - draft.decoder.embed_tokens.weight.numel()
    return Packed(tuple(files), num_bytes, 8 * num_bytes / num_weights, before, after)


def _read_run(work: Path, from_checkpoint: bool) -> tuple[Draft, dict[str, Any]]:
    """The trained draft and how it was made, without what only a resumed run needs."""
    if not from_checkpoint:
        if not (work / "draft" / "provenance.json").is_file():
            raise ModelError(f"{work} holds no finished draft: let `paceline models distill` end, or --from-checkpoint")
        return Draft.load(work / "draft").eval(), dict(read_json(work / "draft" / "provenance.json"))
    draft = Draft.load(work / "train" / "checkpoint").eval()
    plan = read_json(work / "plan.json")
    history = read_json(work / "train" / "history.json")
    recipe = {
        "layer_ids": plan["layer_ids"],
        "vocab_size": len(draft.vocabulary),
        "trained_tokens": history[-1]["tokens"],
        "agreement": asdict(measure_of(history[-1])),
        "history": history,
        "settings": plan,
    }
    return draft, recipe


def measure_of(entry: dict[str, Any]) -> Agreement:
    """The agreement that a line of the history recorded."""
    return Agreement(entry["loss"], entry["top1"], entry["top5"], entry["top8"], int(entry["num_positions"]))

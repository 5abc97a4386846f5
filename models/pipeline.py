"""From a target alone to a trained draft: its own text, a vocabulary, training. Resumes where a killed run stopped.

A work folder holds `plan.json`, `corpus/` (rounds of text), `vocabulary.npz`, `train/` (checkpoint, history) and at the
end `draft/`. Not for: exporting (`export`) or packing for the repository (`delta`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.models.conversation import CorpusSettings
from paceline.models.corpus import RoundWriter, write_corpus
from paceline.models.distill import Distiller, DistillSettings, measure
from paceline.models.distill import Progress as StepProgress
from paceline.models.draft import Draft, check_family, check_layers, evenly_outer_layers
from paceline.models.manifest import TOKENIZER_NAME
from paceline.models.samples import Corpus, Packer, rank_vocabulary
from paceline.models.store import read_json, sha256_file, write_arrays, write_json
from paceline.models.tokenizer_hash import target_fingerprint, tokenizer_size
from paceline.shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """One `distill` command.

    layer_ids empty: the outermost `num_layers` layers of the target. start: work folder of a finished run to go on
    from, with more text, another vocabulary or more steps; None starts from the target's own layers.
    """

    num_tokens: int = 500_000
    num_layers: int = 6
    layer_ids: tuple[int, ...] = ()
    vocab_size: int = 8192
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    training: DistillSettings = field(default_factory=DistillSettings)
    start: Path | None = None

    def plan(self, target: Path) -> dict[str, Any]:
        """What a work folder is held to: the settings, and fingerprints in place of what they name."""
        plan = {"target": target_fingerprint(target), **asdict(self)}
        del plan["start"]
        if self.start is not None:
            plan["start"] = sha256_file(self.start / "draft" / "draft.safetensors")
        return plan


@dataclass(frozen=True, slots=True)
class PipelineHooks:
    """Called as the work goes on. on_text(tokens done, tokens wanted); on_step(progress); on_stage(sentence)."""

    on_stage: Callable[[str], None] = lambda stage: None
    on_text: Callable[[int, int], None] = lambda done, of: None
    on_step: Callable[[StepProgress], None] = lambda progress: None


@dataclass(frozen=True, slots=True)
class Distilled:
    """A finished run: the draft, how it was made, and texts int64[rows, len] held out of training for checks."""

    draft: Draft
    provenance: Mapping[str, Any]
    texts: np.ndarray[Any, np.dtype[np.int64]] | None


def pick_device(wish: str) -> torch.device:
    """`auto` is the first CUDA device if there is one. Raises: ModelError for a device that torch does not have."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=wish).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot use --device {wish!r}: {error}") from None


def load_target(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """Model (float32 on CPUs, bfloat16 on GPUs) and tokenizer of a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def run_pipeline(
    target: Path, work: Path, settings: PipelineSettings, device: torch.device, hooks: PipelineHooks | None = None
) -> Distilled:
    """Does whatever of the work is not done yet. Raises: ModelError when the folder belongs to another plan."""
    hooks = hooks or PipelineHooks()
    started = time.monotonic()
    if settings.start is not None and not (settings.start / "draft" / "provenance.json").is_file():
        raise ModelError(f"{settings.start} holds no finished draft to go on from: let `paceline models distill` end")
    layer_ids = _choose_layers(target, settings)  # before the text, which may take hours
    plan = settings.plan(target)
    _hold_plan(work / "plan.json", plan)
    hooks.on_stage("loading the target")
    model, tokenizer = load_target(target, device)
    num_rounds = _write_text(model, tokenizer, work / "corpus", settings, hooks)
    corpus = Corpus.load(work / "corpus", num_rounds)
    hooks.on_stage("training the draft")
    vocab_rows = model.get_input_embeddings().weight.shape[0]
    vocabulary = rank_vocabulary(
        corpus,
        vocab_rows,
        settings.vocab_size,
        sorted(set(tokenizer.all_special_ids)),
        tokenizer_size(target / TOKENIZER_NAME),
    )
    write_arrays(work / "vocabulary.npz", {"vocabulary": vocabulary})
    draft = Draft.from_target(model, layer_ids, vocabulary)
    del model
    if settings.start is not None:
        draft.go_on_from(Draft.load(settings.start / "draft"))
    draft = draft.to(device)
    packer = Packer(corpus, vocabulary, vocab_rows, settings.training.row_len, settings.training.user_weight)
    distiller = Distiller(draft, packer, settings.training, work / "train")
    distiller.run(hooks.on_step)
    draft.cpu().eval()
    draft.save(work / "draft")
    provenance = {
        "layer_ids": list(layer_ids),
        "vocab_size": len(vocabulary),
        "target_tokens": int(corpus.offsets[-1]),
        "trained_tokens": distiller.tokens,
        "training_s": round(distiller.elapsed_s, 1),
        "session_s": round(time.monotonic() - started, 1),
        "agreement": asdict(measure(draft, packer)),
        "history": distiller.history,
        "settings": {key: value for key, value in plan.items() if key != "target"},
    }
    if settings.start is not None:
        provenance["start"] = read_json(settings.start / "draft" / "provenance.json")
    write_json(work / "draft" / "provenance.json", provenance)
    return Distilled(draft, provenance, held_out_texts(corpus))


def _choose_layers(target: Path, settings: PipelineSettings) -> tuple[int, ...]:
    """The target's layers that the draft takes. Raises: ModelError for a family or layers that cannot be."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    check_family(config)
    chosen = settings.layer_ids or evenly_outer_layers(config.num_hidden_layers, settings.num_layers)
    check_layers(config, chosen)
    return chosen


def held_out_texts(corpus: Corpus, num_rows: int = 16, row_len: int = 64) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Beginnings of documents that training never saw, int64[rows, len], or None when there are too few."""
    rows = []
    for document in corpus.documents(held_out=True):
        text = [*corpus.prefix, *corpus.tokens[corpus.span(document)].tolist()]
        if len(text) >= row_len:
            rows.append(text[-row_len:] if len(text) < 2 * row_len else text[row_len : 2 * row_len])
    return np.array(rows[:num_rows], np.int64) if len(rows) >= num_rows else None


def _write_text(model: Any, tokenizer: Any, folder: Path, settings: PipelineSettings, hooks: PipelineHooks) -> int:
    hooks.on_stage("the target writes its own text")
    writer = RoundWriter(model, tokenizer, settings.corpus)
    rows = settings.corpus.num_rows

    def on_step(before: int, done: int, of: int) -> None:
        hooks.on_text(min(before + done * rows, settings.num_tokens), settings.num_tokens)

    return sum(1 for _ in write_corpus(folder, writer, settings.num_tokens, on_step))


def _hold_plan(path: Path, plan: dict[str, Any]) -> None:
    """A work folder belongs to one plan: a resumed run must not mix settings."""
    plan = json.loads(json.dumps(plan))
    for changeable in ("num_steps", "checkpoint_s"):
        plan["training"].pop(changeable)
    if path.is_file() and (held := read_json(path)) != plan:
        changed = sorted(key for key in plan.keys() | held.keys() if plan.get(key) != held.get(key))
        raise ModelError(f"{path.parent} was begun with other settings ({', '.join(changed)}): use another --work-dir")
    write_json(path, plan)

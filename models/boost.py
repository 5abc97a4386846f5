"""Adaptive boosting (SpecInfer, Miao et al. 2024, section 3): draft j learns where drafts 1..j-1 fail.

The samples here are single positions of the corpus that `distill` left: a position is covered when the target's
likeliest token is among the first `top` candidates of an earlier draft. Covered positions keep a small weight, so that
a later draft stays a language model; the rest counts in full. Every later draft starts from the first one. Not for:
writing text, or the first draft (`pipeline`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.distill import Distiller, DistillSettings, Progress, measure
from paceline.models.draft import Draft
from paceline.models.manifest import TOKENIZER_NAME
from paceline.models.pipeline import Distilled, held_out_texts
from paceline.models.samples import Corpus, Packer
from paceline.models.store import read_json, write_json
from paceline.models.tokenizer_hash import target_fingerprint, tokenizer_size
from paceline.shared.errors import ModelError

Covered = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BoostSettings:
    """num_drafts counts the first one. keep: weight of covered positions. top: candidates that count as cover."""

    num_drafts: int = 2
    num_steps: int = 600
    keep: float = 0.1
    top: int = 1


@torch.inference_mode()
def find_covered(draft: Draft, packer: Packer, top: int, documents: Sequence[int] | None = None) -> Covered:
    """bool[tokens of the corpus]: where the target's likeliest token is among the draft's first `top` candidates.

    documents: look at these only (False elsewhere), None for all.
    """
    draft.eval()
    device = draft.head.weight.device
    covered = np.zeros(len(packer.corpus.tokens), np.bool_)
    rows = packer.rows(range(packer.corpus.num_documents) if documents is None else documents)
    for at in range(0, len(rows), 4):
        batch = packer.batch(rows[at : at + 4]).to(device)
        logits = draft(batch.ids, batch.positions, batch.mask).flatten(0, 1)[batch.at]
        best = torch.where(batch.masses[:, 0] > 0, batch.labels[:, 0], -1)
        hits = (logits.topk(min(top, logits.shape[1])).indices == best[:, None]).any(1)
        covered[batch.sources.cpu().numpy()] = hits.cpu().numpy()
    return covered


def emphasis_of(covered: Covered, corpus: Corpus, keep: float) -> NDArray[np.float32]:
    """float32[tokens]: `keep` where earlier drafts are right, 1 elsewhere and in held-out documents."""
    weights = np.where(covered, np.float32(keep), np.float32(1.0))
    for document in corpus.documents(held_out=True):
        weights[corpus.span(document)] = 1.0
    return weights


def share_covered(covered: Covered, packer: Packer) -> float:
    """Share of the held-out documents' answer positions that are covered."""
    rows = packer.rows(packer.corpus.documents(held_out=True))
    hits = []
    for at in range(0, len(rows), 4):
        batch = packer.batch(rows[at : at + 4])
        hits.append(covered[batch.sources[batch.weights == 1.0].numpy()])
    return float(np.concatenate(hits).mean())


def run_boost(
    target: Path,
    work: Path,
    settings: BoostSettings,
    device: torch.device,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_step: Callable[[int, float], None] = lambda done, loss: None,
) -> dict[str, Distilled]:
    """All drafts by name, the first one as it was. Resumes; raises ModelError without a finished `distill` in `work`.

    on_step(optimiser steps done in all, loss).
    """
    first, provenance, training = _read_finished(target, work)
    corpus = Corpus.load(work / "corpus")
    vocabulary = first.vocabulary.numpy()
    vocab_rows = max(first.decoder.embed_tokens.weight.shape[0], tokenizer_size(target / TOKENIZER_NAME))
    plain = Packer(corpus, vocabulary, vocab_rows, training.row_len, training.user_weight)
    texts = held_out_texts(corpus)
    on_stage("finding what ssm-0 gets right")
    covered = find_covered(first.to(device), plain, settings.top)
    coverage = [share_covered(covered, plain)]
    made = {"ssm-0": Distilled(first.cpu(), {**provenance, "coverage": list(coverage)}, texts)}
    for number in range(1, settings.num_drafts):
        name = f"ssm-{number}"
        on_stage(f"training {name} where the others fail")
        draft = copy.deepcopy(first).to(device)
        emphasis = emphasis_of(covered, corpus, settings.keep)
        packer = Packer(corpus, vocabulary, vocab_rows, training.row_len, training.user_weight, emphasis)
        schedule = replace(training, num_steps=settings.num_steps, seed=training.seed + number)
        distiller = Distiller(draft, packer, schedule, work / f"boost-{number}")
        distiller.run(_counting(on_step, (number - 1) * settings.num_steps))
        is_last = number + 1 == settings.num_drafts  # nobody learns from its failures, so the report's texts do
        covered |= find_covered(draft, plain, settings.top, corpus.documents(held_out=True) if is_last else None)
        coverage.append(share_covered(covered, plain))
        told = {
            **{key: provenance[key] for key in ("layer_ids", "vocab_size") if key in provenance},
            "boost": asdict(settings),
            "coverage": list(coverage),
            "trained_tokens": distiller.tokens,
            "training_s": round(distiller.elapsed_s, 1),
            "agreement": asdict(measure(draft, plain)),
        }
        draft.cpu().eval()
        draft.save(work / f"boost-{number}" / "draft")
        write_json(work / f"boost-{number}" / "draft" / "provenance.json", told)
        made[name] = Distilled(draft, told, texts)
    return made


def _counting(on_step: Callable[[int, float], None], before: int) -> Callable[[Progress], None]:
    def report(now: Progress) -> None:
        on_step(before + now.step, now.loss)

    return report


def _read_finished(target: Path, work: Path) -> tuple[Draft, Mapping[str, Any], DistillSettings]:
    told = work / "draft" / "provenance.json"
    if not told.is_file():
        raise ModelError(f"{work} holds no finished draft: run `paceline models distill` there first")
    plan = read_json(work / "plan.json")
    if plan["target"] != target_fingerprint(target):
        raise ModelError(f"{work} was made for another target than {target.name!r}: use its own --work-dir")
    provenance = read_json(told)
    training: dict[str, Any] = provenance["settings"]["training"]
    betas: Sequence[float] = training["betas"]
    return (
        Draft.load(work / "draft").eval(),
        provenance,
        DistillSettings(**{**training, "betas": (betas[0], betas[1])}),
    )

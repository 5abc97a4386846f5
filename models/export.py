"""Exports a draft to a bundle: ONNX graph, tokenizer, chat template, manifest. Checks the result before it is kept.

The graph (one file per drafter, batch 1; L layers, Hkv kv heads, head dim D, K candidates):

    ids           int64[1, n]            the new nodes, in the target's numbering
    positions     int64[1, n]            absolute position of each node
    mask          float32[1, 1, n, S+n]  additive, 0 or -1e9; columns 0..S-1: past slots, then new nodes
    rows          int64[m]               which of the new nodes want candidates
    width         int64[1]               optional: how many candidates a row, at most and by default K
    past_key_i    float32[Hkv, S, D]     the caller's buffer of layer i, whole; the mask hides unused slots
    past_value_i  float32[Hkv, S, D]
    extra_ids     int64[x]               tokens of the target to be scored as well, in or outside the draft's vocabulary
    -> top_ids int32[m, K], top_logprobs float32[m, K]   best first, log-softmax over the draft's vocabulary
    -> new_kv  float32[L, 2, Hkv, n, D]                  keys and values of the new nodes alone
    -> extra_logprobs float32[m, x]                      estimates, comparable with top_logprobs

extra_ids and extra_logprobs are there if the head can be continued to other tokens (`bridge`).

The past is never copied or concatenated in the graph; the caller writes `new_kv` into slots of its choice. Unused slots
must hold finite numbers. Not for: training (`distill`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.bridge import fit_bridge
from paceline.models.draft import Draft
from paceline.models.graph import GraphBuilder
from paceline.models.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    DrafterEntry,
    Manifest,
    TargetEntry,
    describe_files,
    save_manifest,
)
from paceline.models.runtime import GraphRunner
from paceline.models.smooth import measure_peaks, smooth
from paceline.models.store import write_bytes
from paceline.models.tokenizer_hash import target_fingerprint, tokenizer_hash, tokenizer_size
from paceline.shared.errors import ModelError

CHECK_ROW_LEN = 64
COPIED_FILES = (TOKENIZER_NAME, "tokenizer_config.json", CHAT_TEMPLATE_NAME)


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """bits of the layers and of the head: 32, 8 (per-channel int8) or 4 (blocks of int4).

    smoothing: strength of outlier migration before quantising, 0 for none.
    """

    bits: int = 8
    head_bits: int = 8
    num_candidates: int = 128
    context_len: int = 8192
    smoothing: float = 0.5
    min_agreement: float = 0.85
    num_check_tokens: int = 512


@dataclass(frozen=True, slots=True)
class QuantisationReport:
    """The exported graph against torch in fp32.

    agreement: share of equal argmax; logprob_error: mean absolute error of the best candidate's log-probability.
    """

    agreement: float
    logprob_error: float
    file_bytes: int
    float_bytes: int
    num_tokens: int


@torch.inference_mode()
def sample_text(draft: Draft, num_rows: int, row_len: int, seed: int) -> NDArray[np.int64]:
    """Text by the draft itself, int64[rows, len], for checks where no text of the target is at hand."""
    generator = torch.Generator().manual_seed(seed)
    ids = draft.vocabulary[torch.randint(len(draft.vocabulary), (num_rows, 1), generator=generator)]
    for _ in range(row_len - 1):
        probs = torch.softmax(draft(ids)[:, -1], dim=-1)
        ids = torch.cat([ids, draft.vocabulary[torch.multinomial(probs, 1, generator=generator)]], dim=1)
    return ids.numpy()


@torch.inference_mode()
def compare(draft: Draft, model: bytes, texts: NDArray[np.int64], float_bytes: int) -> QuantisationReport:
    """Runs int64[rows, len] texts through the graph (half as a prompt, half token by token) and through torch."""
    draft.eval()
    equal, errors = [], []
    runner = GraphRunner(model, capacity=texts.shape[1])
    for text in texts:
        expected = torch.log_softmax(draft(torch.from_numpy(text)[None])[0], dim=-1).max(dim=-1)
        runner.crop(0)
        half = len(text) // 2
        parts = [runner.append(text[:half]), *(runner.append(text[at : at + 1]) for at in range(half, len(text)))]
        best = np.concatenate([part.ids[:, 0] for part in parts])
        logprobs = np.concatenate([part.logprobs[:, 0] for part in parts])
        equal.append(best == draft.vocabulary[expected.indices].numpy())
        errors.append(np.abs(logprobs - expected.values.numpy()))
    return QuantisationReport(
        agreement=float(np.mean(equal)),
        logprob_error=float(np.mean(errors)),
        file_bytes=len(model),
        float_bytes=float_bytes,
        num_tokens=int(texts.size),
    )


def build_graph(
    draft: Draft, settings: ExportSettings, texts: NDArray[np.int64] | None = None
) -> tuple[bytes, QuantisationReport]:
    """The ONNX file's bytes and its check against torch.

    Raises: ModelError when the quantised graph agrees with fp32 on less than `min_agreement` of the argmaxes.
    """
    if texts is None:
        texts = sample_text(draft, max(2, 2 * settings.num_check_tokens // CHECK_ROW_LEN), CHECK_ROW_LEN, seed=0)
    # Outliers are measured on one half of the texts, the result is checked on the other.
    measured, texts = texts[0::2], texts[1::2]
    weights = draft.weights(settings.num_candidates)
    weights = replace(weights, bridge=fit_bridge(weights.embedding, weights.head, weights.vocabulary))
    if settings.bits != 32 and settings.smoothing:
        weights = smooth(weights, *measure_peaks(draft, measured), settings.smoothing)
    model: bytes = GraphBuilder(weights, settings.bits, settings.head_bits).build().SerializeToString()
    float_bytes = 4 * sum(parameter.numel() for parameter in draft.parameters())
    report = compare(draft, model, texts, float_bytes)
    if report.agreement < settings.min_agreement:
        raise ModelError(
            f"the {settings.bits}-bit draft agrees with fp32 on {report.agreement:.1%} of {report.num_tokens} tokens, "
            f"expected at least {settings.min_agreement:.0%}: export with more --bits"
        )
    return model, report


def export_bundle(
    drafts: Mapping[str, Draft],
    target: Path,
    folder: Path,
    *,
    name: str,
    settings: ExportSettings,
    provenance: Mapping[str, Any],
    licence: str,
    texts: NDArray[np.int64] | None = None,
) -> tuple[Manifest, dict[str, QuantisationReport]]:
    """Writes a whole bundle beside `folder` and renames it into place.

    drafts: drafter name to model; target: the target's Hugging Face folder; provenance gets what the check of each
    graph found. Raises: ModelError.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    entries, reports = [], {}
    for drafter, draft in drafts.items():
        model, report = build_graph(draft, settings, texts)
        write_bytes(part / f"{drafter}.onnx", model)
        reports[drafter] = report
        shape = draft.weights(settings.num_candidates).shape
        entries.append(
            DrafterEntry(
                name=drafter,
                file=f"{drafter}.onnx",
                num_layers=shape.num_layers,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                num_candidates=shape.num_candidates,
                vocab_size=len(draft.vocabulary),
                context_len=min(settings.context_len, draft.config.max_position_embeddings),
                bits=settings.bits,
            )
        )
    for file in COPIED_FILES:
        if (target / file).is_file():
            shutil.copyfile(target / file, part / file)
    manifest = Manifest(
        name=name,
        target=TargetEntry(name, target_fingerprint(target), tokenizer_size(target / TOKENIZER_NAME)),
        tokenizer_hash=tokenizer_hash(target / TOKENIZER_NAME),
        drafters=tuple(entries),
        files=describe_files(part, [path.name for path in part.iterdir()]),
        licence=licence,
        provenance={**provenance, "graph": {drafter: asdict(report) for drafter, report in reports.items()}},
    )
    save_manifest(part, manifest)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
    return manifest, reports

"""Builds the embedded pair: from nothing to a target folder and a draft bundle in the cache. Idempotent.

Not for: making a new draft (`distill`); this one rebuilds the shipped draft from the target and the stored difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.models.catalogue import EMBEDDED, bundle_folder, cache_dir, ensure_private, target_folder
from paceline.models.gguf_target import SMOLLM2, dequantise, fetch_gguf, is_built
from paceline.models.manifest import MANIFEST_NAME, verify_bundle
from paceline.models.store import sha256_file
from paceline.shared.errors import BundleError, ModelError

Stage = Callable[[str], None]
WEIGHTS = Path(__file__).parent / "weights"
MAKERS = ("bridge", "delta", "draft", "draft_weights", "export", "graph", "quantise", "smooth")


@dataclass(frozen=True, slots=True)
class BuiltPair:
    """Where the pair stands, and which parts this call had to make."""

    target: Path
    bundle: Path
    made: tuple[str, ...]


def build_pair(
    name: str = EMBEDDED,
    on_stage: Stage = lambda stage: None,
    on_bytes: Callable[[int], None] | None = None,
    force: bool = False,
) -> BuiltPair:
    """Builds what is missing of the embedded pair.

    on_stage: called with a sentence as each long step starts. Raises: ModelError, BundleError.
    """
    if name != EMBEDDED:
        raise ModelError(
            f"cannot build {name!r}: the only embedded pair is {EMBEDDED!r}; use `paceline models distill` for others"
        )
    ensure_private(cache_dir())
    target, bundle, made = target_folder(name), bundle_folder(name), []
    if force or not is_built(SMOLLM2, target):
        on_stage("fetching the target")
        gguf = fetch_gguf(SMOLLM2, on_bytes)
        on_stage("de-quantising the target (about 30 s, once)")
        dequantise(SMOLLM2, gguf, target)
        made.append("target")
    weights = WEIGHTS / name
    if force or "target" in made or not _is_current(bundle, weights):
        on_stage("building the draft from the target's layers")
        ensure_private(bundle.parent)
        _build_bundle(name, weights, target, bundle)
        made.append("draft")
    return BuiltPair(target, bundle, tuple(made))


def weights_hash(folder: Path) -> str:
    """sha-256 over the names and contents of the stored difference's files."""
    return _hash_files(sorted(path for path in folder.iterdir() if path.is_file()))


def makers_hash() -> str:
    """sha-256 over the code that turns a difference into a bundle: another version may build another graph."""
    return _hash_files([Path(__file__).with_name(f"{name}.py") for name in MAKERS])


def _hash_files(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _is_current(bundle: Path, weights: Path) -> bool:
    if not (bundle / MANIFEST_NAME).is_file():
        return False
    try:
        provenance = verify_bundle(bundle).provenance
    except BundleError:
        return False
    return (provenance.get("weights_hash"), provenance.get("makers_hash")) == (weights_hash(weights), makers_hash())


def _build_bundle(name: str, weights: Path, target: Path, bundle: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from paceline.models.delta import load_delta, load_recipe
    from paceline.models.export import ExportSettings, export_bundle
    from paceline.models.pack import PROBE_NAME

    logging.disable_progress_bar()
    recipe = load_recipe(weights)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    probe = weights / PROBE_NAME
    texts = None
    if probe.is_file():
        with np.load(probe, allow_pickle=False) as arrays:
            texts = arrays["texts"].astype(np.int64)
    export_bundle(
        {"ssm-0": load_delta(weights, model)},
        target,
        bundle,
        name=name,
        settings=ExportSettings(**recipe.get("export", {})),
        provenance={**recipe, "weights_hash": weights_hash(weights), "makers_hash": makers_hash()},
        licence=SMOLLM2.licence,
        texts=texts,
    )

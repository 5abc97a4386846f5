"""Stores what training added to the target's own layers, and adds it back.

A draft starts as copies of the target's layers, so only the difference is worth keeping. Differences are rounded to a
grid of `step` standard deviations per row and stored as Huffman-coded int8 codes: at step 0.5 about 3.1 bits a weight,
with a rounding noise of 14 % of a difference that is itself small. Files stay under 8 MB. Not for: what the ONNX graph
computes with (`quantise`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.draft import Draft
from paceline.models.store import read_json, write_arrays, write_json
from paceline.shared.errors import ModelError

RECIPE_NAME = "recipe.json"
FROZEN = ("decoder.embed_tokens.weight", "vocabulary")
MAX_SHARD_CODES = 16_000_000


def encode(added: NDArray[np.float32], step: float) -> dict[str, NDArray[Any]]:
    """codes of int8[N, K] as a deflate stream, uint8, and steps float16[N]; vectors (norms, biases) stay float16."""
    if added.ndim == 1:
        return {"values": added.astype(np.float16)}
    # Rows of a head that never trained are zero; the grid must not be.
    steps = np.maximum(added.std(axis=1) * step, np.abs(added).max(axis=1) / 127).astype(np.float16)
    steps = np.maximum(steps, np.float16(1e-7))
    codes = np.clip(np.rint(added / steps.astype(np.float32)[:, None]), -127, 127).astype(np.int8)
    # Codes are noise, in which matches are chance: searching for them costs deflate half a bit a code.
    packer = zlib.compressobj(level=9, strategy=zlib.Z_HUFFMAN_ONLY)
    stream = packer.compress(codes.tobytes()) + packer.flush()
    return {"codes": np.frombuffer(stream, np.uint8), "steps": steps}


def decode(parts: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The difference that `encode` stored, float32."""
    if "values" in parts:
        return parts["values"].astype(np.float32)
    codes = np.frombuffer(zlib.decompress(parts["codes"].tobytes()), np.int8)
    return codes.reshape(len(parts["steps"]), -1) * parts["steps"].astype(np.float32)[:, None]


def save_delta(folder: Path, trained: Draft, base: Draft, step: float, recipe: Mapping[str, Any]) -> list[Path]:
    """Writes `delta-N.npz` shards, the vocabulary and `recipe.json`; returns the files.

    recipe: at least `layer_ids`; it becomes the provenance of the bundle.
    """
    start = base.state_dict()
    shards: list[dict[str, NDArray[Any]]] = [
        {"vocabulary": np.diff(trained.vocabulary.numpy(), prepend=0).astype(np.int32)}
    ]
    size = 0
    for name, value in trained.state_dict().items():
        if name in FROZEN:
            continue
        if size + value.numel() > MAX_SHARD_CODES:
            shards.append({})
            size = 0
        size += value.numel()
        for part, array in encode((value - start[name]).numpy(), step).items():
            shards[-1][f"{name}:{part}"] = array
    for old in folder.glob("delta-*.npz"):
        old.unlink()
    paths = []
    for index, shard in enumerate(shards):
        paths.append(folder / f"delta-{index}.npz")
        write_arrays(paths[-1], shard, compress=False)
    write_json(folder / RECIPE_NAME, dict(recipe))
    return [*paths, folder / RECIPE_NAME]


def load_recipe(folder: Path) -> dict[str, Any]:
    """Raises: ModelError when the folder has no recipe."""
    path = folder / RECIPE_NAME
    if not path.is_file():
        raise ModelError(f"{folder} holds no {RECIPE_NAME}: the draft's weights are not part of this installation")
    recipe: dict[str, Any] = read_json(path)
    return recipe


def load_delta(folder: Path, target: Any) -> Draft:
    """The trained draft, from a loaded target and a folder that `save_delta` wrote.

    A folder without shards holds a recipe alone: its draft is the target's own layers, untrained. Raises: ModelError.
    """
    recipe = load_recipe(folder)
    arrays: dict[str, dict[str, NDArray[Any]]] = {}
    vocabulary: NDArray[np.int64] = np.arange(recipe.get("vocab_size", 0), dtype=np.int64)
    for path in sorted(folder.glob("delta-*.npz")):
        with np.load(path, allow_pickle=False) as shard:
            for key in shard.files:
                if key == "vocabulary":
                    vocabulary = np.cumsum(shard[key]).astype(np.int64)
                else:
                    name, part = key.split(":")
                    arrays.setdefault(name, {})[part] = shard[key]
    layer_ids: Sequence[int] = recipe["layer_ids"]
    draft = Draft.from_target(target, layer_ids, vocabulary)
    state = draft.state_dict()
    unknown = arrays.keys() - state.keys()
    if unknown:
        raise ModelError(f"{folder} has a difference for {min(unknown)!r}, which the target does not have")
    with torch.no_grad():
        for name, parts in arrays.items():
            state[name].add_(torch.from_numpy(decode(parts)))
    return draft

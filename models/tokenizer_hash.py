"""One hash for "the same tokenizer", and one for "the same target", from files alone.

Tokenizers are compared by what they mean (pieces, merges, added tokens), not by file bytes, and never by rows of an
embedding: padded embeddings of one tokenizer are the same tokenizer. No torch, so that clients can check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.shared.errors import ModelError

_ARCHITECTURE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_SAMPLED_BYTES = 4096


def tokenizer_hash(path: str | Path) -> str:
    """sha-256 hex over the sorted vocabulary, the merges in order, and the added tokens of a `tokenizer.json`.

    Raises: ModelError when the file is missing or is no tokenizer.
    """
    values = _read(Path(path))
    model = values.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ModelError(f"{path} is no tokenizer file, expected a 'model' with a 'vocab'")
    vocab = model["vocab"]
    # Word pieces map to ids; unigram models list (piece, score) pairs whose place is the id.
    pieces = sorted(vocab.items()) if isinstance(vocab, dict) else [list(pair) for pair in vocab]
    merges = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in model.get("merges") or []]
    added = sorted(
        (token["id"], token["content"], bool(token.get("special"))) for token in values.get("added_tokens") or []
    )
    canonical = json.dumps([pieces, merges, added], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def tokenizer_size(path: str | Path) -> int:
    """One more than the highest id of a `tokenizer.json`: the vocabulary, whatever an embedding is padded to.

    Raises: ModelError as `tokenizer_hash`.
    """
    values = _read(Path(path))
    vocab = (values.get("model") or {}).get("vocab")
    if vocab is None:
        raise ModelError(f"{path} is no tokenizer file, expected a 'model' with a 'vocab'")
    top = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    return int(max([top, *(token["id"] for token in values.get("added_tokens") or [])])) + 1


def target_fingerprint(folder: str | Path) -> str:
    """sha-256 hex over a target folder's architecture and the first 4 KiB of every tensor, by name.

    It depends neither on how tensors are spread over files nor on file metadata, and takes milliseconds.
    Raises: ModelError when the folder holds no config.json or no safetensors file.
    """
    root = Path(folder)
    config = _read(root / "config.json")
    digest = hashlib.sha256(json.dumps({key: config.get(key) for key in _ARCHITECTURE_KEYS}, sort_keys=True).encode())
    entries = sorted(entry for file in sorted(root.glob("*.safetensors")) for entry in _tensors(file))
    if not entries:
        raise ModelError(f"{root} holds no *.safetensors, expected a Hugging Face model folder")
    for name, kind, shape, head in entries:
        digest.update(f"{name}|{kind}|{shape}|".encode() + head)
    return digest.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Name, dtype, shape and first bytes of each tensor (safetensors: u64 header length, JSON header, data)."""
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if header_len > path.stat().st_size:
            raise ModelError(f"{path} is no safetensors file: its header would be longer than the file")
        header = json.loads(file.read(header_len))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            file.seek(8 + header_len + start)
            yield name, entry["dtype"], str(entry["shape"]), file.read(min(end - start, _SAMPLED_BYTES))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} should hold a JSON object, got {type(values).__name__}")
    return values

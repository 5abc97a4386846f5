"""GGUF files as ordinary model folders: de-quantised once, kept in the user cache.

Not for: the embedded target, which ``paceline models build`` makes from a pinned file.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from paceline.models.catalogue import cache_dir, ensure_private
from paceline.models.gguf_target import save_plain

_HEAD_BYTES = 1 << 20


def unpack_gguf(path: Path) -> Path:
    """The folder (config.json, safetensors, tokenizer.json) of a ``.gguf`` file, made on first use.

    Weights are kept as float32, which holds any quantised value exactly. The folder appears whole or not at all.
    Raises what ``transformers`` raises for a file or an architecture that it cannot read.
    """
    folder = cache_dir() / "targets" / f"{path.stem}-{_short_hash(path)}"
    if (folder / "config.json").is_file():
        return folder
    ensure_private(folder.parent)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    save_plain(path, part)
    part.replace(folder)
    return folder


def _short_hash(path: Path) -> str:
    """Tells files of one name apart: size and the first MiB, which holds the metadata."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return hashlib.blake2b(str(path.stat().st_size).encode() + head, digest_size=6).hexdigest()

"""Files that are whole or absent: atomic writes of JSON, arrays and raw bytes, and sha-256 of files.

Everything is written beside its final name and renamed over it, so that a killed run leaves nothing half-written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes atomically: a reader sees the old file or the new one.

    mode: permissions, less the process's mask, from the first byte on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], compress: bool = True) -> None:
    """Writes an .npz without pickled objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        (np.savez_compressed if compress else np.savez)(file, **arrays)  # type: ignore[arg-type]
    part.replace(path)


def sha256_file(path: Path) -> str:
    """Hex digest, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

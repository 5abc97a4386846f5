"""`manifest.json` of a draft bundle: what is in the folder, for which target and tokenizer, and how it was made.

Read by clients and servers alike, so it imports no torch and no onnxruntime. A manifest is not trusted: names that
leave the folder, unknown fields, wrong types and files that do not match their sha-256 are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.models.store import sha256_file, write_json
from paceline.models.tokenizer_hash import tokenizer_hash
from paceline.shared.errors import BundleError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HEX_64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the bundle."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One ONNX drafter. `context_len` is the longest text, in tokens, that the drafter may be asked to continue."""

    name: str
    file: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_candidates: int
    vocab_size: int
    context_len: int
    bits: int


@dataclass(frozen=True, slots=True)
class TargetEntry:
    """The target that the drafters imitate. `vocab_size` counts tokenizer ids, not padded embedding rows."""

    name: str
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A bundle's table of contents."""

    name: str
    target: TargetEntry
    tokenizer_hash: str
    drafters: tuple[DrafterEntry, ...]
    files: Mapping[str, FileEntry]
    licence: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Manifest:
        """Raises: BundleError naming the field that is missing, unknown or of the wrong type."""
        top = _record(values, cls, "manifest")
        if top["format"] != FORMAT_VERSION:
            raise BundleError(
                f"manifest has format {top['format']!r}, this version reads format {FORMAT_VERSION}: pull again"
            )
        if not isinstance(top["files"], dict) or not isinstance(top["drafters"], list):
            raise BundleError("manifest should have 'files' as an object and 'drafters' as a list")
        for name in top["files"]:
            if not _SAFE_NAME.fullmatch(name):
                raise BundleError(f"manifest names the file {name!r}, which is no plain file name")
        files = {name: FileEntry(**_record(entry, FileEntry, f"files.{name}")) for name, entry in top["files"].items()}
        for name, entry in files.items():
            if not _HEX_64.fullmatch(entry.sha256) or entry.bytes < 0:
                raise BundleError(f"manifest has no valid sha256 and size for {name!r}")
        drafters = tuple(DrafterEntry(**_record(entry, DrafterEntry, "drafters")) for entry in top["drafters"])
        for drafter in drafters:
            if drafter.file not in files:
                raise BundleError(f"drafter {drafter.name!r} uses {drafter.file!r}, which the manifest does not list")
        if not isinstance(top["provenance"], dict):
            raise BundleError("manifest should have 'provenance' as an object")
        target = TargetEntry(**_record(top["target"], TargetEntry, "target"))
        return cls(**{**top, "target": target, "files": files, "drafters": drafters})

    def check(self, *, model: str, tokenizer: str, fingerprint: str | None = None) -> None:
        """Refuses a bundle made for another tokenizer or target than the server's `model`.

        Raises: BundleError with both names.
        """
        if self.tokenizer_hash != tokenizer:
            raise BundleError(
                f"draft {self.name!r} was made for {self.target.name!r} and does not share its tokenizer with {model!r}"
            )
        if fingerprint is not None and self.target.fingerprint != fingerprint:
            raise BundleError(
                f"draft {self.name!r} was made for {self.target.name!r} with other weights than {model!r} has"
            )


def load_manifest(folder: str | Path) -> Manifest:
    """Reads and checks the manifest alone. Raises: BundleError."""
    path = Path(folder) / MANIFEST_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path.parent} is no draft bundle: it has no {MANIFEST_NAME}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None
    return Manifest.from_json(values)


def verify_bundle(folder: str | Path) -> Manifest:
    """Reads the manifest and checks every file's size and sha-256, and the tokenizer's hash. Raises: BundleError."""
    root, manifest = Path(folder), load_manifest(folder)
    check_files(root, manifest, reads=True)
    if TOKENIZER_NAME in manifest.files and tokenizer_hash(root / TOKENIZER_NAME) != manifest.tokenizer_hash:
        raise BundleError(f"{root / TOKENIZER_NAME} is not the tokenizer that {MANIFEST_NAME} names")
    return manifest


def check_files(folder: Path, manifest: Manifest, *, reads: bool) -> None:
    """Whether all files are there and whole. reads: by sha-256 too, not only by size. Raises: BundleError."""
    for name, entry in manifest.files.items():
        path = folder / name
        is_there = path.is_file() and path.stat().st_size == entry.bytes
        if not is_there or (reads and sha256_file(path) != entry.sha256):
            raise BundleError(
                f"{path} is missing or differs from what {MANIFEST_NAME} says: build or pull the draft again"
            )


def describe_files(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Entries for files that stand in `folder`."""
    return {name: FileEntry(sha256_file(folder / name), (folder / name).stat().st_size) for name in sorted(names)}


def save_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST_NAME, manifest.to_json())


def _record(values: Any, cls: type, where: str) -> dict[str, Any]:
    """A JSON object with exactly the fields of a dataclass, each of its simple type."""
    if not isinstance(values, dict):
        raise BundleError(f"manifest should have an object at {where!r}, got {type(values).__name__}")
    names = {item.name for item in fields(cls)}
    for name in names ^ set(values):
        raise BundleError(f"manifest has {'no' if name in names else 'the unknown'} field {name!r} at {where!r}")
    for item in fields(cls):
        expected = {"str": str, "int": int}.get(str(item.type))
        value = values[item.name]
        if expected is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            raise BundleError(f"manifest should have {item.type} at {where}.{item.name}, got {value!r}")
    return dict(values)

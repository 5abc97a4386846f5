"""Names to folders: which targets and draft bundles this machine has, and where they belong.

Torch-free. Not for: making them (`build`, `export`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.models.manifest import MANIFEST_NAME
from paceline.shared.errors import ModelError

EMBEDDED = "smollm2"
CACHE_VARIABLE = "PACELINE_CACHE_DIR"


def cache_dir() -> Path:
    """The user's cache folder of Paceline: PACELINE_CACHE_DIR, else XDG_CACHE_HOME, else what the platform uses."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "paceline"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "paceline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))) / "paceline" / "Cache"
    return Path.home() / ".cache" / "paceline"


def ensure_private(folder: Path) -> Path:
    """Makes a folder that only its owner can read, and returns it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if sys.platform != "win32":
        folder.chmod(0o700)
    return folder


def target_folder(name: str) -> Path:
    """Where the target called `name` is kept, whether it is there or not."""
    return cache_dir() / "targets" / name


def bundle_folder(name: str) -> Path:
    """Where the draft bundle called `name` is kept, whether it is there or not."""
    return cache_dir() / "drafts" / name


def find_target(name_or_path: str) -> Path:
    """The folder of a built target, or of any Hugging Face model given by path.

    Raises: ModelError that says what to run.
    """
    if name_or_path == EMBEDDED:
        return _built(target_folder(name_or_path), "config.json", f"target {name_or_path!r}", name_or_path)
    return _given(name_or_path, "config.json", "target", target_folder(name_or_path))


def find_bundle(name_or_path: str) -> Path:
    """The folder of a built or pulled draft bundle, or one given by path.

    Raises: ModelError that says what to run.
    """
    if name_or_path == EMBEDDED:
        return _built(bundle_folder(name_or_path), MANIFEST_NAME, f"the draft for {name_or_path!r}", name_or_path)
    return _given(name_or_path, MANIFEST_NAME, "draft bundle", bundle_folder(name_or_path))


def list_targets() -> list[str]:
    return _names(cache_dir() / "targets", "config.json")


def list_bundles() -> list[str]:
    return _names(cache_dir() / "drafts", MANIFEST_NAME)


def _names(folder: Path, marker: str) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{marker}"))


def _built(folder: Path, marker: str, what: str, name: str) -> Path:
    if not (folder / marker).is_file():
        raise ModelError(f"{what} is not built yet: run `paceline models build {name}`")
    return folder


def _given(name_or_path: str, marker: str, what: str, cached: Path) -> Path:
    path = Path(name_or_path).expanduser()
    if (path / marker).is_file():
        return path
    if path.name == name_or_path and (cached / marker).is_file():
        return cached
    known = ", ".join(sorted({EMBEDDED, *(list_targets() if marker == "config.json" else list_bundles())}))
    raise ModelError(f"unknown {what} {name_or_path!r}: expected a folder with {marker}, or one of {known}")

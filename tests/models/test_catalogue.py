"""Names, paths and the advice when something is missing."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from paceline.models.catalogue import (
    CACHE_VARIABLE,
    bundle_folder,
    cache_dir,
    ensure_private,
    find_bundle,
    find_target,
    list_bundles,
    list_targets,
    target_folder,
)
from paceline.shared.errors import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "paceline"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_cache_is_private(cache: Path) -> None:
    cache.mkdir(mode=0o755)
    assert stat.S_IMODE(ensure_private(cache).stat().st_mode) == 0o700


def test_missing_pair_says_what_to_run() -> None:
    for find in (find_target, find_bundle):
        with pytest.raises(ModelError, match="run `paceline models build smollm2`"):
            find("smollm2")


def test_built_pair_is_found() -> None:
    for folder, marker in ((target_folder("smollm2"), "config.json"), (bundle_folder("smollm2"), "manifest.json")):
        folder.mkdir(parents=True)
        (folder / marker).write_text("{}")
    assert find_target("smollm2") == target_folder("smollm2")
    assert find_bundle("smollm2") == bundle_folder("smollm2")
    assert list_targets() == ["smollm2"] and list_bundles() == ["smollm2"]


def test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_target(str(tmp_path)) == tmp_path


def test_pulled_bundle_is_found_by_name() -> None:
    bundle_folder("mine").mkdir(parents=True)
    (bundle_folder("mine") / "manifest.json").write_text("{}")
    assert find_bundle("mine") == bundle_folder("mine")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'smollm3'.*smollm2"):
        find_target("smollm3")
    with pytest.raises(ModelError, match="unknown draft bundle"):
        find_bundle("../drafts")

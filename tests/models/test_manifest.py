"""Bundles: what is accepted, and that everything else is refused with the field's name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.models.manifest import (
    MANIFEST_NAME,
    DrafterEntry,
    Manifest,
    TargetEntry,
    describe_files,
    load_manifest,
    save_manifest,
    verify_bundle,
)
from paceline.models.store import write_bytes
from paceline.shared.errors import BundleError


def make_bundle(folder: Path) -> Manifest:
    (folder / "ssm-0.onnx").write_bytes(b"graph")
    manifest = Manifest(
        name="toy",
        target=TargetEntry("toy", "f" * 64, 60),
        tokenizer_hash="a" * 64,
        drafters=(DrafterEntry("ssm-0", "ssm-0.onnx", 2, 1, 16, 8, 40, 128, 8),),
        files=describe_files(folder, ["ssm-0.onnx"]),
        licence="Apache-2.0",
        provenance={"seed": 3, "losses": [2.5, 1.0]},
    )
    save_manifest(folder, manifest)
    return manifest


def test_manifest_survives_the_file(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path)
    assert load_manifest(tmp_path) == manifest
    assert verify_bundle(tmp_path) == manifest


def test_changed_file_is_refused(tmp_path: Path) -> None:
    make_bundle(tmp_path)
    (tmp_path / "ssm-0.onnx").write_bytes(b"grapf")
    with pytest.raises(BundleError, match=r"ssm-0\.onnx"):
        verify_bundle(tmp_path)


def test_missing_folder_and_broken_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no draft bundle"):
        load_manifest(tmp_path / "nowhere")
    (tmp_path / MANIFEST_NAME).write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.onnx", ".hidden", "", "a\\b"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    values = json.loads(json.dumps(make_bundle(tmp_path).to_json()))
    values["files"][name] = values["files"]["ssm-0.onnx"]
    with pytest.raises(BundleError, match="no plain file name"):
        Manifest.from_json(values)


def test_newer_format_asks_to_pull_again(tmp_path: Path) -> None:
    values = make_bundle(tmp_path).to_json() | {"format": 99, "drafters": []}
    with pytest.raises(BundleError, match="format 99"):
        Manifest.from_json(values)


@pytest.mark.parametrize("where", [(), ("target",), ("drafters", 0), ("files", "ssm-0.onnx")])
def test_missing_and_unknown_fields_are_named(tmp_path: Path, where: tuple) -> None:
    values = json.loads(json.dumps(make_bundle(tmp_path).to_json()))
    for change in ("missing", "unknown", "type"):
        broken = copy.deepcopy(values)
        record = broken
        for step in where:
            record = record[step]
        field = next(iter(record))
        if change == "missing":
            del record[field]
        elif change == "unknown":
            field, record["surprise"] = "surprise", 1
        else:
            record[field] = [7]
        with pytest.raises(BundleError, match="surprise" if change == "unknown" else field):
            Manifest.from_json(broken)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    JSON, st.sampled_from(["format", "name", "target", "tokenizer_hash", "drafters", "files", "licence", "provenance"])
)
def test_any_value_anywhere_is_a_manifest_or_a_typed_error(value, field) -> None:
    values = {
        "format": 1,
        "name": "toy",
        "target": {"name": "toy", "fingerprint": "f" * 64, "vocab_size": 60},
        "tokenizer_hash": "a" * 64,
        "drafters": [],
        "files": {},
        "licence": "MIT",
        "provenance": {},
    }
    try:
        manifest = Manifest.from_json(values | {field: value})
    except BundleError:
        return
    assert isinstance(manifest, Manifest)


def test_other_tokenizer_or_target_is_refused_with_both_names(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path)
    manifest.check(model="big", tokenizer="a" * 64)
    with pytest.raises(BundleError, match=r"'toy'.*tokenizer.*'big'"):
        manifest.check(model="big", tokenizer="b" * 64)
    with pytest.raises(BundleError, match=r"'toy'.*weights.*'big'"):
        manifest.check(model="big", tokenizer="a" * 64, fingerprint="0" * 64)


def test_file_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_bytes(tmp_path / "taken", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]

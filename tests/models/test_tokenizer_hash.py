"""Same tokenizer, same hash: padding, file layout and order do not matter; meaning does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.models.tiny import tiny_model
from paceline.models.tokenizer_hash import target_fingerprint, tokenizer_hash
from paceline.shared.errors import ModelError


def write(path: Path, vocab: object, merges: list, added: list) -> Path:
    path.write_text(json.dumps({"model": {"vocab": vocab, "merges": merges}, "added_tokens": added}))
    return path


def test_order_and_spelling_of_merges_do_not_matter(tmp_path: Path) -> None:
    token = {"id": 3, "content": "<s>", "special": True}
    one = write(tmp_path / "one", {"a": 0, "b": 1, "ab": 2}, ["a b"], [token])
    two = write(tmp_path / "two", {"ab": 2, "b": 1, "a": 0}, [["a", "b"]], [token | {"lstrip": True}])
    assert tokenizer_hash(one) == tokenizer_hash(two)


@pytest.mark.parametrize(
    ("vocab", "merges", "added"),
    [
        ({"a": 1, "b": 0, "ab": 2}, ["a b"], []),
        ({"a": 0, "b": 1, "ab": 2}, [], []),
        ({"a": 0, "b": 1, "ab": 2}, ["a b"], [{"id": 3, "content": "<s>", "special": True}]),
        ([["a", -1.0], ["b", -2.0]], [], []),
    ],
)
def test_meaning_changes_the_hash(tmp_path: Path, vocab: object, merges: list, added: list) -> None:
    base = write(tmp_path / "base", {"a": 0, "b": 1, "ab": 2}, ["a b"], [])
    assert tokenizer_hash(write(tmp_path / "other", vocab, merges, added)) != tokenizer_hash(base)


def test_special_flag_changes_the_hash(tmp_path: Path) -> None:
    plain, special = ({"id": 3, "content": "<s>", "special": flag} for flag in (False, True))
    one, two = (write(tmp_path / str(token["special"]), {"a": 0}, [], [token]) for token in (plain, special))
    assert tokenizer_hash(one) != tokenizer_hash(two)


def test_padded_embeddings_are_the_same_tokenizer(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_target("llama")
    padded = shutil.copytree(folder, tmp_path / "padded")
    tiny_model("llama", vocab_size=320).save_pretrained(padded)
    assert tokenizer_hash(padded / "tokenizer.json") == tokenizer_hash(folder / "tokenizer.json")


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', "\x00"])
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError):
        tokenizer_hash(tmp_path / "tokenizer.json")


def test_fingerprint_ignores_files_but_not_weights(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_target("llama")
    base = target_fingerprint(folder)
    split = shutil.copytree(folder, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    (split / "model.safetensors").unlink()
    half = len(tensors) // 2
    save_file(dict(list(tensors.items())[:half]), split / "one.safetensors", {"format": "pt"})
    save_file(dict(list(tensors.items())[half:]), split / "two.safetensors")
    assert target_fingerprint(split) == base
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + torch.tensor(1.0)}, split / "one.safetensors")
    (split / "two.safetensors").unlink()
    assert target_fingerprint(split) != base


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        target_fingerprint(tmp_path)

"""A target of another family, from nothing to a drafted answer: distill, export, serve, complete. Tiny and random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.models.manifest import load_manifest
from paceline.models.tiny import save_tiny_target

OPTIONS = "--tokens 800 --layers 2 --vocab 200 --steps 6 --rows 8 --slots 100 --row-len 128 --threads 1 --device cpu"
PROMPT = "Paceline rides"


def greedy(folder: Path, prompt: str, num_tokens: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_new_target_is_distilled_exported_served_and_completed(
    family: str, tmp_path: Path, paceline: Callable[..., Any], new_server: Callable[..., Any]
) -> None:
    target, work, bundle = save_tiny_target(tmp_path / family, family), tmp_path / "work", tmp_path / "bundle"
    cache = {"PACELINE_CACHE_DIR": str(tmp_path / "cache")}
    made = paceline(
        "models", "distill", str(target), "--work-dir", str(work), "--out", str(tmp_path / "first"), *OPTIONS.split()
    )
    assert made.returncode == 0, made.stderr
    options = ("--target", str(target), "--out", str(bundle), "--bits", "8", "--min-agreement", "0.5")
    exported = paceline("models", "export", str(work / "draft"), *options)
    assert exported.returncode == 0, exported.stderr
    server = new_server("--model", str(target), "--draft", str(bundle), "--dtype", "float32")
    command = ("complete", PROMPT, "--server", server.url, "--max-tokens", "24", "--temperature", "0", "--json")
    answer = paceline(*command, **cache)
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["token_ids"] == greedy(target, PROMPT, 24)
    assert told["stats"]["drafted"] > 0
    (pulled,) = (tmp_path / "cache" / "drafts").iterdir()
    assert load_manifest(pulled).tokenizer_hash == load_manifest(bundle).tokenizer_hash

"""The commands end to end on a tiny Qwen3: distil, export, replay; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.draft import Draft
from paceline.models.evaluate import TreeShape, accepted_len, replay
from paceline.models.export import ExportSettings, build_graph, export_bundle
from paceline.models.manifest import verify_bundle
from paceline.models.runtime import GraphRunner
from paceline.models.smooth import measure_peaks, smooth
from paceline.models.tiny import VOCAB_SIZE, tiny_model
from paceline.models.tokenizer_hash import target_fingerprint, tokenizer_hash
from paceline.shared.cli import main
from paceline.shared.errors import ModelError

OPTIONS = "--tokens 800 --layers 2 --vocab 128 --steps 6 --rows 8 --slots 100 --row-len 128 --threads 1 --device cpu"


def test_tiny_qwen3_is_distilled_and_exported(
    make_target: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target("qwen3")
    command = [
        "models",
        "distill",
        str(target),
        "--work-dir",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "bundle"),
    ]
    assert main([*command, *OPTIONS.split()]) == 0
    manifest = verify_bundle(tmp_path / "bundle")
    assert manifest.tokenizer_hash == tokenizer_hash(target / "tokenizer.json")
    assert manifest.target.fingerprint == target_fingerprint(target)
    assert manifest.target.vocab_size == VOCAB_SIZE
    assert manifest.drafters[0].vocab_size == 128
    assert manifest.provenance["ssm-0"]["trained_tokens"] > 0
    assert manifest.provenance["graph"]["ssm-0"]["agreement"] >= 0.85
    assert "agrees with fp32" in capsys.readouterr().out
    assert main([*command, *OPTIONS.replace("--vocab 128", "--vocab 99").split()]) == 2
    assert "vocab_size" in capsys.readouterr().err
    more = [part.replace(str(tmp_path / "work"), str(tmp_path / "more")) for part in command]
    more += ["--start-from", str(tmp_path / "work"), *OPTIONS.replace("--vocab 128", "--vocab 160").split()]
    assert main(more) == 0
    told = verify_bundle(tmp_path / "bundle").provenance["ssm-0"]
    assert told["vocab_size"] == 160 and told["start"]["vocab_size"] == 128 and told["start"]["trained_tokens"] > 0
    assert main([*more, "--start-from", str(tmp_path / "nowhere")]) == 2
    assert "no finished draft" in capsys.readouterr().err


def make_draft(seed: int = 0) -> Draft:
    return Draft.from_target(tiny_model("llama", seed), (0, 1, 2, 3), np.arange(VOCAB_SIZE)).eval()


def test_export_below_the_threshold_is_refused(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    settings = ExportSettings(bits=4, min_agreement=1.01)
    with pytest.raises(ModelError, match=r"4-bit draft agrees with fp32 on [0-9.]+% of 512 tokens"):
        export_bundle(
            {"ssm-0": make_draft()},
            make_target("llama"),
            tmp_path / "bundle",
            name="toy",
            settings=settings,
            provenance={},
            licence="MIT",
        )
    assert not (tmp_path / "bundle").exists()


def test_int8_file_is_a_third_of_fp32() -> None:
    torch.manual_seed(0)
    draft = Draft.from_target(
        tiny_model("llama", hidden_size=256, intermediate_size=512), (0, 1), np.arange(VOCAB_SIZE)
    )
    model, report = build_graph(draft.eval(), ExportSettings(num_check_tokens=64, min_agreement=0.5))
    assert len(model) == report.file_bytes < 0.35 * report.float_bytes
    assert report.num_tokens == 64


def test_smoothing_changes_nothing_in_floating_point() -> None:
    from paceline.models.graph import GraphBuilder

    draft = make_draft()
    texts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 24))
    weights = draft.weights()
    smoothed = smooth(weights, *measure_peaks(draft, texts), 0.5)
    one, two = (GraphRunner(GraphBuilder(w, 32, 32).build().SerializeToString(), 32) for w in (weights, smoothed))
    first, second = one.append(texts[0]), two.append(texts[0])
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-3)
    assert np.abs(weights.layers[0].down - smoothed.layers[0].down).max() > 0


def greedy(model: object, prompt: list[int], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num):
            ids = torch.cat([ids, model(ids).logits[:, -1:, :VOCAB_SIZE].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_replay_counts_what_a_perfect_and_a_useless_draft_earn() -> None:
    from paceline.models.graph import GraphBuilder

    target = tiny_model("llama")
    texts = [(prompt, greedy(target, prompt, 21)) for prompt in ([1, 2, 3], [40, 7])]
    # A chain: the flat distributions of random weights would let a beam lose the greedy path.
    shape = TreeShape(num_nodes=6, num_levels=6, width=1, branching=1)
    perfect = GraphRunner(GraphBuilder(make_draft().weights(), 32, 32).build().SerializeToString(), 96)
    good = replay(perfect, texts, shape)
    assert good.tokens_per_step == 7 and good.top1 == 1 and good.num_tokens == 42
    words = np.setdiff1d(np.arange(VOCAB_SIZE), [token for _, answer in texts for token in answer])
    blind = Draft.from_target(target, (0,), words).eval()
    useless = replay(GraphRunner(GraphBuilder(blind.weights(), 32, 32).build().SerializeToString(), 96), texts, shape)
    assert useless.tokens_per_step == 1 and useless.top5 == 0


def test_accepted_path_is_followed_from_the_anchor() -> None:
    tokens, parents = np.array([5, 6, 7, 6]), np.array([-1, -1, 1, 0])
    assert accepted_len(tokens, parents, [6, 7, 9]) == 2
    assert accepted_len(tokens, parents, [5, 6]) == 2
    assert accepted_len(tokens, parents, [7]) == 0

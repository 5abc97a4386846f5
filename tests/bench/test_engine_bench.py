"""The engine benchmark's own decoding is ``generate``'s, and its report has the promised keys."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from paceline.bench.engine import decode_greedily, run_engine_bench
from paceline.server.loading import LoadOptions, make_target

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def tiny_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def test_packed_greedy_decoding_equals_generate() -> None:
    model = tiny_model()
    target = make_target(copy.deepcopy(model), "tiny", LoadOptions(device="cpu", kv_memory=4 << 20))
    prompts = [np.random.default_rng(seed).integers(3, 128, 3 + 5 * seed).astype(np.int32) for seed in range(4)]
    streams = decode_greedily(target, prompts, 20)
    for prompt, stream in zip(prompts, streams, strict=True):
        inputs = torch.from_numpy(prompt.astype(np.int64))[None]
        whole = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
        assert stream == whole[0, len(prompt) :].tolist()
    assert target.pool.num_used_blocks == 0


@pytest.mark.slow
def test_report_has_the_three_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "targets" / "smollm2")
    report = run_engine_bench(num_tokens=4, rounds=1, dtypes=("float32",))
    keys = ("one_stream_vs_generate", "eight_streams_vs_continuous_batching", "verify32_vs_forward")
    assert all(report[key] > 0 for key in keys)
    json.dumps(report)

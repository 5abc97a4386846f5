"""Flips: the measure itself by hand, nothing in float32, and only near ties in bfloat16."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

from paceline.bench.flips import MAX_ULP, check_flips, compare, measure_flips
from paceline.client.drafting.ngram import NGramDrafter
from paceline.server.loading import LoadOptions, make_target
from paceline.server.target import HFTarget
from paceline.shared.errors import PacelineError

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


def test_gaps_count_in_units_of_the_last_place_of_the_largest_logit() -> None:
    # At 20 bfloat16 numbers lie 0.125 apart, at 3 they lie 1/64 apart.
    rows = [[20.0, 19.875, 19.5, -1.0], [3.0, 3.0, 2.0, 1.0], [3.0, 3.0, 2.984375, 1.0], [-3.0, -4.0, -5.0, -3.0]]
    logits = torch.tensor(rows, dtype=torch.bfloat16)
    flips = compare(logits, np.array([1, 0, 2, 3], np.int32))
    assert flips.gaps.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert flips.is_flip.tolist() == [True, False, True, True]
    assert flips.num_beyond == 0
    far = compare(logits, np.array([2, 2, 3, 1], np.int32))
    assert far.gaps.tolist() == [4.0, 64.0, 128.0, 64.0]
    assert far.num_beyond == 4
    assert far.figures()["flips_per_1000"] == 1000.0
    check_flips({"figures": {"bfloat16": {"drafted": flips.figures()}}})
    with pytest.raises(
        PacelineError, match=r"within 2 ulp, got 4 tokens beyond, the largest gap 128 ulp \(server-alone\)"
    ):
        check_flips({"figures": {"bfloat16": {"drafted": flips.figures(), "server-alone": far.figures()}}})


def tiny_pair(dtype: torch.dtype) -> tuple[HFTarget, transformers.PreTrainedModel]:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().to(dtype)
    peer = copy.deepcopy(model)
    return make_target(model, "tiny", LoadOptions(device="cpu", kv_memory=4 << 20)), peer


@pytest.mark.parametrize("drafted", [True, False])
def test_nothing_flips_in_float32(drafted: bool) -> None:
    target, peer = tiny_pair(torch.float32)
    prompts = [np.random.default_rng(seed).integers(3, 128, 4 + seed).astype(np.int32) for seed in range(3)]
    flips = measure_flips(target, peer, prompts, [NGramDrafter()] if drafted else [], 40)
    assert len(flips.gaps) == 120
    assert not flips.is_flip.any()


def test_what_flips_in_bfloat16_is_a_near_tie() -> None:
    target, peer = tiny_pair(torch.bfloat16)
    prompts = [np.random.default_rng(seed).integers(3, 128, 4 + seed).astype(np.int32) for seed in range(3)]
    figures = measure_flips(target, peer, prompts, [NGramDrafter()], 60).figures()
    assert figures["tokens"] == 180
    assert figures["flips_per_1000"] <= 100
    assert figures["largest_gap_ulp"] <= 4 * MAX_ULP


def test_a_wrong_engine_is_told_apart() -> None:
    """Another model's text is beyond what rounding explains."""
    target, _ = tiny_pair(torch.bfloat16)
    torch.manual_seed(6)
    stranger = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().to(torch.bfloat16)
    prompts = [np.array([5, 6, 7], np.int32)]
    assert measure_flips(target, stranger, prompts, [], 20).num_beyond > 10

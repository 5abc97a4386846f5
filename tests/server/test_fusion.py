"""What is fused in which family, that it computes the same, and that everything unknown stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from paceline.server.attention.registry import INTERFACE_NAME, register_interface
from paceline.server.fusion import FusedAttention, FusedMLP, FusedNorm, fuse_layers
from paceline.server.linear import can_halve, can_pack
from paceline.server.loading import LoadOptions, make_target

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FUSED = {  # per family: attentions, gated layers, norms
    "LlamaConfig": (2, 2, 5),
    "Qwen2Config": (2, 2, 5),
    "Qwen3Config": (2, 2, 9),
    "MistralConfig": (2, 2, 5),
    "Gemma2Config": (2, 2, 9),
    "Gemma3TextConfig": (2, 2, 13),
    "PhiConfig": (0, 0, 0),
    "OPTConfig": (0, 0, 0),
}


def build(config: str) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES))
    for parameter in model.parameters():  # norms of one and biases of zero would hide a wrong sum
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def prepared(config: str) -> Any:
    """As ``make_target`` hands it on."""
    model = build(config)
    register_interface()
    model.set_attn_implementation(INTERFACE_NAME)
    return model


def kinds(model: nn.Module) -> tuple[int, ...]:
    modules = list(model.modules())
    return tuple(sum(type(module) is kind for module in modules) for kind in (FusedAttention, FusedMLP, FusedNorm))


@pytest.mark.parametrize("config", FUSED)
def test_families_are_fused_as_far_as_they_are_known(config: str) -> None:
    model = prepared(config)
    taken = fuse_layers(model, max_bytes=1 << 20)
    assert kinds(model) == FUSED[config]
    assert (taken > 0) == (FUSED[config][0] > 0)


def test_nothing_is_merged_without_the_memory() -> None:
    model = prepared("LlamaConfig")
    assert fuse_layers(model, max_bytes=100) == 0
    assert kinds(model) == (0, 0, 5)


def test_low_precision_keeps_its_norms_and_fuses_where_its_products_are_ours() -> None:
    model = prepared("LlamaConfig").to(torch.bfloat16)
    fuse_layers(model, max_bytes=1 << 20)
    assert kinds(model) == ((2, 2, 0) if can_halve(torch.bfloat16) else (0, 0, 0))


class OtherRMSNorm(nn.Module):
    """Called like the others, but not quite the same."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.eps = weight, 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.abs().mean(-1, keepdim=True) + self.eps) * self.weight


def test_modules_that_compute_something_else_stay() -> None:
    model = prepared("LlamaConfig")
    decoder = model.model
    decoder.norm = OtherRMSNorm(decoder.norm.weight)
    first, second = decoder.layers[0].mlp, decoder.layers[1].mlp
    first.forward = lambda rows: first.down_proj(first.gate_proj(rows) * first.act_fn(first.up_proj(rows)))
    fuse_layers(model, max_bytes=1 << 20)
    assert type(decoder.norm) is OtherRMSNorm
    assert decoder.layers[0].mlp is first
    assert type(decoder.layers[1].mlp) is FusedMLP and decoder.layers[1].mlp is not second


@pytest.mark.skipif(not can_pack(), reason="this build of torch has no MKL or no oneDNN")
def test_merged_products_are_packed_and_the_stock_ones_are_gone() -> None:
    target = make_target(build("LlamaConfig"), "tiny", LoadOptions(device="cpu", kv_memory=1 << 20))
    names = [name for name, module in target.model.named_modules() if type(module).__name__ == "PackedLinear"]
    assert sum(name.endswith(("qkv", "gate_up", "out", "down")) for name in names) == 8
    assert not [name for name, _ in target.model.named_parameters() if "q_proj" in name or "up_proj" in name]


@pytest.mark.parametrize("width", [8, 576])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_norm_is_the_textbook_one(width: int, rows: int, offset: float) -> None:
    torch.manual_seed(width)
    weight, inputs = torch.randn(width), 30 * torch.randn(1, rows, width)
    expected = nn.functional.rms_norm(inputs.double(), (width,), (weight + offset).double(), 1e-5)
    torch.testing.assert_close(FusedNorm(weight, 1e-5, offset)(inputs), expected.float(), rtol=1e-5, atol=1e-6)

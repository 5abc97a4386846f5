"""Tiny random models of the families that the target must serve, built in code, and the slow obvious way to score."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from paceline.server.loading import LoadOptions, make_target
from paceline.server.target import HFTarget
from paceline.shared.tree import TokenTree

VOCAB = 97
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_MIXED = ["sliding_attention", "full_attention"]


def _config(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(**settings)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: _config("LlamaConfig", **_COMMON),
    "mistral": lambda: _config("MistralConfig", **_COMMON, head_dim=8, sliding_window=WINDOW),
    "qwen2": lambda: _config("Qwen2Config", **_COMMON),
    "qwen3": lambda: _config("Qwen3Config", **_COMMON, head_dim=8),
    "gemma2": lambda: _config(
        "Gemma2Config",
        **_COMMON,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=12,
    ),
    "gemma3": lambda: _config(
        "Gemma3TextConfig", **_COMMON, head_dim=8, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=12
    ),
    "phi": lambda: _config("PhiConfig", **_COMMON, partial_rotary_factor=0.5),
    "phi3": lambda: _config("Phi3Config", **_COMMON, sliding_window=WINDOW),
    "gpt_neox": lambda: _config(
        "GPTNeoXConfig", **{key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
    ),
    "gpt2": lambda: _config(
        "GPT2Config",
        vocab_size=VOCAB,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "opt": lambda: _config(
        "OPTConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        init_std=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}


@dataclass(frozen=True, slots=True)
class Rig:
    """A target and an untouched copy of its model."""

    target: HFTarget
    plain_model: PreTrainedModel

    def plain(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32[n, V]: the model's own logits after every token of one sequence."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        with torch.inference_mode():
            return self.plain_model(input_ids=ids, use_cache=False).logits[0].numpy()

    def plain_tree(self, token_ids: NDArray[np.int32], tree: TokenTree) -> NDArray[np.float32]:
        """float32[n + 1, V]: the anchor's and every node's logits, each path on its own: the oracle."""
        rows = [self.plain(token_ids)[-1]]
        for node in range(len(tree)):
            path = tree.tokens[tree.path(node)]
            rows.append(self.plain(np.concatenate([token_ids, path]))[-1])
        return np.stack(rows)


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    """Builds the rig of a family; options go to ``LoadOptions``."""

    def build(family: str, **options: Any) -> Rig:
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        model.eval()
        plain = copy.deepcopy(model)
        options.setdefault("kv_memory", 4 << 20)
        return Rig(make_target(model, family, LoadOptions(device="cpu", **options)), plain)

    return build

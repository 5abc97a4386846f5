"""Tiny random targets of every supported family, with a byte-level tokenizer and a chat template, and tiny drafts.

For tests and for trying the pipeline in seconds. They write noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.draft_weights import DraftShape, DraftWeights, LayerWeights

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 258
START, END = "<|im_start|>", "<|im_end|>"


def tiny_config(family: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    kinds = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    values = {
        "vocab_size": VOCAB_SIZE + 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    if family in ("llama", "qwen3"):
        values["head_dim"] = 16
    if family == "mistral":
        values["sliding_window"] = None
    return kinds[family](**{**values, **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Random weights, every one of them: norms and biases too, so that none can be mixed up unseen."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), START, END]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END)
    wrapped.chat_template = TEMPLATE
    return wrapped


def save_tiny_target(folder: Path, family: str, seed: int = 0) -> Path:
    """A Hugging Face model folder with tokenizer and chat template."""
    tiny_model(family, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_draft_weights(num_embeddings: int = 32, num_layers: int = 2) -> DraftWeights:
    """A draft of width 32 with 32 output tokens. num_embeddings: rows of the embedding."""
    rng = np.random.default_rng(0)
    width, heads, kv_heads, head_dim, vocab_size = 32, 4, 2, 8, 32

    def random(*shape: int) -> NDArray[np.float32]:
        return rng.normal(0, 0.25, shape).astype(np.float32)

    def layer() -> LayerWeights:
        ones = np.ones(width, np.float32)
        return LayerWeights(
            input_norm=ones,
            qkv=random((heads + 2 * kv_heads) * head_dim, width),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=random(width, heads * head_dim),
            post_norm=ones,
            gate_up=random(96, width),
            down=random(width, 48),
        )

    return DraftWeights(
        shape=DraftShape(num_layers, heads, kv_heads, head_dim, width, 1e-5, 16),
        embedding=random(num_embeddings, width) * 4,
        layers=tuple(layer() for _ in range(num_layers)),
        final_norm=np.ones(width, np.float32),
        head=random(vocab_size, width) * 4,
        vocabulary=np.arange(vocab_size, dtype=np.int32),
        inverse_frequencies=(10000.0 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32),
    )

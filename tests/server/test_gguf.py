"""A GGUF file serves what its weights say: quantised and plain tensors, tokenizer, special ids; unpacked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers

from paceline.models.catalogue import CACHE_VARIABLE
from paceline.server.batch import Batch, Segment
from paceline.server.loading import load_target
from paceline.shared.errors import ModelError
from paceline.shared.tree import TokenTree

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 4, 2, 2
CONFIG = transformers.LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=NUM_HEADS,
    num_key_value_heads=NUM_KV_HEADS,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)


def in_gguf_order(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotary halves interleaved, as llama.cpp's converter stores queries and keys."""
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path) -> Any:
    """Writes a tiny random model, its matrices as Q8_0, and returns it with the weights that the file can hold."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_dimension_count(CONFIG.hidden_size // NUM_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = tensor.numpy()
            heads = {"q_proj": NUM_HEADS, "k_proj": NUM_KV_HEADS}.get(name.split(".")[-2])
            gguf_name = f"{names.get_name(name.removesuffix('.weight'))}.weight"
            if "proj" not in name:
                writer.add_tensor(gguf_name, values)
                continue
            packed = gguf.quants.quantize(values, kind)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
            stored = tensor.numpy() if heads is None else in_gguf_order(tensor.numpy(), heads)
            writer.add_tensor(gguf_name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gguf_file_is_served_as_its_weights_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    model = write_gguf(tmp_path / "tiny.gguf")
    target = load_target(str(tmp_path / "tiny.gguf"), device="cpu", kv_memory=1 << 20)
    tokens = np.random.default_rng(0).integers(3, len(TOKENS), 20).astype(np.int32)
    target.pool.open(0, tokens)
    target.pool.reserve(0, len(tokens))
    logits = target.forward(Batch((Segment(0, 0, tokens, TokenTree.empty()),)))
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert target.info.vocab_size == len(TOKENS)
    assert target.info.eos_token_ids == (2,)
    assert target.info.max_context == 64
    tokenizer = Tokenizer.from_file(str(target.info.tokenizer_path))
    assert tokenizer.decode(tokenizer.encode("the moth", add_special_tokens=False).ids) == "the moth"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    (folder,) = (tmp_path / "cache" / "targets").iterdir()
    made_at = (folder / "config.json").stat().st_mtime_ns
    again = load_target(str(tmp_path / "tiny.gguf"), device="cpu", kv_memory=1 << 20)
    assert again.info.fingerprint == target.info.fingerprint
    assert (folder / "config.json").stat().st_mtime_ns == made_at


def test_truncated_gguf_is_refused_and_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"cannot load the model .*tiny\.gguf"):
        load_target(str(tmp_path / "tiny.gguf"), device="cpu", kv_memory=1 << 20)
    assert not [folder for folder in (tmp_path / "cache" / "targets").iterdir() if not folder.name.startswith(".")]

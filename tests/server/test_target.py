"""Finding, loading and refusing targets; what a target says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.nn.functional import linear

from paceline.models.tokenizer_hash import target_fingerprint
from paceline.server.batch import Batch, Segment
from paceline.server.linear import HalfLinear, PackedLinear, can_halve, can_pack, pack_linears
from paceline.server.loading import LoadOptions, load_target, make_target
from paceline.shared.errors import ModelError, UsageError
from paceline.shared.tree import TokenTree

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a tiny model folder; keyword arguments change its configuration."""

    def build(real_vocab: int = 60, **changes: Any) -> Path:
        torch.manual_seed(1)
        folder = tmp_path / "model"
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).save_pretrained(folder)
        Tokenizer(models.WordLevel({f"w{i}": i for i in range(real_vocab)}, unk_token="w0")).save(
            str(folder / "tokenizer.json")
        )
        return folder

    return build


def test_padded_rows_are_no_tokens(save: Save) -> None:
    folder = save(real_vocab=60)
    target = load_target(str(folder), kv_memory=1 << 20)
    assert target.info.vocab_size == 60
    target.pool.open(1, np.array([5], np.int32))
    target.pool.reserve(1, 1)
    logits = target.forward(Batch((Segment(1, 0, np.array([5], np.int32), TokenTree.empty()),)))
    assert logits.shape == (1, 60)
    assert target.info.fingerprint == target_fingerprint(folder)


def test_every_eos_id_of_the_generation_config_counts(save: Save) -> None:
    folder = save()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "bos_token_id": 1}))
    assert load_target(str(folder), kv_memory=1 << 20).info.eos_token_ids == (7, 9)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16"])
def test_low_precision_loads_and_passes_the_tree_check(save: Save, dtype: str) -> None:
    target = load_target(str(save()), dtype=dtype, kv_memory=1 << 20)
    assert target.info.dtype in {"bfloat16", "float16"}


def test_context_can_be_cut(save: Save) -> None:
    folder = str(save())
    assert load_target(folder, kv_memory=1 << 20).info.max_context == 64
    assert load_target(folder, kv_memory=1 << 20, max_context=32).info.max_context == 32


def test_kv_memory_is_used_up_and_not_exceeded(save: Save) -> None:
    pool = load_target(str(save()), kv_memory=1 << 20).pool
    assert (1 << 20) - pool.block_size * pool.slot_bytes < pool.data.nbytes <= 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope type dynamic"),
    ],
)
def test_unsupported_configuration_is_refused_with_the_reason(
    save: Save, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_target(str(save(**changes)), kv_memory=1 << 20)


def test_architectures_outside_the_attention_interface_are_refused() -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="bloom is not supported"):
        make_target(transformers.BloomForCausalLM(config), "bloom", LoadOptions(kv_memory=1 << 20))
    encoder_decoder = transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder-decoder"):
        make_target(transformers.T5ForConditionalGeneration(encoder_decoder), "t5")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such-model", "local Hugging Face cache"),
        ("{tmp}", "config.json"),
        ("{tmp}/weights.bin", "expected a .gguf file"),
        ("{tmp}/broken.gguf", "cannot load the model"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    for file in ("weights.bin", "broken.gguf"):
        (tmp_path / file).write_bytes(b"nothing of use")
    with pytest.raises(ModelError, match=message):
        load_target(name.replace("{tmp}", str(tmp_path)))


def test_an_id_is_found_in_the_local_hugging_face_cache(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save()
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    folder.rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    target = load_target("someone/tiny", kv_memory=1 << 20)
    assert target.info.name == "someone/tiny"
    assert target.info.vocab_size == 60


def test_unbuilt_embedded_target_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelError, match="paceline models build smollm2"):
        load_target("smollm2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "--dtype"),
        ({"device": "abacus"}, "--device"),
        ({"quantize": "int3"}, "int8 or int4"),
        ({"attention": "flash"}, "auto, sdpa, triton"),
        ({"attention": "triton"}, "cuda"),
        ({"kv_memory": 100}, "--kv-memory"),
    ],
)
def test_wrong_options_are_usage_errors(save: Save, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(str(save()), **{"device": "cpu", **options})


@pytest.mark.skipif(not can_pack(), reason="this build of torch has no MKL or no oneDNN")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 16, 17, 33, 200])
def test_packed_linear_equals_the_stock_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    stock = torch.nn.Linear(48, 65, bias=bias)
    holder = torch.nn.Sequential(stock)
    assert pack_linears(holder, max_bytes=1 << 20) == 2 * stock.weight.nbytes
    assert isinstance(holder[0], PackedLinear)
    inputs = torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(holder(inputs), linear(inputs, stock.weight, stock.bias), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not can_pack(), reason="this build of torch has no MKL or no oneDNN")
def test_packed_linear_takes_weights_that_lie_column_by_column() -> None:
    torch.manual_seed(1)
    stock = torch.nn.Linear(48, 65, bias=False)
    stock.weight = torch.nn.Parameter(stock.weight.detach().t().contiguous().t())
    packed = PackedLinear(stock)
    with torch.inference_mode():
        for rows in (1, 2, 9, 33):
            inputs = torch.randn(1, rows, 48)
            torch.testing.assert_close(packed(inputs), linear(inputs, stock.weight), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not can_halve(torch.float16), reason="FBGEMM is missing, or the CPU has its own instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_half_linear_rounds_once_from_exact_weights(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    stock = torch.nn.Linear(48, 65).to(torch.bfloat16).to(dtype)
    holder = torch.nn.Sequential(stock)
    if not can_halve(dtype):
        pytest.skip("the CPU has its own instructions for it")
    pack_linears(holder, max_bytes=1 << 20)
    assert isinstance(holder[0], HalfLinear)
    inputs = torch.randn(1, rows, 48).to(dtype)
    with torch.inference_mode():
        got = holder(inputs)
        expected = linear(inputs.double(), stock.weight.double(), stock.bias.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=max(torch.finfo(dtype).eps, 2e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", [1e5, 3e-7])
def test_weights_that_16_bits_do_not_hold_are_not_halved(dtype: torch.dtype, odd: float) -> None:
    stock = torch.nn.Linear(8, 8).to(torch.bfloat16).to(dtype)
    with torch.no_grad():
        stock.weight.fill_(0.0 if odd < 1 else 0.5)
        stock.weight[3, 3] = odd
    holder = torch.nn.Sequential(stock)
    pack_linears(holder, max_bytes=1 << 20)
    assert not isinstance(holder[0], HalfLinear)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_quantisation_without_its_library_says_what_to_install(save: Save) -> None:
    with pytest.raises(UsageError, match="pip install torchao"):
        load_target(str(save()), device="cpu", quantize="int8")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_four_bits_on_a_cpu_want_the_library_that_has_them(save: Save) -> None:
    with pytest.raises(UsageError, match="int4 on cpu needs bitsandbytes"):
        load_target(str(save()), device="cpu", quantize="int4")


@pytest.mark.parametrize(("kind", "library", "likeness"), [("int8", "torchao", 0.99), ("int4", "bitsandbytes", 0.85)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_answer_much_like_the_full_ones(
    save: Save, kind: str, library: str, likeness: float, dtype: str
) -> None:
    pytest.importorskip(library)
    folder = str(save(hidden_size=128, intermediate_size=256, initializer_range=0.1))
    prompt = np.array([5, 9, 3, 7], np.int32)

    def logits(quantize: str | None) -> torch.Tensor:
        target = load_target(folder, device="cpu", dtype=dtype, kv_memory=1 << 20, quantize=quantize)
        target.pool.open(1, prompt)
        target.pool.reserve(1, len(prompt))
        return target.forward(Batch((Segment(1, 0, prompt, TokenTree.empty()),))).float()

    full, reduced = logits(None), logits(kind)
    assert not torch.equal(full, reduced)
    assert float(torch.cosine_similarity(full, reduced).min()) > likeness


def test_linears_stay_stock_without_the_memory() -> None:
    holder = torch.nn.Sequential(torch.nn.Linear(48, 65))
    assert pack_linears(holder, max_bytes=100) == 0
    assert type(holder[0]) is torch.nn.Linear

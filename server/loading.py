"""Finds and loads a target: the embedded one, a folder, a Hugging Face id in the local cache, or a GGUF file.

Nothing is fetched. A model that we could not serve exactly is refused here, with the reason, before a port is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.models.catalogue import EMBEDDED, find_target
from paceline.models.tokenizer_hash import tokenizer_size
from paceline.server.attention.probe import Geometry, check_config, read_geometry
from paceline.server.attention.registry import INTERFACE_NAME, make_backend, register_interface
from paceline.server.batch import Batch, Segment
from paceline.server.fingerprint import fingerprint
from paceline.server.fusion import fuse_layers
from paceline.server.gguf import unpack_gguf
from paceline.server.kv.pool import BLOCK_SIZE, KVPool
from paceline.server.linear import pack_linears
from paceline.server.precision import QUANTIZERS, resolve_device, resolve_dtype
from paceline.server.target import HFTarget, TargetInfo
from paceline.shared.errors import ModelError, UsageError
from paceline.shared.tree import TokenTree

_CPU_KV_SHARE, _CPU_KV_MAX = 0.25, 2 << 30
_CPU_FUSE_SHARE, _CPU_PACK_SHARE = 0.25, 0.25
_CUDA_KV_SHARE = 0.85
_MAX_ERROR, _MIN_LIKENESS = 5e-3, 0.9


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a target.

    device, dtype: ``auto`` or torch's names. kv_memory: bytes for the KV pool, None to take a share of what is free.
    attention: a backend's name or ``auto``. quantize: ``int8`` or ``int4`` for weight-only quantisation.
    max_context: cuts the model's own limit, so that one generation cannot take the whole pool.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_memory: int | None = None
    attention: str = "auto"
    quantize: str | None = None
    max_context: int | None = None


def load_target(
    name_or_path: str,
    device: str = "auto",
    dtype: str = "auto",
    kv_memory: int | None = None,
    attention: str = "auto",
    quantize: str | None = None,
    max_context: int | None = None,
) -> HFTarget:
    """Loads ``smollm2`` (embedded), a safetensors folder, an id in the local Hugging Face cache, or a ``.gguf`` file.

    Raises ``ModelError`` if it is not there or not supported, ``UsageError`` for an option that cannot be met.
    """
    options = LoadOptions(device, dtype, kv_memory, attention, quantize, max_context)
    transformers.utils.logging.disable_progress_bar()
    where = _locate(name_or_path)
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    arguments: dict[str, Any] = {"local_files_only": True}
    try:
        if where.is_file():
            where = unpack_gguf(where)
        check_config(AutoConfig.from_pretrained(where, **arguments))
        if quantize is not None:
            arguments["quantization_config"] = _quantization(quantize, torch_device)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch_dtype, **arguments)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"cannot load the model {name_or_path}: {_first_line(error)}") from error
    if quantize is None:
        torch.nn.Module.to(model, torch_device)  # in place
    return make_target(model, name_or_path, options, folder=where)


def make_target(
    model: PreTrainedModel, name: str, options: LoadOptions | None = None, folder: Path | None = None
) -> HFTarget:
    """Turns a loaded ``transformers`` model into a target: probes it, makes its pool, and checks that trees come out
    right by comparing a small one with the model's own forward pass.

    Raises ``ModelError`` if the model is not supported.
    """
    options = options or LoadOptions()
    model.eval()
    check_config(model.config)
    register_interface()
    # Ordinary words: special tokens make some models so unstable that bfloat16 differs from itself.
    tokens = (np.arange(1, 7) * int(model.config.vocab_size) // 8).astype(np.int32)
    reference = _plain_logits(model, tokens)
    model.set_attn_implementation(INTERFACE_NAME)
    geometry = read_geometry(model)
    backend = make_backend(options.attention, model.device)
    info = _target_info(model, name, folder, options.max_context)
    if model.device.type == "cpu" and options.quantize is None:
        fuse_layers(model, max_bytes=int(_available_memory() * _CPU_FUSE_SHARE))
        pack_linears(model, max_bytes=int(_available_memory() * _CPU_PACK_SHARE))
    target = HFTarget(model, info, _make_pool(model, geometry, options.kv_memory), backend)
    _check_tree(target, tokens, reference)
    return target


def _locate(name_or_path: str) -> Path:
    """A folder, or a .gguf file."""
    if name_or_path == EMBEDDED:
        return find_target(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"expected a model folder with a config.json, got {name_or_path}")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"expected a .gguf file or a model folder, got the file {name_or_path}")
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelError(
            f"expected smollm2, a folder, a .gguf file or an id in the local Hugging Face cache, got {name_or_path}"
        ) from error


def _quantization(kind: str, device: torch.device) -> Any:
    if kind not in QUANTIZERS:
        raise UsageError(f"expected --quantize {' or '.join(QUANTIZERS)}, got {kind}")
    return QUANTIZERS[kind](device)


def _target_info(model: PreTrainedModel, name: str, folder: Path | None, max_context: int | None) -> TargetInfo:
    config, generation = model.config, model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    tokenizer = _file(folder, "tokenizer.json")
    rows = int(model.get_output_embeddings().weight.shape[0]) if _has_plain_head(model) else int(config.vocab_size)
    own_limit = int(getattr(config, "max_position_embeddings", 0) or 0) or 1 << 20
    return TargetInfo(
        name=name,
        vocab_size=min(rows, tokenizer_size(tokenizer)) if tokenizer is not None else rows,
        max_context=own_limit if max_context is None else min(own_limit, max_context),
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        tokenizer_path=tokenizer,
        chat_template_path=_file(folder, "chat_template.jinja"),
        fingerprint=fingerprint(model, folder),
    )


def _has_plain_head(model: PreTrainedModel) -> bool:
    return isinstance(getattr(model.get_output_embeddings(), "weight", None), torch.Tensor)


def _file(folder: Path | None, name: str) -> Path | None:
    return folder / name if folder is not None and (folder / name).is_file() else None


def _make_pool(model: PreTrainedModel, geometry: Geometry, kv_memory: int | None) -> KVPool:
    sizes = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
    if kv_memory is None:
        kv_memory = _free_memory(model.device)
    num_blocks = kv_memory // (KVPool.bytes_per_token(*sizes, model.dtype) * BLOCK_SIZE)
    if num_blocks < 2:
        raise UsageError(f"expected --kv-memory for at least 2 blocks of {BLOCK_SIZE} tokens, got {kv_memory} bytes")
    return KVPool(int(num_blocks), BLOCK_SIZE, *sizes, model.dtype, model.device)


def _free_memory(device: torch.device) -> int:
    """Bytes for the pool when the operator names none."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_KV_SHARE)
    return min(int(_available_memory() * _CPU_KV_SHARE), _CPU_KV_MAX)


def _available_memory() -> int:
    """Bytes of main memory that can be taken without swapping; a modest guess where the system does not say."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return _CPU_KV_MAX * 2


def _fork(tokens: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The same text with other last two tokens: the second path of the check's tree."""
    return np.concatenate([tokens[:-2], tokens[-2:][::-1]])


def _plain_logits(model: PreTrainedModel, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
    """float32[2, 3, V]: the model's own logits at the last three tokens of both paths."""
    ids = torch.from_numpy(np.stack([tokens, _fork(tokens)]).astype(np.int64)).to(model.device)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False, logits_to_keep=3).logits.float()  # type: ignore[no-any-return]


def _check_tree(target: HFTarget, tokens: np.ndarray[Any, np.dtype[np.int32]], reference: torch.Tensor) -> None:
    """Both paths as one tree over a warm pool must give what the model gives for each alone. Raises ``ModelError``."""
    base, handle = len(tokens) - 2, -1
    nodes = np.concatenate([tokens[base:], _fork(tokens)[base:]])
    tree = TokenTree(nodes, np.array([-1, 0, -1, 2], np.int32))
    pool = target.pool
    pool.open(handle, tokens)
    try:
        pool.reserve(handle, len(tokens) + len(tree))
        target.forward(Batch((Segment(handle, 0, tokens[: base - 1], TokenTree.empty(), wants_logits=False),)))
        pool.commit(handle, 0, range(base - 1))
        logits = target.forward(Batch((Segment(handle, base - 1, tokens[base - 1 : base], tree),))).float()
    finally:
        pool.free(handle)
    expected = torch.stack([*reference[0], *reference[1, 1:]])[:, : target.info.vocab_size]
    error = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    likeness = float(torch.cosine_similarity(logits, expected, dim=-1).min())
    exact = target.model.dtype == torch.float32
    if not (error <= _MAX_ERROR if exact else likeness >= _MIN_LIKENESS):
        raise ModelError(
            f"model type {target.model.config.model_type} is not supported: a token tree's logits differ from its own "
            f"forward pass by {error:.2g} of the largest (cosine {likeness:.2g})"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""Device, dtype and weight-only quantisation: what the operator's words mean on this machine."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from paceline.shared.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU. Raises ``UsageError``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"expected --device auto, cpu or cuda[:index], got {name}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"expected --device cpu on a machine without CUDA, got {name}")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA and float32 on a CPU.

    On a CPU float32 is exact, and about as fast as bfloat16 where there are no instructions for the latter (see
    ``linear``). Raises ``UsageError``.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"expected --dtype auto, {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def _torchao(bits: int) -> Any:
    """torch's own 4-bit kernels want bfloat16 activations and CUDA; groups of 64 divide every usual width."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    if bits == 8:
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d"))


def _bitsandbytes(bits: int) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4")


def _weight_only(bits: int, device: torch.device) -> Any:
    """The first installed library that has kernels for it on that device."""
    on_cuda = device.type == "cuda"
    usable = {"torchao": bits == 8 or on_cuda, "bitsandbytes": bits == 4 or on_cuda}
    wanted = [name for name, can in usable.items() if can]
    found = next((name for name in wanted if find_spec(name) is not None), None)
    if found is None:
        raise UsageError(
            f"--quantize int{bits} on {device.type} needs {' or '.join(wanted)}, which is not installed: "
            f"pip install {wanted[0]}"
        )
    return _torchao(bits) if found == "torchao" else _bitsandbytes(bits)


QUANTIZERS: dict[str, Callable[[torch.device], Any]] = {
    "int8": lambda device: _weight_only(8, device),
    "int4": lambda device: _weight_only(4, device),
}
"""``--quantize`` by name: makes the ``transformers`` quantisation configuration."""

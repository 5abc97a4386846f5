"""Linear layers of a model on a CPU, fast at the row counts of a verification step.

The stock matrix product is tuned for one row and for hundreds. A step has 1 to about 64: a token per generation, or a
tree. There the product's own repacking of the weight costs as much as the product; packed once at load, 8 rows take
half the time. Measured for the embedded target on one core (all layers, ms; AVX-512, MKL):

    rows            1    2    4    8   16   32
    stock          33   37   63   80   74   97
    MKL packed     38   38   41   42   51   98
    oneDNN packed  43   45   45   50   58   80

So: the stock product up to 3 rows, MKL's packed one up to 16, oneDNN's beyond. The results are those of float32
products in another summation order. Each packed copy takes the weights' size again; without the memory, or on a build
without these libraries, the stock layer stays.

Layers whose weights 16 bits hold take FBGEMM's product with 16-bit weights and float32 sums instead: 31 ms for 1 row,
42 for 8, 75 for 16, 90 for 33. It is exact for float32 activations, and the only fast one for bfloat16 on a CPU without
instructions for it, where the stock product takes 39 ms for 1 row, 101 for 8 and 287 for 33.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

_STOCK_MAX_ROWS = 3
_MKL_MAX_ROWS = 16
_MKL_PACK_ROWS, _ONEDNN_PACK_ROWS = 16, 32


class PackedLinear(nn.Module):
    """Does what the ``nn.Linear`` that it replaces does; shares its parameters."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = stock.in_features, stock.out_features
        self.weight, self.bias = stock.weight, stock.bias
        weight = stock.weight.detach().contiguous()
        self._transposed = stock.weight.detach().t()
        self._max_stock_rows = _STOCK_MAX_ROWS if stock.weight.is_contiguous() else 1
        self._mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, _MKL_PACK_ROWS)
        self._onednn = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_PACK_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: float32[..., in_features] -> float32[..., out_features]."""
        num_rows = rows.numel() // self.in_features
        if num_rows == 1 and self.bias is None:
            return torch.mm(rows.view(1, self.in_features), self._transposed).view(*rows.shape[:-1], self.out_features)
        if num_rows <= self._max_stock_rows:
            return linear(rows, self.weight, self.bias)
        if num_rows <= _MKL_MAX_ROWS:
            packed: torch.Tensor = torch.ops.mkl._mkl_linear(rows, self._mkl, self.weight, self.bias, num_rows)
            return packed
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._onednn, self.bias, "none", [], "")
        return product


class HalfLinear(nn.Module):
    """Does what the ``nn.Linear`` that it replaces does, with weights of 16 bits and sums of 32.

    FBGEMM widens the weights on their way from memory, so one row takes half the traffic of float32 and a tree does
    not fall back on emulated bfloat16. Inputs are widened and outputs rounded once, as the stock product does. The
    stock weight is let go.
    """

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = stock.in_features, stock.out_features
        bias = None if stock.bias is None else stock.bias.detach().float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(stock.weight.detach().float().contiguous(), bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [..., in_features] -> [..., out_features], of one dtype."""
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._packed)
        return product.to(rows.dtype)


def can_pack() -> bool:
    """Whether this build of torch has both libraries."""
    return bool(torch.backends.mkl.is_available()) and bool(torch.backends.mkldnn.is_available())


def can_halve(dtype: torch.dtype) -> bool:
    """Whether FBGEMM's 16-bit weights are the fastest way for that precision here: not where the CPU multiplies
    bfloat16 or float16 itself.
    """
    able = torch.cpu.get_capabilities()
    own = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}.get(dtype, ())
    return "fbgemm" in torch.backends.quantized.supported_engines and not any(able.get(name) for name in own)


def pack_linears(model: nn.Module, max_bytes: int) -> int:
    """Replaces the linear layers by packed ones, in place, as long as the copies fit in ``max_bytes``.

    Weights that 16 bits hold exactly, as in most published checkpoints, are kept in 16 bits whatever the model's
    precision. Returns the bytes that the copies take.
    """
    taken = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed, size = _choice(child)
            if packed is not None and taken + size <= max_bytes:
                setattr(parent, name, packed(child))
                taken += size
    return taken


def _choice(stock: nn.Linear) -> tuple[Callable[[nn.Linear], nn.Module] | None, int]:
    """What to make of a layer, and the bytes of its copies."""
    dtype, count = stock.weight.dtype, stock.weight.numel()
    if can_halve(dtype) and _fits_half(stock.weight.detach()):
        return HalfLinear, 2 * count
    if dtype == torch.float32 and can_pack():
        return PackedLinear, 2 * stock.weight.nbytes
    return None, 0


def _fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds the weights: exactly, or for bfloat16 within a 64th of what its own rounding did to them.

    Below 6e-5 float16 gets coarser, above 65504 it ends.
    """
    half = weight.to(torch.float16)
    if weight.dtype != torch.bfloat16:
        return torch.equal(half.to(weight.dtype), weight)
    error = (half.float() - weight.float()).abs().max()
    return bool(error <= 2.0**-15 * weight.float().abs().mean())

"""Linear layers of a float32 model on a CPU, fast at the row counts of a verification step.

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
"""

from __future__ import annotations

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


def can_pack() -> bool:
    """Whether this build of torch has both libraries."""
    return bool(torch.backends.mkl.is_available()) and bool(torch.backends.mkldnn.is_available())


def pack_linears(model: nn.Module, max_bytes: int) -> int:
    """Replaces the float32 linear layers by packed ones, in place, as long as the copies fit in ``max_bytes``.

    Returns the bytes that the copies take.
    """
    if not can_pack():
        return 0
    taken = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype != torch.float32:
                continue
            size = 2 * child.weight.nbytes
            if taken + size <= max_bytes:
                setattr(parent, name, PackedLinear(child))
                taken += size
    return taken

"""Fewer, larger operations in a decoder layer on a CPU: one product for query, key and value, one for gate and up.

A step of one row reads every weight once and does next to nothing with it, so what is left to save is the number of
small operations and the layout of what is read. A stock module is replaced only where the replacement, given the very
call that the stock module got in a forward pass of the whole model, returns the same; all others stay as they are.
Nothing here knows a model's name. How a product is computed is ``linear``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.server.attention.probe import attend_causally
from paceline.server.attention.registry import LayerAttention
from paceline.server.linear import can_halve

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Share of the largest output by which another order of sums may differ."""
_OPTIONS = ("scaling", "sliding_window", "softcap")
_POSITIONS = (0, 1, 5, 17)
_QKV: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
_GATE_UP: tuple[str, ...] = ("gate_proj", "up_proj")


class FusedNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), in five operations instead of six to eight."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.scale = nn.Buffer(weight.detach() + offset, persistent=False)
        self.eps = nn.Buffer(torch.tensor([eps]), persistent=False)
        self._share = 1.0 / len(weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: float32[..., width] -> the same shape."""
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows * torch.addcmul(self.eps, length, length, value=self._share).rsqrt_()).mul_(self.scale)


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with one product for gate and up."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.gate_up = _merged([stock.get_submodule(name) for name in _GATE_UP])
        self.down, self.act = stock.get_submodule("down_proj"), stock.get_submodule("act_fn")
        self._width = self.gate_up.out_features // 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: float32[1, T, width] -> the same shape."""
        both = self.gate_up(rows)
        output: torch.Tensor = self.down(self.act(both[..., : self._width]).mul_(both[..., self._width :]))
        return output


class _Turns:
    """The rotary angles of the forward pass under way, in the layout that one roll needs; made once for all layers.

    rotate_half(x) is x rolled by half its width with the first half negated; the sign goes into the sine.
    """

    def __init__(self) -> None:
        self._cos = torch.empty(0)
        self._made = self._cos, self._cos

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin: [1, T, head_dim] -> [T, 1, head_dim] each."""
        if cos is not self._cos:
            signed = sin[0].clone()
            signed[:, : signed.shape[1] // 2].neg_()
            self._cos, self._made = cos, (cos[0, :, None], signed[:, None])
        return self._made


class FusedAttention(nn.Module):
    """Projects, turns and hands over query, key and value with one product and one rotation for all heads."""

    def __init__(self, stock: nn.Module, seen: _Seen, turns: _Turns) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = stock.layer_idx, True
        self.qkv = _merged([stock.get_submodule(name) for name in _QKV])
        self.out = stock.get_submodule("o_proj")
        self.q_norm, self.k_norm = (getattr(stock, name, None) for name in ("q_norm", "k_norm"))
        self._head_dim, self._num_heads, self._num_kv_heads = seen.head_dim, seen.num_heads, seen.num_kv_heads
        self._options = seen.options
        self._turns = turns

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        *,
        paceline_step: LayerAttention,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: float32[1, T, width] -> the same shape."""
        num_rows, num_heads = hidden_states.shape[1], self._num_heads
        num_turned = num_heads + self._num_kv_heads
        heads = self.qkv(hidden_states).view(num_rows, -1, self._head_dim)
        turned = heads[:, :num_turned]
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat([self.q_norm(turned[:, :num_heads]), self.k_norm(turned[:, num_heads:])], dim=1)
        cos, sin = self._turns.of(*position_embeddings)
        turned = (turned * cos).addcmul_(torch.roll(turned, self._head_dim // 2, -1), sin).transpose(0, 1)[None]
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        value = heads[:, num_turned:].transpose(0, 1)[None]
        attended = paceline_step.attend(self, query, key, value, self._options)
        output: torch.Tensor = self.out(attended.reshape(1, num_rows, -1))
        return output, None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one attention module handed over in the forward pass that was watched."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: dict[str, Any]


@dataclass(slots=True)
class _Watch:
    """One forward pass: attends causally, and notes each watched module's call and what came out."""

    seen: dict[nn.Module, _Seen] = field(default_factory=dict)
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See ``LayerAttention.attend``."""
        kept = {name: options[name] for name in _OPTIONS if name in options}
        self.seen[module] = _Seen(query.shape[1], key.shape[1], query.shape[3], kept)
        return attend_causally(query, key, value)

    def note(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """A forward hook."""
        self.calls[module] = arguments, options, output

    def agrees(self, stock: nn.Module, fused: nn.Module) -> bool:
        """Whether ``fused`` answers the call that ``stock`` got as ``stock`` did."""
        if stock not in self.calls:
            return False
        arguments, options, output = self.calls[stock]
        try:
            answer = fused(*arguments, **options)
        except (TypeError, RuntimeError):
            return False
        if isinstance(output, tuple):
            output, answer = output[0], answer[0]
        if output.shape != answer.shape:
            return False
        return float((answer - output).abs().max()) <= _TOLERANCES[output.dtype] * float(output.abs().max())


def fuse_layers(model: PreTrainedModel, max_bytes: int) -> int:
    """Replaces what can be fused in a model on a CPU whose attention is already ours, in place.

    Merged weights take the place of the stock ones, layer by layer. ``max_bytes`` bounds them all the same: what came
    out of a mapped file took no memory of its own. Returns their bytes.
    """
    if model.device.type != "cpu" or (model.dtype != torch.float32 and not can_halve(model.dtype)):
        return 0
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    # Norms first: an attention takes its own along as it finds them.
    candidates = [one for one in children if _is_norm(one[2])] + [one for one in children if _merged_bytes(one[2])]
    watch, turns, taken = _watched(model, [child for _, _, child in candidates]), _Turns(), 0
    with torch.inference_mode():
        for parent, name, stock in candidates:
            size = _merged_bytes(stock)
            if taken + size > max_bytes:
                continue
            fused = next((one for one in _replacements(stock, watch, turns) if watch.agrees(stock, one)), None)
            if fused is not None:
                setattr(parent, name, fused)
                taken += size
    return taken


def _watched(model: PreTrainedModel, modules: list[nn.Module]) -> _Watch:
    """One short forward pass of the stock model."""
    watch = _Watch()
    hooks = [module.register_forward_hook(watch.note, with_kwargs=True) for module in modules]
    ids = torch.arange(1, len(_POSITIONS) + 1)[None] % int(model.config.vocab_size)
    last = int(getattr(model.config, "max_position_embeddings", 0) or _POSITIONS[-1] + 1) - 1
    positions = torch.tensor(_POSITIONS)[None].clamp(max=last)
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=False, paceline_step=watch)
    finally:
        for hook in hooks:
            hook.remove()
    return watch


def _replacements(stock: nn.Module, watch: _Watch, turns: _Turns) -> Iterator[nn.Module]:
    """What may do the same as ``stock``, to be tried in turn."""
    if _is_norm(stock) and stock.get_parameter("weight").dtype == torch.float32:
        weight, eps = stock.get_parameter("weight"), _eps(stock)
        yield FusedNorm(weight, eps, 0.0)
        yield FusedNorm(weight, eps, 1.0)
    elif _has_linears(stock, _GATE_UP):
        yield FusedMLP(stock)
    elif stock in watch.seen:
        yield FusedAttention(stock, watch.seen[stock], turns)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 1 and type(module).__name__.endswith("RMSNorm")


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)


def _has_linears(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _merged_bytes(module: nn.Module) -> int:
    """Bytes of the weights that would be merged; 0 for a module that is no candidate."""
    if _has_linears(module, (*_GATE_UP, "down_proj")) and isinstance(getattr(module, "act_fn", None), nn.Module):
        names = _GATE_UP
    elif _has_linears(module, (*_QKV, "o_proj")) and hasattr(module, "layer_idx"):
        names = _QKV
    else:
        return 0
    return sum(module.get_submodule(name).get_parameter("weight").nbytes for name in names)


def _merged(parts: list[nn.Module]) -> nn.Linear:
    """One layer that returns what the parts return, side by side.

    Its weight lies column by column: a wide product of one row reads long runs from several places at once then, which
    the memory delivers up to a fifth faster.
    """
    weights = [part.get_parameter("weight").detach() for part in parts]
    biases = [getattr(part, "bias", None) for part in parts]
    weight = torch.cat(weights).t().contiguous().t()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if any(bias is not None for bias in biases):
        filled = [
            weight.new_zeros(len(weight)) if bias is None else bias.detach()
            for bias, weight in zip(biases, weights, strict=True)
        ]
        linear.bias = nn.Parameter(torch.cat(filled), requires_grad=False)
    return linear

"""Moves outliers from activations into weights before quantisation (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438).

Input channel j of a linear layer is divided by s_j = max|x_j|^a / max|w_j|^(1-a) where it is made (a norm's weight, the
rows of v or of up) and column j of the layer is multiplied by it. The function in floating point stays the same, at no
cost when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.draft import Draft
from paceline.models.draft_weights import DraftWeights, LayerWeights

Floats = NDArray[np.float32]
STRENGTH = 0.5


@dataclass(frozen=True, slots=True)
class LayerPeaks:
    """Largest absolute input per channel of a layer's four linear maps, float32[in]."""

    qkv: Floats
    out: Floats
    gate_up: Floats
    down: Floats


@torch.inference_mode()
def measure_peaks(draft: Draft, texts: NDArray[np.int64]) -> tuple[tuple[LayerPeaks, ...], Floats]:
    """Peaks of every layer, and of the head, over int64[rows, len] texts."""
    seen: dict[torch.nn.Module, torch.Tensor] = {}

    def watch(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        peak = inputs[0].abs().flatten(0, -2).amax(0)
        seen[module] = torch.maximum(seen[module], peak) if module in seen else peak

    watched: list[torch.nn.Module] = [draft.head]
    for layer in draft.decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        watched += [attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj]
    handles = [module.register_forward_pre_hook(watch) for module in watched]
    try:
        for text in texts:
            draft(torch.from_numpy(text)[None])
    finally:
        for handle in handles:
            handle.remove()
    peaks = [seen[module].float().numpy() for module in watched]
    layers = tuple(LayerPeaks(*peaks[at : at + 4]) for at in range(1, len(peaks), 4))
    return layers, peaks[0]


def smooth(
    weights: DraftWeights, layers: tuple[LayerPeaks, ...], head: Floats, strength: float = STRENGTH
) -> DraftWeights:
    """The same function with activations that are easier to quantise."""
    scale = _scale(head, weights.head, strength)
    return replace(
        weights,
        layers=tuple(
            _smooth_layer(weights, layer, peaks, strength) for layer, peaks in zip(weights.layers, layers, strict=True)
        ),
        final_norm=weights.final_norm / scale,
        head=weights.head * scale,
        bridge=None if weights.bridge is None else weights.bridge * scale,
    )


def _scale(
    peaks: Floats, weight: Floats, strength: float, share: Callable[[Floats], Floats] = lambda peaks: peaks
) -> Floats:
    """float32[in] around 1; `share` makes channels that one upstream row feeds use one value."""
    activation = share(np.maximum(peaks, 1e-5))
    columns = share(np.maximum(np.abs(weight).max(axis=0), 1e-5))
    scale = activation**strength / columns ** (1 - strength)
    centred: Floats = (scale / np.exp(np.log(scale).mean())).astype(np.float32)
    return centred


def _smooth_layer(weights: DraftWeights, layer: LayerWeights, peaks: LayerPeaks, strength: float) -> LayerWeights:
    shape = weights.shape
    groups = shape.num_heads // shape.num_kv_heads

    def share(values: Floats) -> Floats:
        by_head = values.reshape(shape.num_kv_heads, groups, shape.head_dim)
        shared: Floats = np.broadcast_to(by_head.max(axis=1, keepdims=True), by_head.shape).reshape(-1)
        return shared

    on_qkv = _scale(peaks.qkv, layer.qkv, strength)
    on_out = _scale(peaks.out, layer.out, strength, share)
    on_gate_up = _scale(peaks.gate_up, layer.gate_up, strength)
    on_down = _scale(peaks.down, layer.down, strength)
    qkv, bias = layer.qkv * on_qkv, layer.qkv_bias
    per_value_row = on_out.reshape(shape.num_kv_heads, groups, shape.head_dim)[:, 0].reshape(-1)
    rows = np.ones(len(qkv), np.float32)
    rows[-len(per_value_row) :] = 1 / per_value_row
    gate_up = layer.gate_up * on_gate_up
    gate_up[len(on_down) :] /= on_down[:, None]
    return replace(
        layer,
        input_norm=layer.input_norm / on_qkv,
        qkv=qkv * rows[:, None],
        qkv_bias=None if bias is None else bias * rows,
        out=layer.out * on_out,
        post_norm=layer.post_norm / on_gate_up,
        gate_up=gate_up,
        down=layer.down * on_down,
    )

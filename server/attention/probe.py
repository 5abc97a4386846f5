"""Looks at a model from inside: which attention layers it has, with which heads, windows and extras.

One short forward call tells what a hundred configuration classes spell differently, and it sees what a tensor-parallel
rank really has. A model whose attention we could not reproduce is refused here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel

from paceline.shared.errors import ModelError

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_IGNORED_OPTIONS = {"position_ids", "scaling", "dropout", "sliding_window", "softcap", "is_causal", "cache_position"}
_STATEFUL_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the pool and the kernels must know. ``num_kv_heads`` counts this process's heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    window: int | None


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Plain causal attention of a text by itself, as ``LayerAttention.attend`` takes and returns it."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


class Probe:
    """Attends as a plain causal model would and notes what each layer asked for."""

    def __init__(self) -> None:
        self.layers: dict[int, _Layer] = {}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See ``LayerAttention.attend``. Raises ``ModelError`` for what the paged path does not do."""
        if not getattr(module, "is_causal", True):
            raise ModelError("expected causal attention in every layer, got a bidirectional one")
        for name, given in options.items():
            if name not in _IGNORED_OPTIONS and isinstance(given, torch.Tensor):
                raise ModelError(f"this model's attention takes an extra input ({name}) that is not supported")
        layer = getattr(module, "layer_idx", None)
        if layer is None or int(layer) in self.layers:
            raise ModelError("expected one attention per numbered layer, as in a plain decoder")
        shapes = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        self.layers[int(layer)] = _Layer(*shapes, options.get("sliding_window"))
        return attend_causally(query, key, value)


def check_config(config: PretrainedConfig) -> None:
    """Refuses what the configuration already rules out. Raises ``ModelError``."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"expected a decoder-only language model, got the encoder-decoder {config.model_type}")
    foreign = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if foreign:
        kinds = ", ".join(sorted(foreign))
        raise ModelError(f"model type {config.model_type} has layers that are not supported: {kinds}")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds_of_rope = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    stateful = kinds_of_rope & _STATEFUL_ROPE
    if stateful:
        raise ModelError(
            f"rope type {stateful.pop()} changes old positions as the text grows, which cached keys cannot follow: "
            "set rope_parameters to another type in the model's config.json"
        )


def read_geometry(model: PreTrainedModel) -> Geometry:
    """Runs the probe through a model whose attention is already ours. Raises ``ModelError``."""
    probe = Probe()
    config = model.config
    ids = torch.arange(4, device=model.device)[None] % config.vocab_size
    with torch.inference_mode():
        model(
            input_ids=ids, position_ids=torch.arange(4, device=model.device)[None], use_cache=False, paceline_step=probe
        )
    num_layers = int(config.num_hidden_layers)
    if sorted(probe.layers) != list(range(num_layers)):
        raise ModelError(
            f"model type {config.model_type} is not supported: {len(probe.layers)} of its {num_layers} layers go "
            "through transformers' attention interface"
        )
    layers = [probe.layers[index] for index in range(num_layers)]
    shapes = {shape for layer in layers for shape in (layer.key_shape, layer.value_shape)}
    if len(shapes) != 1:
        raise ModelError(f"expected keys and values of one shape in all layers, got (heads, width) {sorted(shapes)}")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=False)):
        if (kind == "sliding_attention") != (layer.window is not None) and getattr(config, "layer_types", None):
            raise ModelError(f"layer {index} is called {kind} but its window is {layer.window}")
    ((num_kv_heads, head_dim),) = shapes
    return Geometry(num_layers, num_kv_heads, head_dim, tuple(layer.window for layer in layers))

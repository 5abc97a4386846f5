"""A draft model as plain numpy arrays: what the ONNX graph is built from.

Not here: where they come from (`draft`), and what is done to them before the graph is built (`smooth`, `bridge`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Everything about a draft model that is not a weight."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    norm_eps: float
    num_candidates: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Linear weights float32[out, in]; qkv and gate_up are stacked along the outputs."""

    input_norm: Floats
    qkv: Floats
    qkv_bias: Floats | None
    q_norm: Floats | None
    k_norm: Floats | None
    out: Floats
    post_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model in numpy.

    embedding float32[V, d]; head float32[Vd, d]; vocabulary int32[Vd] maps rows of the head to token ids.
    inverse_frequencies float32[head_dim/2]: rotary angles are position * inverse_frequencies; rope_scale multiplies
    their cos and sin. bridge float32[d, d]: embedding @ bridge stands in for the head's row of any token, or None.
    """

    shape: DraftShape
    embedding: Floats
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Floats
    vocabulary: NDArray[np.int32]
    inverse_frequencies: Floats
    rope_scale: float = 1.0
    bridge: Floats | None = None

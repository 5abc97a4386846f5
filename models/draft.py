"""The draft model in torch: a few of the target's layers, its whole input embedding, a head over what it writes most.

What `distill` trains and `export` reads. The decoder layers are stock `transformers` ones of the target's own family,
so any family whose layers look like Llama's works. Not for: serving (the client runs the ONNX export).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.models.draft_weights import DraftShape, DraftWeights, LayerWeights
from paceline.models.store import read_json, write_json
from paceline.shared.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def evenly_outer_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The default subset: the first and the last layers, half each, in order (0, 1, 2, 27, 28, 29 of 30)."""
    kept = min(num_layers, num_target_layers)
    first = (kept + 1) // 2
    return (*range(first), *range(num_target_layers - (kept - first), num_target_layers))


def check_layers(config: Any, layer_ids: Sequence[int]) -> None:
    """Raises: ModelError for layer ids that a target of this configuration does not have."""
    if not layer_ids or max(layer_ids) >= config.num_hidden_layers or min(layer_ids) < 0:
        raise ModelError(f"expected layer ids from 0 to {config.num_hidden_layers - 1}, got {list(layer_ids)}")


def check_family(config: Any) -> None:
    """Raises: ModelError when the ONNX graph cannot express this configuration."""
    if config.model_type not in FAMILIES:
        raise ModelError(f"cannot make a draft of a {config.model_type!r} model, expected one of {', '.join(FAMILIES)}")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ModelError(f"cannot make a draft with activation {config.hidden_act!r}, expected 'silu'")


class Draft(nn.Module):
    """Decoder layers and a trimmed head. `vocabulary` int64[Vd] maps rows of the head to token ids of the target."""

    vocabulary: torch.Tensor

    def __init__(self, config: Any, vocabulary: torch.Tensor) -> None:
        from transformers import AutoModel

        super().__init__()
        check_family(config)
        self.config = config
        self.decoder = AutoModel.from_config(config, attn_implementation="sdpa")
        self.head = nn.Linear(config.hidden_size, len(vocabulary), bias=False)
        self.register_buffer("vocabulary", vocabulary.long())

    @classmethod
    def from_target(cls, target: Any, layer_ids: Sequence[int], vocabulary: NDArray[np.int64]) -> Draft:
        """Copies layers `layer_ids`, the embedding and the norm of a target; the head starts as the target's rows.

        Raises: ModelError for layer ids that the target does not have, or a family that the graph does not know.
        """
        config = copy.deepcopy(target.config)
        check_layers(config, layer_ids)
        config.num_hidden_layers = len(layer_ids)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[index] for index in layer_ids]
        draft = cls(config, torch.from_numpy(np.asarray(vocabulary, np.int64)))
        decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.model
        draft.decoder.embed_tokens.load_state_dict(decoder.embed_tokens.state_dict())
        draft.decoder.norm.load_state_dict(decoder.norm.state_dict())
        for mine, theirs in zip(draft.decoder.layers, layer_ids, strict=True):
            mine.load_state_dict(decoder.layers[theirs].state_dict())
        with torch.no_grad():
            draft.head.weight.copy_(target.get_output_embeddings().weight[draft.vocabulary])
        return draft.float()

    def go_on_from(self, earlier: Draft) -> None:
        """Takes the layers, the norm and the known rows of the head from a draft of the same target and layers.

        Raises: ModelError when the shapes differ.
        """
        mine = self.decoder.state_dict()
        theirs = {name: value for name, value in earlier.decoder.state_dict().items() if "embed_tokens" not in name}
        shapes = {name: value.shape for name, value in mine.items() if name in theirs}
        if len(shapes) + 1 != len(mine) or shapes != {name: value.shape for name, value in theirs.items()}:
            raise ModelError(
                f"expected a draft of {len(self.decoder.layers)} layers of the same target to go on from, "
                f"got one of {len(earlier.decoder.layers)} of width {earlier.config.hidden_size}"
            )
        self.decoder.load_state_dict(theirs, strict=False)
        known = torch.isin(self.vocabulary, earlier.vocabulary)
        with torch.no_grad():
            self.head.weight[known] = earlier.head.weight[
                torch.searchsorted(earlier.vocabulary, self.vocabulary[known])
            ]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits float32[B, n, Vd] for ids int64[B, n], positions int64[B, n] and an additive mask [B, 1, n, n]."""
        hidden = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: torch.Tensor = self.head(hidden.last_hidden_state)
        return logits

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config.to_dict())
        part = folder / ".draft.safetensors.part"
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, part)
        part.replace(folder / "draft.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Draft:
        """Raises: ModelError when the folder holds no draft."""
        from transformers import AutoConfig

        if not (folder / "draft.safetensors").is_file():
            raise ModelError(f"{folder} holds no draft model, expected config.json and draft.safetensors")
        values = read_json(folder / "config.json")
        config = AutoConfig.for_model(**values)
        state = load_file(folder / "draft.safetensors")
        draft = cls(config, state["vocabulary"])
        draft.load_state_dict(state)
        return draft.float()

    def weights(self, num_candidates: int = 32) -> DraftWeights:
        """Everything in numpy, as the ONNX graph takes it."""
        config = self.config
        rotary = self.decoder.rotary_emb
        first = self.decoder.layers[0].self_attn
        shape = DraftShape(
            num_layers=len(self.decoder.layers),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            hidden_size=config.hidden_size,
            norm_eps=config.rms_norm_eps,
            num_candidates=min(num_candidates, len(self.vocabulary)),
        )
        return DraftWeights(
            shape=shape,
            embedding=_numpy(self.decoder.embed_tokens.weight),
            layers=tuple(_layer_weights(layer) for layer in self.decoder.layers),
            final_norm=_numpy(self.decoder.norm.weight),
            head=_numpy(self.head.weight),
            vocabulary=self.vocabulary.numpy().astype(np.int32),
            inverse_frequencies=_numpy(rotary.inv_freq),
            rope_scale=float(getattr(rotary, "attention_scaling", 1.0)),
        )


def _numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def _layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = linears[0].bias is not None
    return LayerWeights(
        input_norm=_numpy(layer.input_layernorm.weight),
        qkv=np.concatenate([_numpy(linear.weight) for linear in linears]),
        qkv_bias=np.concatenate([_numpy(linear.bias) for linear in linears]) if has_bias else None,
        q_norm=_numpy(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
        k_norm=_numpy(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
        out=_numpy(attention.o_proj.weight),
        post_norm=_numpy(layer.post_attention_layernorm.weight),
        gate_up=np.concatenate([_numpy(mlp.gate_proj.weight), _numpy(mlp.up_proj.weight)]),
        down=_numpy(mlp.down_proj.weight),
    )

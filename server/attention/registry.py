"""The attention backends by name, and their place in ``transformers``' attention interface.

A backend computes one layer's attention for a planned step: it has just been given the step's new keys and values in
the pool and reads everything from there. Adding one: implement ``AttentionBackend`` and name its factory below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from paceline.server.attention.plan import StepPlan
from paceline.shared.errors import UsageError

INTERFACE_NAME = "paceline"
"""Our key in ``transformers.AttentionInterface``. No mask function is registered under it, so ``transformers`` makes
no dense mask: the plan knows what each row sees."""


class AttentionBackend(Protocol):
    """Computes attention over the pool."""

    name: str

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        plan: StepPlan,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query: [1, num_heads, T, head_dim] -> [1, T, num_heads, head_dim].

        scaling multiplies the scores; softcap c turns a scaled score s into c * tanh(s / c); window w hides keys whose
        position is w or more behind the row's.
        """
        ...


def _sdpa() -> AttentionBackend:
    from paceline.server.attention.sdpa import SdpaBackend

    return SdpaBackend()


def _triton() -> AttentionBackend:
    from paceline.server.attention.tree_kernel import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"sdpa": _sdpa, "triton": _triton}


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; ``auto`` is the Triton kernel on CUDA and SDPA elsewhere.

    Raises ``UsageError`` for a name that is not known, or one that cannot run on the device.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" else "sdpa"
    if name not in BACKENDS:
        raise UsageError(f"expected an attention backend out of auto, {', '.join(BACKENDS)}, got {name}")
    if name == "triton" and device.type != "cuda":
        raise UsageError(f"the triton attention backend needs a cuda device, got {device.type}: use --attention sdpa")
    return BACKENDS[name]()


class LayerAttention(Protocol):
    """What one forward call does in each of its attention layers."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """query, key, value: [1, heads, T, head_dim] -> [1, T, heads, head_dim].

        options: what the model passed besides (scaling, sliding_window, softcap and whatever else it knows).
        """
        ...


class PagedStep:
    """A planned step: writes the new keys and values to the pool, then attends over the pool."""

    def __init__(self, backend: AttentionBackend, plan: StepPlan) -> None:
        self._backend = backend
        self._plan = plan

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See ``LayerAttention.attend``."""
        plan = self._plan
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = plan.pool.layer(layer)
        if isinstance(plan.write, slice):
            keys[:, plan.write] = key[0]
            values[:, plan.write] = value[0]
        else:
            keys.index_copy_(1, plan.write, key[0].to(keys.dtype))
            values.index_copy_(1, plan.write, value[0].to(values.dtype))
        scaling = options.get("scaling")
        return self._backend.attend(
            query,
            layer,
            plan,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
        )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    paceline_step: LayerAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that ``transformers`` calls in every layer; ``paceline_step`` comes down from the forward call."""
    if paceline_step is None:
        raise RuntimeError("paged attention was called outside a planned step")
    return paceline_step.attend(module, query, key, value, options), None


def register_interface() -> None:
    """Makes ``attn_implementation="paceline"`` known to ``transformers``. May be called more than once."""
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, paged_attention)

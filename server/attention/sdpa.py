"""Attention by ``scaled_dot_product_attention``, generation by generation: any device, and the oracle of the kernels.

Where a generation's blocks are contiguous its keys and values are views of the pool and nothing is copied.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.server.attention.plan import SegmentPlan, StepPlan


class SdpaBackend:
    """One call per generation and layer.

    Query heads that share a key head are folded into rows, [1, kv_heads, groups * rows, head_dim]: keys are then read
    once per key head, which on CPU is up to a third faster than ``enable_gqa``.
    """

    name = "sdpa"

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
        """See ``AttentionBackend.attend``."""
        keys, values = plan.pool.layer(layer)
        _, num_heads, num_rows, head_dim = query.shape
        if len(plan.segments) == 1:
            output = _attend_segment(query, keys, values, plan.segments[0], scaling, window, softcap)
            return output.transpose(1, 2)
        output = query.new_empty(1, num_heads, num_rows, head_dim)
        for segment in plan.segments:
            part = query[:, :, segment.rows]
            output[:, :, segment.rows] = _attend_segment(part, keys, values, segment, scaling, window, softcap)
        return output.transpose(1, 2)


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: SegmentPlan,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """query: [1, num_heads, rows, head_dim] -> the same shape."""
    read = segment.read(window)
    if isinstance(read, slice):
        key, value = keys[None, :, read], values[None, :, read]
    else:
        key, value = keys.index_select(1, read)[None], values.index_select(1, read)[None]
    num_kv_heads = key.shape[1]
    groups = query.shape[1] // num_kv_heads
    if softcap is None and window is None and segment.is_chain and segment.cached_len == 0:
        return scaled_dot_product_attention(
            query, key, value, is_causal=segment.num_rows > 1, scale=scaling, enable_gqa=groups > 1
        )
    folded = query.reshape(1, num_kv_heads, groups * segment.num_rows, -1)
    mask = segment.mask(window, groups)
    if softcap is None:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = torch.tanh(folded @ key.transpose(2, 3) * (scaling / softcap)) * softcap
        if mask is not None:
            scores = scores + mask
        output = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
    return output.reshape(query.shape)

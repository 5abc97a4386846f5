"""Tree attention as one Triton kernel: reads the paged pool through block tables, trees as ancestor bit masks.

One program computes a tile of query rows of one generation for one key head: the query heads that share it are folded
into rows, so keys are loaded once for all of them. Long contexts are split among programs and merged afterwards.
Runs on CUDA, and anywhere under ``TRITON_INTERPRET=1``, which is how it is held to the ``sdpa`` oracle without a GPU.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals, as Triton does)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from paceline.server.attention.plan import SegmentPlan, StepPlan

_BLOCK_N = 32
_PROGRAMS_WANTED = 256
_MAX_SPLITS = 16
_MIN_KEYS_A_SPLIT = 4 * _BLOCK_N
_WORD_BITS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _tree_attention(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    keys,  # [KV, slots, D]
    values,  # [KV, slots, D]
    output,  # [splits, T, H, D]
    lse,  # float32[splits, T, H]
    tiles,  # int32[tiles, 2]: segment, first row within it
    segments,  # int32[segments, 5]: first packed row, rows, chain rows, cached keys, offset of its block table
    tables,  # int32[blocks of all segments]
    positions,  # int32[T]
    words,  # int64[T, W]: bit j of a row is set if the row sees node j of its segment
    scaling,
    window,
    softcap,
    q_row,
    q_head,
    kv_head_stride,
    kv_slot_stride,
    o_split,
    o_row,
    o_head,
    l_split,
    l_row,
    num_splits,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    segment = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1)
    start = tl.load(segments + segment * 5)
    num_rows = tl.load(segments + segment * 5 + 1)
    num_chain = tl.load(segments + segment * 5 + 2)
    cached = tl.load(segments + segment * 5 + 3)
    table = tables + tl.load(segments + segment * 5 + 4)

    lanes = tl.arange(0, BLOCK_M)
    row = first + lanes // GROUPS
    # Lanes beyond the last whole row of a tile idle: GROUPS need not divide BLOCK_M.
    row_ok = (row < num_rows) & (lanes < (BLOCK_M // GROUPS) * GROUPS)
    head = kv_head * GROUPS + lanes % GROUPS
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < HEAD_DIM
    packed = start + row
    q = tl.load(
        query + packed[:, None] * q_row + head[:, None] * q_head + dims[None, :],
        mask=row_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )
    row_position = tl.load(positions + packed, mask=row_ok, other=0)

    # No row of the tile sees beyond itself, or, in a tree, beyond its own node: later keys are not read.
    num_keys = tl.minimum(cached + num_rows, cached + first + BLOCK_M // GROUPS)
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(tl.min(tl.where(row_ok, row_position, 1 << 30), axis=0) - window + 1, 0)
        lowest = tl.minimum(lowest, cached) // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(num_keys - lowest, BLOCK_N)
    blocks_a_split = tl.cdiv(num_blocks, num_splits)
    begin = lowest + split * blocks_a_split * BLOCK_N
    end = tl.minimum(begin + blocks_a_split * BLOCK_N, num_keys)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for base in range(begin, end, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        key_ok = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=key_ok, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        at = kv_head * kv_head_stride + slot[:, None] * kv_slot_stride + dims[None, :]
        kv_ok = key_ok[:, None] & dim_ok[None, :]
        k = tl.load(keys + at, mask=kv_ok, other=0.0)
        v = tl.load(values + at, mask=kv_ok, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        own = key - cached
        node = own - num_chain
        visible = (own[None, :] <= row[:, None]) & key_ok[None, :] & row_ok[:, None]
        if NUM_WORDS > 0:
            is_node = (node >= 0) & key_ok
            word = tl.load(
                words + packed[:, None] * NUM_WORDS + (node // 64)[None, :],
                mask=is_node[None, :] & row_ok[:, None],
                other=0,
            )
            bit = (word >> (node % 64).to(tl.int64)[None, :]) & 1
            visible = visible & ((node < 0)[None, :] | (bit == 1))
        if HAS_WINDOW:
            key_position = tl.load(positions + start + own, mask=(own >= 0) & key_ok, other=0)
            key_position = tl.where(own >= 0, key_position, key)
            visible = visible & (row_position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that has seen nothing yet has -inf everywhere: subtracting it would make NaN.
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp(scores - safe[:, None])
        decay = tl.exp(highest - safe)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = peak
    seen = total > 0
    result = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(
        output + split * o_split + packed[:, None] * o_row + head[:, None] * o_head + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok[None, :],
    )
    weight = tl.where(seen, highest + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + split * l_split + packed * l_row + head, weight, mask=row_ok)


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """What the kernel needs of a plan, on the device, the same for all layers."""

    tiles: torch.Tensor
    segments: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    words: torch.Tensor
    num_words: int
    block_m: int
    max_keys: int


def ancestor_words(segments: tuple[SegmentPlan, ...]) -> NDArray[np.int64]:
    """int64[T, W]: each row's visible nodes of its own segment as bits, lowest bit first; W = 0 without trees."""
    num_nodes = max(segment.num_rows - segment.num_chain for segment in segments)
    num_words = -(-num_nodes // _WORD_BITS)
    words = np.zeros((sum(segment.num_rows for segment in segments), num_words * 8), np.uint8)
    for segment in segments:
        if segment.visible is not None:
            bits = np.packbits(segment.visible[:, segment.num_chain :], axis=1, bitorder="little")
            words[segment.rows, : bits.shape[1]] = bits
    return words.view(np.int64)


class TritonBackend:
    """Launches the kernel; the per-step tables are made once and used by all layers."""

    name = "triton"

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._launch: _Launch | None = None

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
        rows = query[0].transpose(0, 1)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        num_rows, num_heads, head_dim = rows.shape
        groups = num_heads // keys.shape[0]
        launch = self._launch_for(plan, groups)
        num_splits = _num_splits(len(launch.tiles) * keys.shape[0], launch.max_keys)
        dtype = query.dtype if num_splits == 1 else torch.float32
        output = torch.empty((num_splits, num_rows, num_heads, head_dim), dtype=dtype, device=query.device)
        lse = torch.empty((num_splits, num_rows, num_heads), dtype=torch.float32, device=query.device)
        _tree_attention[(len(launch.tiles), keys.shape[0], num_splits)](
            rows, keys, values, output, lse,
            launch.tiles, launch.segments, launch.tables, launch.positions, launch.words,
            scaling, window or 0, softcap or 1.0,
            rows.stride(0), rows.stride(1),
            keys.stride(0), keys.stride(1),
            output.stride(0), output.stride(1), output.stride(2),
            lse.stride(0), lse.stride(1),
            num_splits,
            GROUPS=groups,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=plan.pool.block_size,
            NUM_WORDS=launch.num_words,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            BLOCK_M=launch.block_m,
            BLOCK_N=_BLOCK_N,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
        if num_splits == 1:
            return output
        shares = torch.softmax(lse, dim=0)[..., None]
        return (output * shares).sum(0, keepdim=True).to(query.dtype)

    def _launch_for(self, plan: StepPlan, groups: int) -> _Launch:
        if self._plan is not plan or self._launch is None:
            self._plan, self._launch = plan, _make_launch(plan, groups)
        return self._launch


def _num_splits(programs: int, max_keys: int) -> int:
    """Enough programs to fill a device, as long as each still has keys worth its start."""
    return max(1, min(_MAX_SPLITS, _PROGRAMS_WANTED // programs, max_keys // _MIN_KEYS_A_SPLIT))


def _make_launch(plan: StepPlan, groups: int) -> _Launch:
    device = plan.input_ids.device
    most_rows = max(segment.num_rows for segment in plan.segments) * groups
    block_m = 16 if most_rows <= 16 else 32 if most_rows <= 32 else 64
    block_m = max(block_m, triton.next_power_of_2(groups))
    rows_a_tile = block_m // groups
    tiles: list[tuple[int, int]] = []
    segments: list[tuple[int, int, int, int, int]] = []
    tables: list[int] = []
    for index, segment in enumerate(plan.segments):
        tiles.extend((index, first) for first in range(0, segment.num_rows, rows_a_tile))
        segments.append((segment.rows.start, segment.num_rows, segment.num_chain, segment.cached_len, len(tables)))
        tables.extend(plan.pool.block_table(segment.sequence))
    words = ancestor_words(plan.segments)

    def put(array: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device)

    return _Launch(
        tiles=put(tiles, torch.int32),
        segments=put(segments, torch.int32),
        tables=put(tables, torch.int32),
        positions=plan.position_ids[0].to(torch.int32),
        words=put(words if words.size else np.zeros((1, 1), np.int64), torch.int64),
        num_words=words.shape[1],
        block_m=block_m,
        max_keys=max(segment.num_keys for segment in plan.segments),
    )

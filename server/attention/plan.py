"""What one step's attention needs, worked out once per step and read by every layer.

The plan is derived from ids, parents and the pool's block tables alone: positions, write slots, which slots each
generation reads, and the tree masks. Backends (``sdpa``, ``triton``) only execute it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.server.batch import Batch, Segment
from paceline.server.kv.pool import KVPool

Slots = slice | torch.Tensor
"""Pool slots, as a slice where they are contiguous (attention then reads views), else int64[n] on the device."""


@dataclass(slots=True, eq=False)
class SegmentPlan:
    """One generation's part of the packed row.

    rows: its rows of the packed batch; the last ``len(visible)`` keys that they may see are their own.
    sequence: the pool's handle.
    cached_len: keys before its own rows; all rows see all of them, windows aside.
    positions: int64[rows], of its rows; key j < cached_len has position j.
    num_chain: leading rows that form a causal chain (all of them where ``is_chain``); the nodes of a tree follow.
    visible: bool[rows, rows], which of the segment's own rows each row sees: a causal chain, then the tree. None for a
        single row and for ``is_chain``.
    is_chain: whether the rows are a plain causal chain without nodes.
    """

    rows: slice
    sequence: int
    cached_len: int
    num_chain: int
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_] | None
    is_chain: bool
    slots: Slots
    device: torch.device
    dtype: torch.dtype
    _masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of this segment."""
        return len(self.positions)

    @property
    def num_keys(self) -> int:
        """Keys that its rows may see at most: the context and the rows themselves."""
        return self.cached_len + len(self.positions)

    def first_key(self, window: int | None) -> int:
        """The first key that any row may see: with a window, keys further back are not even read.

        They stay in the pool all the same: layers share one block table, and the prefix cache wants whole prefixes.
        """
        if window is None:
            return 0
        return min(max(int(self.positions[0]) - window + 1, 0), self.cached_len)

    def read(self, window: int | None) -> Slots:
        """The slots to read, from ``first_key`` on."""
        first = self.first_key(window)
        if isinstance(self.slots, slice):
            return slice(self.slots.start + first, self.slots.stop)
        return self.slots[first:]

    def visible_keys(self, window: int | None) -> NDArray[np.bool_]:
        """bool[rows, keys from ``first_key`` on]: what each row sees. The oracle of every faster path.

        A window hides keys whose *position* is ``window`` or more behind the row's: siblings share a position, and
        nodes lie in slots that say nothing about their depth.
        """
        first = self.first_key(window)
        own = np.tri(self.num_rows, dtype=np.bool_) if self.visible is None else self.visible
        visible = np.concatenate([np.ones((self.num_rows, self.cached_len - first), np.bool_), own], axis=1)
        if window is not None:
            keys = np.concatenate([np.arange(first, self.cached_len), self.positions])
            visible &= self.positions[:, None] - keys[None, :] < window
        return visible

    def mask(self, window: int | None, groups: int) -> torch.Tensor | None:
        """[groups * rows, keys from ``first_key`` on] additive mask, 0 or -inf, the same rows for each query group.

        None if every row sees every key. Made once per step and window, shared by all layers.
        """
        key = (window, groups)
        if key not in self._masks:
            visible = self.visible_keys(window)
            mask = None
            if not visible.all():
                additive = torch.zeros(visible.shape, dtype=self.dtype)
                additive.masked_fill_(torch.from_numpy(~visible), float("-inf"))
                mask = additive.repeat(groups, 1).to(self.device)
            self._masks[key] = mask
        return self._masks[key]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step for all generations.

    input_ids, position_ids: int64[1, T]; write: the slots of the T rows; scored: int64[R], the packed rows whose logits
    are wanted, segment by segment, anchor first and then its nodes.
    """

    pool: KVPool
    segments: tuple[SegmentPlan, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write: Slots
    scored: torch.Tensor


def _segment_positions(segment: Segment) -> NDArray[np.int64]:
    """A node at depth d stands d positions behind the anchor, the last committed token."""
    chain = np.arange(segment.cached_len, segment.cached_len + len(segment.token_ids), dtype=np.int64)
    return np.concatenate([chain, chain[-1] + segment.tree.depths.astype(np.int64)])


def _own_visibility(segment: Segment) -> NDArray[np.bool_] | None:
    """Who sees whom among the segment's rows, or None where that is plainly causal."""
    num_chain, num_nodes = len(segment.token_ids), len(segment.tree)
    if np.array_equal(segment.tree.parents, np.arange(-1, num_nodes - 1)):
        return None
    visible = np.tri(num_chain + num_nodes, dtype=np.bool_)
    visible[num_chain:, num_chain:] = segment.tree.ancestor_mask()
    return visible


def _slots_of(pool: KVPool, segment: Segment, start: int) -> NDArray[np.int64] | slice:
    stop = segment.cached_len + segment.num_rows
    first = pool.first_slot(segment.sequence)
    return slice(first + start, first + stop) if first is not None else pool.slots(segment.sequence, start, stop)


def _on_device(slots: NDArray[np.int64] | slice, device: torch.device) -> Slots:
    return slots if isinstance(slots, slice) else torch.from_numpy(slots).to(device)


def _joined(parts: list[NDArray[np.int64] | slice], device: torch.device) -> Slots:
    if len(parts) == 1:
        return _on_device(parts[0], device)
    arrays = [np.arange(part.start, part.stop) if isinstance(part, slice) else part for part in parts]
    return torch.from_numpy(np.concatenate(arrays)).to(device)


def plan_step(batch: Batch, pool: KVPool) -> StepPlan:
    """Lays out a batch. The pool must have room reserved for every segment's rows behind its ``cached_len``."""
    device, dtype = pool.data.device, pool.data.dtype
    segments: list[SegmentPlan] = []
    writes: list[NDArray[np.int64] | slice] = []
    scored: list[NDArray[np.int64]] = []
    row = 0
    for segment in batch.segments:
        num_rows = segment.num_rows
        visible = _own_visibility(segment)
        segments.append(
            SegmentPlan(
                rows=slice(row, row + num_rows),
                sequence=segment.sequence,
                cached_len=segment.cached_len,
                num_chain=num_rows if visible is None else len(segment.token_ids),
                positions=_segment_positions(segment),
                visible=visible,
                is_chain=visible is None,
                slots=_on_device(_slots_of(pool, segment, 0), device),
                device=device,
                dtype=dtype,
            )
        )
        writes.append(_slots_of(pool, segment, segment.cached_len))
        if segment.wants_logits:
            scored.append(np.arange(row + len(segment.token_ids) - 1, row + num_rows, dtype=np.int64))
        row += num_rows
    ids = [part for segment in batch.segments for part in (segment.token_ids, segment.tree.tokens)]
    positions = np.concatenate([segment.positions for segment in segments])
    return StepPlan(
        pool=pool,
        segments=tuple(segments),
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(positions)[None].to(device),
        write=_joined(writes, device),
        scored=torch.from_numpy(np.concatenate([*scored, np.zeros(0, np.int64)])).to(device),
    )

"""The past keys and values of one draft sequence: laid out in buckets, shared with ONNX Runtime, not copied per call.

Layout of the slots: committed tokens first, in order, then the live tree's nodes. The whole capacity is an input of
every call and the mask hides what is unused, so a bucket that is too large costs attention time: buckets of usual
lengths are 64 slots apart, those of long texts grow by a third to a half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BUCKETS: tuple[int, ...] = (*range(128, 1024, 64), *range(1024, 2048, 128), 2048, 3072, 4096, 6144, 8192)


def bucket_for(num_slots: int) -> int:
    """The smallest bucket that holds that many slots; beyond the table, multiples of 4,096."""
    for size in _BUCKETS:
        if num_slots <= size:
            return size
    return -(-num_slots // 4096) * 4096


class KVBuffer:
    """float32[L, 2, Hkv, S, D]: keys (0) and values (1) of every layer, S slots.

    The memory is one block that only ever grows: a short text after a long one uses its beginning, so that it is as
    quick as the first one was and nothing is allocated again.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, num_slots: int = _BUCKETS[0]) -> None:
        self._shape = (num_layers, 2, num_kv_heads, head_dim)
        self._block: NDArray[np.float32] = np.zeros(0, np.float32)
        self._lay_out(bucket_for(num_slots))

    def _lay_out(self, capacity: int) -> None:
        num_layers, _, num_kv_heads, head_dim = self._shape
        size = num_layers * 2 * num_kv_heads * capacity * head_dim
        if size > len(self._block):
            self._block = np.zeros(size, np.float32)
        self.array = self._block[:size].reshape(num_layers, 2, num_kv_heads, capacity, head_dim)
        self._feeds: dict[str, Any] | None = None

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return int(self.array.shape[3])

    @property
    def num_bytes(self) -> int:
        """Memory held, the unused end of the block included."""
        return self._block.nbytes

    @property
    def feeds(self) -> dict[str, Any]:
        """The past inputs of the graph, as values that share this buffer's memory."""
        if self._feeds is None:
            from onnxruntime import OrtValue

            self._feeds = {}
            for layer in range(self._shape[0]):
                self._feeds[f"past_key_{layer}"] = OrtValue.ortvalue_from_numpy(self.array[layer, 0])
                self._feeds[f"past_value_{layer}"] = OrtValue.ortvalue_from_numpy(self.array[layer, 1])
        return self._feeds

    def empty(self) -> None:
        """For another text: few slots again, whatever the last one took. The memory stays."""
        if self.capacity > _BUCKETS[0]:
            self._lay_out(_BUCKETS[0])

    def reserve(self, num_slots: int, num_used: int) -> None:
        """Make room for ``num_slots``; the first ``num_used`` keep what they hold."""
        if num_slots <= self.capacity:
            return
        held = self.array[:, :, :, :num_used].copy()  # the new layout lies on the old one
        self._lay_out(bucket_for(num_slots))
        self.array[:, :, :, :num_used] = held

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots all at once; the two sets may overlap."""
        moved = source != target
        if moved.any():
            self.array[:, :, :, target[moved]] = self.array[:, :, :, source[moved]]

    def write(self, slots: NDArray[np.int64], new_kv: NDArray[np.float32]) -> None:
        """Store new_kv float32[L, 2, Hkv, n, D] in n slots."""
        if len(slots):
            self.array[:, :, :, slots] = new_kv

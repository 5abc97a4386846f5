"""A small draft model in ONNX Runtime: one session call per tree level, past KV in a buffer of its own.

The graph's interface is described in ``paceline.models.export``. A call feeds the committed tokens that the model has
not seen and the nodes to expand, side by side in one row with explicit positions and a tree mask, and writes the new
keys and values into the buffer. A commit moves the accepted nodes' KV to the end of the committed part and keeps the
survivors'; everything else is overwritten later. Nothing is computed twice.

Threads: as many as asked for, never more than this process may use (affinity, container quota), and none that spins.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, DraftRequest, DraftSequence, find_keys
from paceline.client.drafting.kv_buffer import KVBuffer
from paceline.shared.errors import BundleError

_HIDDEN = np.float32(-1e9)
_OUTPUTS = ("top_ids", "top_logprobs", "new_kv")
_CHUNK_LEN = 128
_MAX_AUTO_THREADS = 4
_MAX_SPARE_BUFFERS = 4
_CGROUP_QUOTA = "/sys/fs/cgroup/cpu.max"


def available_cpus() -> int:
    """CPUs that this process may use: its affinity and its container's quota, at least 1 (U085)."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    try:
        quota, period = Path(_CGROUP_QUOTA).read_text(encoding="ascii").split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group, or version 1: affinity alone counts
    return max(1, count)


def thread_count(wanted: int | None) -> int:
    """Threads for the draft model. wanted: a setting, or None: half of what is available, at most 4."""
    available = available_cpus()
    if wanted is None:
        return max(1, min(_MAX_AUTO_THREADS, available // 2))
    return max(1, min(wanted, available))


class OnnxDrafter:
    """One ONNX draft model; any number of sequences share its weights and reuse each other's buffers.

    takes_width: whether the graph finds fewer candidates for less (older ones always find all).
    """

    def __init__(
        self, model: Path | bytes, *, name: str = "ssm", max_context: int = 8192, threads: int | None = None
    ) -> None:
        """Raises ``BundleError`` if ONNX Runtime cannot load the graph or its inputs are not the expected ones."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        source = model if isinstance(model, bytes) else str(model)
        try:
            session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"expected a draft graph that this runtime can load, got: {error}") from error
        inputs = {entry.name: entry.shape for entry in session.get_inputs()}
        if "past_key_0" not in inputs or "mask" not in inputs:
            raise BundleError(f"expected inputs mask and past_key_0 in the draft graph, got {', '.join(inputs)}")
        self._session: Any = session
        self._num_layers = sum(name.startswith("past_key_") for name in inputs)
        self._outputs = (*_OUTPUTS, "extra_logprobs") if "extra_ids" in inputs else _OUTPUTS
        self.takes_width = any(entry.name == "width" for entry in session.get_overridable_initializers())
        self._num_kv_heads, _, self._head_dim = inputs["past_key_0"]
        self._spare: list[KVBuffer] = []
        self.name = name
        self.is_instant = False
        self.max_context = max_context
        self.chunk_len = _CHUNK_LEN

    def start(self) -> DraftSequence:
        buffer = self._spare.pop() if self._spare else KVBuffer(self._num_layers, self._num_kv_heads, self._head_dim)
        return OnnxSequence(self, buffer)

    @property
    def takes_extra(self) -> bool:
        """Whether the graph scores tokens by request (older ones do not)."""
        return len(self._outputs) > len(_OUTPUTS)

    def take_back(self, buffer: KVBuffer) -> None:
        """Keep a buffer for the next sequence."""
        if len(self._spare) < _MAX_SPARE_BUFFERS:
            buffer.empty()
            self._spare.append(buffer)

    def run(self, buffer: KVBuffer, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Top ids int32[m, K], their logprobs float32[m, K], new KV float32[L, 2, Hkv, n, D], and float32[m, x] for
        the x ``extra_ids`` if the graph takes any."""
        from onnxruntime import OrtValue

        values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        values.update(buffer.feeds)
        return [value.numpy() for value in self._session.run_with_ort_values(self._outputs, values)]

    def close(self) -> None:
        self._spare.clear()
        self._session = None  # the weights go with it


class OnnxSequence:
    """KV of one generation. Tree nodes are kept as parallel arrays, ordered by key.

    held: committed tokens in slots 0..held-1. keys: int64[t], nodes with KV. slots: int64[t]. ancestors: bool[t, t],
    row i marks node i and its ancestors among the t nodes.
    """

    def __init__(self, drafter: OnnxDrafter, buffer: KVBuffer) -> None:
        self._drafter = drafter
        self._buffer = buffer
        self._held = 0
        self._keys = np.zeros(0, np.int64)
        self._slots = np.zeros(0, np.int64)
        self._ancestors = np.zeros((0, 0), np.bool_)
        self._new_rows = self._ancestors

    def expand(self, request: DraftRequest) -> Candidates:
        num_known = self._commit(request)
        pending = request.token_ids[num_known:]
        first_new = request.start + num_known
        num_pending, num_nodes = len(pending), len(request.keys)
        if not num_pending + num_nodes:
            return Candidates.empty(0)
        num_old, old_slots = len(self._keys), self._slots
        node_slots = self._held + num_old + np.arange(num_nodes)
        self._buffer.reserve(self._held + num_old + num_nodes, self._held + num_old)
        self._adopt(request, node_slots)
        num_rows = request.num_rows
        feeds = {
            "ids": np.concatenate([pending, request.tokens]).astype(np.int64)[None],
            "positions": np.concatenate(
                [np.arange(first_new, self._held), self._held - 1 + request.depths.astype(np.int64)]
            )[None],
            "mask": self._mask(first_new, num_pending, old_slots)[None, None],
            "rows": np.arange(num_pending + num_nodes - max(1, num_rows), num_pending + num_nodes),
        }
        if self._drafter.takes_extra:
            feeds["extra_ids"] = request.extra_ids.astype(np.int64)
        if self._drafter.takes_width:
            feeds["width"] = np.array([max(1, request.width)])
        ids, logprobs, new_kv, *extra = self._drafter.run(self._buffer, feeds)
        self._buffer.write(np.concatenate([np.arange(first_new, self._held), node_slots]), new_kv)
        width = min(request.width, ids.shape[1])
        best = Candidates(ids[:num_rows, :width], logprobs[:num_rows, :width])
        return best.with_extra(request.extra_ids, extra[0][:num_rows]) if extra else best

    def _commit(self, request: DraftRequest) -> int:
        """Move the KV of committed nodes and survivors into place; returns how many new tokens have KV already."""
        inside, is_held = find_keys(request.path_keys, self._keys)
        known = is_held & (request.path_keys != ANCHOR_KEY)
        num_known = len(known) if known.all() else int(np.argmin(known))
        if request.wants_anchor and num_known == len(known):
            num_known = max(0, num_known - 1)  # the anchor's candidates were asked for, so it must run
        path = inside[:num_known]
        alive = np.flatnonzero(find_keys(self._keys, request.alive_keys)[1])
        self._held = request.committed_len
        base = np.arange(request.start, request.start + num_known)
        if len(request.token_ids) or len(alive) < len(self._keys):
            targets = np.concatenate([base, self._held + np.arange(len(alive))])
            self._buffer.reserve(self._held + len(alive), int(self._slots.max(initial=request.start - 1)) + 1)
            self._buffer.move(np.concatenate([self._slots[path], self._slots[alive]]), targets)
            self._keys = self._keys[alive]
            self._slots = self._held + np.arange(len(alive))
            self._ancestors = self._ancestors[np.ix_(alive, alive)]
        return num_known

    def _adopt(self, request: DraftRequest, node_slots: NDArray[np.int64]) -> None:
        """Add the request's nodes to the arrays, with their ancestors."""
        num_old, num_new = len(self._keys), len(request.keys)
        if not num_new:
            return
        ancestors = np.zeros((num_old + num_new, num_old + num_new), np.bool_)
        ancestors[:num_old, :num_old] = self._ancestors
        row_of = {key: row for row, key in enumerate([*self._keys.tolist(), *request.keys.tolist()])}
        for offset, parent_key in enumerate(request.parent_keys.tolist()):
            row = num_old + offset
            if parent_key != ANCHOR_KEY:
                ancestors[row] = ancestors[row_of[parent_key]]
            ancestors[row, row] = True
        keys = np.concatenate([self._keys, request.keys])
        order = np.argsort(keys)
        self._new_rows = ancestors[num_old:]
        self._keys = keys[order]
        self._slots = np.concatenate([self._slots, node_slots])[order]
        self._ancestors = ancestors[np.ix_(order, order)]

    def _mask(self, first_new: int, num_pending: int, old_slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32[n, S + n], additive. Pending tokens are causal; nodes see all committed ones and their ancestors."""
        capacity, num_old = self._buffer.capacity, len(old_slots)
        num_nodes = len(self._keys) - num_old
        total = num_pending + num_nodes
        visible = np.zeros((total, capacity + total), np.bool_)
        visible[:, :first_new] = True
        visible[:num_pending, capacity : capacity + num_pending] = np.tri(num_pending, dtype=np.bool_)
        if num_nodes:
            visible[num_pending:, old_slots] = self._new_rows[:, :num_old]
            visible[num_pending:, capacity : capacity + num_pending] = True
            visible[num_pending:, capacity + num_pending :] = self._new_rows[:, num_old:]
        return np.where(visible, np.float32(0), _HIDDEN)

    def close(self) -> None:
        self._drafter.take_back(self._buffer)

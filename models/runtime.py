"""Runs an exported draft graph the plain way: one text, its past in a buffer, trees by mask.

For export checks and offline evaluation. Not for: drafting in production (`paceline.client.drafting` keeps buffers,
buckets and trees between calls).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HIDDEN = np.float32(-1e9)
NUM_FIXED_INPUTS = 4


@dataclass(frozen=True, slots=True)
class Candidates:
    """ids int32[m, K] in the target's numbering and logprobs float32[m, K], best first."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class GraphRunner:
    """A session with one past buffer. Slots 0..len-1 hold the text so far."""

    def __init__(self, model: Path | bytes, capacity: int, num_threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        source: Any = model if isinstance(model, bytes) else str(model)
        self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        names = self.session.get_inputs()
        num_layers = (len(names) - NUM_FIXED_INPUTS) // 2
        num_kv_heads, _, head_dim = names[NUM_FIXED_INPUTS].shape
        self.kv = np.zeros((num_layers, 2, num_kv_heads, capacity, head_dim), np.float32)
        self.len = 0

    def forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        visible: NDArray[np.bool_],
        rows: NDArray[np.int64],
    ) -> tuple[Candidates, NDArray[np.float32]]:
        """Runs n nodes; visible bool[n, capacity + n]. Returns candidates of `rows` and the new keys and values."""
        feeds: dict[str, Any] = {"ids": ids[None], "positions": positions[None], "rows": rows}
        feeds["mask"] = np.where(visible, np.float32(0), HIDDEN)[None, None]
        for layer in range(len(self.kv)):
            feeds[f"past_key_{layer}"], feeds[f"past_value_{layer}"] = self.kv[layer]
        top_ids, top_logprobs, new_kv = self.session.run(["top_ids", "top_logprobs", "new_kv"], feeds)
        return Candidates(top_ids, top_logprobs), new_kv

    def append(self, ids: NDArray[np.int64], want_all: bool = True) -> Candidates:
        """Runs the next tokens of the text and keeps them. Candidates for what follows each (or only the last)."""
        num, capacity = len(ids), self.kv.shape[3]
        visible = np.zeros((num, capacity + num), bool)
        visible[:, : self.len] = True
        visible[:, capacity:] = np.tril(np.ones((num, num), bool))
        rows = np.arange(num) if want_all else np.array([num - 1])
        candidates, new_kv = self.forward(np.asarray(ids, np.int64), self.len + np.arange(num), visible, rows)
        self.kv[:, :, :, self.len : self.len + num] = new_kv
        self.len += num
        return candidates

    def crop(self, length: int) -> None:
        """Forgets everything behind the first `length` tokens."""
        self.len = min(self.len, length)

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
_NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """ids int32[m, K] in the target's numbering and logprobs float32[m, K], best first.

    extra: float32[m, x], log-probabilities of the extra tokens that were asked for.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    extra: NDArray[np.float32]


class GraphRunner:
    """A session with one past buffer. Slots 0..len-1 hold the text so far."""

    def __init__(self, model: Path | bytes, capacity: int, num_threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3  # warnings speak of what is meant to be: inputs that have a default
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        source: Any = model if isinstance(model, bytes) else str(model)
        self.session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        shapes = {entry.name: entry.shape for entry in self.session.get_inputs()}
        num_layers = sum(name.startswith("past_key_") for name in shapes)
        num_kv_heads, _, head_dim = shapes["past_key_0"]
        self.takes_extra = "extra_ids" in shapes
        self.kv = np.zeros((num_layers, 2, num_kv_heads, capacity, head_dim), np.float32)
        self.len = 0

    def forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        visible: NDArray[np.bool_],
        rows: NDArray[np.int64],
        extra_ids: NDArray[np.int64] = _NO_IDS,
    ) -> tuple[Candidates, NDArray[np.float32]]:
        """Runs n nodes; visible bool[n, capacity + n]. Returns candidates of `rows` and the new keys and values.

        extra_ids: int64[x], tokens to be scored for every row, if the graph can.
        """
        feeds: dict[str, Any] = {"ids": ids[None], "positions": positions[None], "rows": rows}
        feeds["mask"] = np.where(visible, np.float32(0), HIDDEN)[None, None]
        for layer in range(len(self.kv)):
            feeds[f"past_key_{layer}"], feeds[f"past_value_{layer}"] = self.kv[layer]
        wanted = ["top_ids", "top_logprobs", "new_kv"]
        if self.takes_extra:
            feeds["extra_ids"] = extra_ids
            wanted.append("extra_logprobs")
        top_ids, top_logprobs, new_kv, *extra = self.session.run(wanted, feeds)
        scored = extra[0] if extra else np.zeros((len(rows), 0), np.float32)
        return Candidates(top_ids, top_logprobs, scored), new_kv

    def append(
        self, ids: NDArray[np.int64], want_all: bool = True, extra_ids: NDArray[np.int64] = _NO_IDS
    ) -> Candidates:
        """Runs the next tokens of the text and keeps them. Candidates for what follows each (or only the last)."""
        num, capacity = len(ids), self.kv.shape[3]
        visible = np.zeros((num, capacity + num), bool)
        visible[:, : self.len] = True
        visible[:, capacity:] = np.tril(np.ones((num, num), bool))
        rows = np.arange(num) if want_all else np.array([num - 1])
        positions = self.len + np.arange(num)
        candidates, new_kv = self.forward(np.asarray(ids, np.int64), positions, visible, rows, extra_ids)
        self.kv[:, :, :, self.len : self.len + num] = new_kv
        self.len += num
        return candidates

    def crop(self, length: int) -> None:
        """Forgets everything behind the first `length` tokens."""
        self.len = min(self.len, length)

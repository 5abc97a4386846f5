"""Recordings: what the target wrote for a prompt, and what the drafter would have proposed at each of its positions.

The target's greedy output, and its coupled output for a seed, do not depend on the drafter (DESIGN.md section 6). So
one recording serves every link, step time and method, and a simulation needs no model. Off the recorded path nothing a
drafter says can be accepted; only how sure it sounds matters there, because it decides where nodes are spent. Those
answers are drawn from the drafter's own answers below wrong tokens, picked by position and token.

Not here: making recordings with real models (``recorder``), and playing them to a session (``playback``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.shared.errors import UsageError

FORMAT = 1
SHIPPED = Path(__file__).with_name("recordings") / "smollm2.npz"
"""The recorded set that comes with the package: our own prompts, the embedded pair."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Candidates of a drafter, one row per position. token_ids: int32[r, k]; logprobs: float32[r, k], descending."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.token_ids)

    def at(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows(self.token_ids[rows], self.logprobs[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One prompt. prompt: int32[p]; output: int32[m], which ends with the end of text if the target ended.

    on_path: m rows, row j after prompt + output[:j]. off_path: rows below wrong tokens, in no order.
    temperature, seed: how the output was sampled; 0 is greedy.
    """

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    on_path: Rows
    off_path: Rows
    temperature: float = 0.0
    seed: int = 0

    @property
    def hit_rank(self) -> NDArray[np.int64]:
        """int64[m]: the rank at which the drafter has the recorded token, k where it has not."""
        hits = self.on_path.token_ids == self.output[:, None]
        ranks: NDArray[np.int64] = np.where(hits.any(1), hits.argmax(1), self.on_path.token_ids.shape[1])
        return ranks


@dataclass(frozen=True, slots=True, eq=False)
class RecordingSet:
    """Recordings of one pair. meta: plain values that say which pair, when and how."""

    recordings: tuple[Recording, ...]
    meta: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write one compressed archive of arrays: ids as uint16 where they fit, log-probabilities as float16."""
        highest = max(int(array.max(initial=0)) for r in self.recordings for array in (r.prompt, r.output))
        highest = max([highest, *(int(rows.token_ids.max(initial=0)) for rows in self._all_rows())])
        dtype: type[np.unsignedinteger[Any]] = np.uint16 if highest < 1 << 16 else np.uint32
        arrays: dict[str, NDArray[Any]] = {
            "meta": np.frombuffer(json.dumps({**self.meta, "format": FORMAT}).encode(), np.uint8),
            "temperatures": np.array([r.temperature for r in self.recordings], np.float64),
            "seeds": np.array([r.seed for r in self.recordings], np.uint64),
        }
        parts: dict[str, list[NDArray[Any]]] = {
            "prompt": [r.prompt.astype(dtype) for r in self.recordings],
            "output": [r.output.astype(dtype) for r in self.recordings],
            "on_ids": [r.on_path.token_ids.astype(dtype) for r in self.recordings],
            "on_logprobs": [r.on_path.logprobs.astype(np.float16) for r in self.recordings],
            "off_ids": [r.off_path.token_ids.astype(dtype) for r in self.recordings],
            "off_logprobs": [r.off_path.logprobs.astype(np.float16) for r in self.recordings],
        }
        for name, pieces in parts.items():
            arrays[name] = np.concatenate(pieces)
            arrays[f"{name}_len"] = np.array([len(piece) for piece in pieces], np.int64)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    def _all_rows(self) -> list[Rows]:
        return [rows for r in self.recordings for rows in (r.on_path, r.off_path)]

    @classmethod
    def load(cls, path: Path) -> RecordingSet:
        """Read an archive. Raises ``UsageError`` if it is missing or not one of ours."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            meta = json.loads(arrays["meta"].tobytes())
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}")
            pieces = {
                name: np.split(arrays[name], np.cumsum(arrays[f"{name}_len"])[:-1])
                for name in ("prompt", "output", "on_ids", "on_logprobs", "off_ids", "off_logprobs")
            }
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"expected recordings of format {FORMAT} in {path}, got none ({error})") from error
        recordings = tuple(
            Recording(
                pieces["prompt"][i].astype(np.int32),
                pieces["output"][i].astype(np.int32),
                Rows(pieces["on_ids"][i].astype(np.int32), pieces["on_logprobs"][i].astype(np.float32)),
                Rows(pieces["off_ids"][i].astype(np.int32), pieces["off_logprobs"][i].astype(np.float32)),
                float(arrays["temperatures"][i]),
                int(arrays["seeds"][i]),
            )
            for i in range(len(arrays["seeds"]))
        )
        return cls(recordings, meta)


def coverage(recordings: Sequence[Recording], rank: int) -> float:
    """Share of positions at which the recorded token is among the drafter's first ``rank`` candidates."""
    ranks = np.concatenate([recording.hit_rank for recording in recordings])
    return float((ranks < rank).mean())

"""Times a few real steps at start, so that the scheduler knows what a row costs before the first client comes.

The fastest of some steps with one row and with many, the same sizes that decoding and verification have: whatever else
the machine does while the server starts makes steps slower, never faster. What steps really take is learnt later.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.server.batch import Batch, Segment
from paceline.server.target import Target
from paceline.shared.messages import StepTime
from paceline.shared.tree import TokenTree

_CONTEXT = 64
_ROWS = (1, 33)
_REPEATS = 2
_HANDLE = -2


def calibrate(target: Target) -> StepTime:
    """Seconds per step and per row on this machine; takes a few steps and leaves the pool as it was."""
    pool = target.pool
    context = min(_CONTEXT, target.info.max_context // 2, pool.num_slots // 2)
    tokens = np.arange(context, dtype=np.int32) % target.info.vocab_size
    num_nodes = max(min(_ROWS[1] - 1, pool.num_slots - context - pool.block_size), 0)
    pool.open(_HANDLE, tokens)
    try:
        if not pool.reserve(_HANDLE, context + num_nodes):
            return StepTime(0.01, 0.0001)
        cached = pool.length(_HANDLE)
        target.forward(Batch((Segment(_HANDLE, cached, tokens[cached:], TokenTree.empty()),)))
        pool.commit(_HANDLE, cached, range(context - cached))
        times = [_fastest(target, tokens, tree) for tree in (TokenTree.empty(), _bush(num_nodes, target))]
    finally:
        pool.free(_HANDLE)
    per_row = max((times[1] - times[0]) / max(num_nodes, 1), 0.0)
    return StepTime(max(times[0] - per_row, 0.0), per_row)


def _bush(num_nodes: int, target: Target) -> TokenTree:
    parents = (np.arange(num_nodes, dtype=np.int32) // 2) - 1
    return TokenTree(np.arange(num_nodes, dtype=np.int32) % target.info.vocab_size, parents)


def _fastest(target: Target, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], tree: TokenTree) -> float:
    last = len(tokens) - 1
    batch = Batch((Segment(_HANDLE, last, tokens[last:], tree),))
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        # Reading one number waits for the device.
        float(target.forward(batch)[0, 0])
        times.append(time.perf_counter() - began)
    return min(times[1:])

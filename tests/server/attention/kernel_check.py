"""Holds the Triton kernel to the SDPA oracle; run as a script with the device as its argument.

On the CPU under Triton's interpreter. A process of its own, because Triton reads the variable that turns it on when it
is first imported. Prints the largest difference.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1:] == ["cpu"]:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from paceline.server.attention import tree_kernel
from paceline.server.attention.plan import plan_step
from paceline.server.attention.sdpa import SdpaBackend
from paceline.server.batch import Batch, Segment
from paceline.server.kv.pool import KVPool
from paceline.shared.tree import TokenTree

EMPTY = TokenTree.empty()


def random_tree(rng: np.random.Generator, size: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) for i in range(size)], np.int32)
    return TokenTree(np.arange(size, dtype=np.int32), parents)


def worst_difference(
    device: str, seed: int, kv_heads: int, groups: int, head_dim: int, options: dict[str, object]
) -> float:
    """A batch of decoding, prefill, small and big trees over interleaved blocks with NaN wherever nothing is valid."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    pool = KVPool(64, 8, 1, kv_heads, head_dim, torch.float32, device)
    shapes = [(0, 21, EMPTY), (37, 1, EMPTY), (19, 3, random_tree(rng, 9)), (5, 1, random_tree(rng, 70))]
    totals = [cached + chain + len(tree) for cached, chain, tree in shapes]
    for handle, total in enumerate(totals):
        pool.open(handle, np.zeros(total, np.int32))
        assert pool.reserve(handle, min(8, total))
    # Fill the pool with one-block generations, then let go of every second one: what grows now is scattered.
    fillers = range(100, 100 + pool.num_free_blocks)
    for filler in fillers:
        pool.open(filler, np.zeros(1, np.int32))
        assert pool.reserve(filler, 1)
    for filler in fillers[::2]:
        pool.free(filler)
    for handle, total in enumerate(totals):
        assert pool.reserve(handle, total)
    assert pool.first_slot(2) is None
    pool.data.fill_(float("nan"))
    for handle, total in enumerate(totals):
        slots = torch.from_numpy(pool.slots(handle, 0, total))
        pool.data[:, :, :, slots] = torch.randn(1, 2, kv_heads, total, head_dim).to(device)
    batch = Batch(
        tuple(
            Segment(handle, cached, np.zeros(chain, np.int32), tree)
            for handle, (cached, chain, tree) in enumerate(shapes)
        )
    )
    plan = plan_step(batch, pool)
    query = torch.randn(1, kv_heads * groups, batch.num_rows, head_dim).to(device)
    arguments = {"scaling": 0.3, "window": None, "softcap": None, **options}
    expected = SdpaBackend().attend(query, 0, plan, **arguments)
    actual = tree_kernel.TritonBackend().attend(query, 0, plan, **arguments)
    assert not torch.isnan(actual).any()
    return float((actual - expected).abs().max())


def main(device: str) -> None:
    torch.set_num_threads(1)
    both: dict[str, object] = {"window": 6, "softcap": 2.0}
    worst = max(worst_difference(device, 1, 1, 4, 16, {}), worst_difference(device, 2, 2, 3, 24, both))
    tree_kernel._MIN_KEYS_A_SPLIT = 8  # forces the split over the context
    worst = max(worst, worst_difference(device, 3, 2, 3, 16, {"window": 6}))
    print(f"{worst:.3g}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a generation reads is its own valid KV: poisoned blocks, fragments, prefix hits and company change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.server.attention.plan import plan_step
from paceline.server.batch import Batch, Segment
from paceline.shared.tree import TokenTree

TREE = TokenTree([11, 12, 13, 14, 15, 16], [-1, 0, 0, -1, 3, -1])
EMPTY = TokenTree.empty()
FAMILIES = ["llama", "gemma2", "gpt2"]


def ids(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(3, 97, size).astype(np.int32)


def prefill(target: Any, handle: int, text: Any) -> int:
    """Opens a generation and computes all but its last token; returns how many tokens the cache had."""
    found = target.pool.open(handle, text)
    assert target.pool.reserve(handle, len(text) + len(TREE))
    if found < len(text) - 1:
        target.forward(Batch((Segment(handle, found, text[found:-1], EMPTY, wants_logits=False),)))
        target.pool.commit(handle, found, range(len(text) - 1 - found))
    return int(found)


def verify(target: Any, handle: int, text: Any) -> Any:
    return target.forward(Batch((Segment(handle, len(text) - 1, text[-1:], TREE),))).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_poisoned_free_blocks_change_nothing(family: str, make_rig: Callable[..., Any]) -> None:
    target = make_rig(family).target
    text = ids(1, 21)
    prefill(target, 9, ids(2, 50))
    prefill(target, 1, text)
    expected = verify(target, 1, text)
    target.pool.free(9)
    target.pool.poison_free_blocks()
    np.testing.assert_array_equal(verify(target, 1, text), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits_and_the_last_token_of_a_shared_block(family: str, make_rig: Callable[..., Any]) -> None:
    rig = make_rig(family)
    target = rig.target
    text = ids(1, 2 * target.pool.block_size)
    assert prefill(target, 1, text) == 0
    verify(target, 1, text)
    target.pool.commit(1, len(text) - 1, [0])
    target.pool.publish(1, text)
    assert prefill(target, 2, text) == len(text) - 1
    changed = np.concatenate([text[:-1], ids(3, 1)])
    assert prefill(target, 3, changed) == target.pool.block_size
    longer = np.concatenate([text, ids(4, 5)])
    assert prefill(target, 4, longer) == len(text)
    for handle, own in ((2, text), (3, changed), (4, longer)):
        np.testing.assert_allclose(verify(target, handle, own), rig.plain_tree(own, TREE), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_blocks_give_the_same_logits(family: str, make_rig: Callable[..., Any]) -> None:
    rig = make_rig(family)
    pool = rig.target.pool
    fillers = range(100, 100 + pool.num_free_blocks)
    for filler in fillers:
        pool.open(filler, ids(1, 1))
        assert pool.reserve(filler, 1)
    for filler in fillers[::3]:
        pool.free(filler)
    text = ids(5, 37)
    prefill(rig.target, 1, text)
    assert pool.first_slot(1) is None
    np.testing.assert_allclose(verify(rig.target, 1, text), rig.plain_tree(text, TREE), atol=1e-4, rtol=1e-4)


def test_company_in_the_batch_does_not_leak(make_rig: Callable[..., Any]) -> None:
    rig = make_rig("llama")
    texts = {handle: ids(handle, 5 + 3 * handle) for handle in range(16)}
    for handle, text in texts.items():
        prefill(rig.target, handle, text)
    order = np.random.default_rng(0).permutation(16)
    batch = Batch(tuple(Segment(int(h), len(texts[h]) - 1, texts[h][-1:], TREE if h % 3 else EMPTY) for h in order))
    logits = rig.target.forward(batch).numpy()
    expected = np.concatenate([rig.plain_tree(texts[h], TREE if h % 3 else EMPTY) for h in order])
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_window_reads_no_key_that_no_row_can_see(make_rig: Callable[..., Any]) -> None:
    target = make_rig("mistral").target
    text = ids(1, 40)
    prefill(target, 1, text)
    plan = plan_step(Batch((Segment(1, len(text) - 1, text[-1:], TREE),)), target.pool)
    segment = plan.segments[0]
    assert segment.visible_keys(8).shape == (1 + len(TREE), 7 + 1 + len(TREE))
    expected = verify(target, 1, text)
    keys = torch.from_numpy(target.pool.slots(1, 0, segment.first_key(8)))
    target.pool.data[:, :, :, keys] = float("nan")
    np.testing.assert_array_equal(verify(target, 1, text), expected)

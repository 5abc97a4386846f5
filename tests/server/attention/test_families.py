"""Tree-verified logits equal each model family's own plain forward pass along every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.server.batch import Batch, Segment
from paceline.shared.tree import TokenTree

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt_neox", "gpt2", "opt"]
TREE = TokenTree([11, 12, 13, 14, 15, 16, 11, 17], [-1, 0, 1, 1, 0, -1, 5, 6])
CHAIN = TokenTree.chain([21, 22, 23])
EMPTY = TokenTree.empty()


def ids(seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(3, 97, size).astype(np.int32)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_tree_logits_equal_plain_forward_on_every_path(family: str, make_rig: Callable[..., Any]) -> None:
    rig = make_rig(family)
    pool, forward = rig.target.pool, rig.target.forward
    texts = {1: ids(1, 37), 2: ids(2, 5), 3: ids(3, 18), 4: ids(4, 1)}
    trees = {1: TREE, 2: CHAIN, 3: EMPTY, 4: TREE}
    for handle, text in texts.items():
        assert pool.open(handle, text) == 0
        assert pool.reserve(handle, len(text) + 8)
    # Chunked prefill of generation 1 shares the first step with the whole prompt of 3; 2 and 4 start with their trees.
    forward(
        Batch((Segment(1, 0, texts[1][:20], EMPTY, wants_logits=False), Segment(3, 0, texts[3][:17], EMPTY, False)))
    )
    pool.commit(1, 0, range(20))
    pool.commit(3, 0, range(17))
    segments = (
        Segment(2, 0, texts[2], trees[2]),
        Segment(1, 20, texts[1][20:30], EMPTY, wants_logits=False),
        Segment(3, 17, texts[3][17:], trees[3]),
        Segment(4, 0, texts[4], trees[4]),
    )
    logits = forward(Batch(segments)).numpy()
    pool.commit(1, 20, range(10))
    expected = np.concatenate([rig.plain_tree(texts[handle], trees[handle]) for handle in (2, 3, 4)])
    close(logits, expected)
    close(forward(Batch((Segment(1, 30, texts[1][30:], TREE),))).numpy(), rig.plain_tree(texts[1], TREE))


@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_accepted_path_continues_like_plain_text(family: str, make_rig: Callable[..., Any]) -> None:
    rig = make_rig(family)
    pool = rig.target.pool
    text = ids(5, 11)
    pool.open(1, text)
    accepted = TREE.path(7)  # the last sibling everywhere: nothing of it lies in place
    pool.reserve(1, len(text) + len(TREE))
    rig.target.forward(Batch((Segment(1, 0, text, TREE),)))
    moved = pool.commit(1, 0, [*range(len(text)), *(len(text) + node for node in accepted)])
    assert moved == len(accepted) * pool.slot_bytes
    text = np.concatenate([text, TREE.tokens[accepted], ids(6, 1)])
    for _ in range(3):
        pool.reserve(1, len(text) + len(TREE))
        logits = rig.target.forward(Batch((Segment(1, len(text) - 1, text[-1:], TREE),))).numpy()
        close(logits, rig.plain_tree(text, TREE))
        pool.commit(1, len(text) - 1, [0, 1 + 5])
        text = np.concatenate([text, TREE.tokens[[5]], ids(len(text), 1)])


def test_padded_vocabulary_rows_are_cut(make_rig: Callable[..., Any]) -> None:
    rig = make_rig("llama")
    rig.target.pool.open(1, ids(1, 4))
    rig.target.pool.reserve(1, 4)
    assert rig.target.forward(Batch((Segment(1, 0, ids(1, 4), EMPTY),))).shape == (1, rig.target.info.vocab_size)

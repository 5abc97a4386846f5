"""Token trees: validation, shapes of the paper, order, masks, merging."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shared.errors import TreeError
from paceline.shared.tree import TokenTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24, vocab: int = 8) -> TokenTree:
    count = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    return TokenTree([draw(st.integers(0, vocab - 1)) for _ in range(count)], parents)  # type: ignore[arg-type]


def token_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([1], [0]),
        ([1, 2], [1, -1]),
        ([1, 2], [-1, 1]),
        ([1], [-5]),
        ([1, 2], [-1]),
        ([-1], [-1]),
        ([2**31], [-1]),
        ([1.5], [-1]),
        ([float("nan")], [-1]),
        ([[1]], [[-1]]),
        ([True], [-1]),
    ],
)
def test_arrays_that_are_no_tree_are_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(TreeError):
        TokenTree(tokens, parents)  # type: ignore[arg-type]


def test_expansion_of_the_paper_has_its_shape() -> None:
    tree = TokenTree.from_expansion([2, 2, 1])
    assert len(tree) == 2 + 4 + 4
    assert tree.depths.tolist() == [1] * 2 + [2] * 4 + [3] * 4
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
    assert len(tree.paths()) == 4
    with pytest.raises(TreeError):
        TokenTree.from_expansion([2, 0])


def test_empty_tree_has_no_nodes_and_no_paths() -> None:
    tree = TokenTree.empty()
    assert (len(tree), tree.paths(), tree.ancestor_mask().shape) == (0, [], (0, 0))


@given(trees())
def test_ancestor_mask_is_the_set_of_nodes_on_the_path(tree: TokenTree) -> None:
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        assert np.flatnonzero(mask[node]).tolist() == sorted(tree.path(node))
    assert (mask.sum(axis=1) == tree.depths).all()


@given(trees())
def test_depth_first_order_keeps_parents_first_and_first_paths_contiguous(tree: TokenTree) -> None:
    order = tree.depth_first().tolist()
    assert sorted(order) == list(range(len(tree)))
    laid = tree.take(order)
    children = laid.children()
    for node in range(len(laid)):
        if children[node + 1]:
            assert children[node + 1][0] == node + 1
    assert token_paths(laid) == token_paths(tree)


@given(trees(), trees())
def test_merge_holds_exactly_the_paths_of_both(left: TokenTree, right: TokenTree) -> None:
    merged = TokenTree.merge([left, right])
    assert token_paths(merged) == token_paths(left) | token_paths(right)
    assert merged.duplicate_sibling() is None
    assert len(merged) == len(token_paths(merged))


def test_merge_keeps_the_first_drafter_of_a_shared_node() -> None:
    left = TokenTree([1, 2], [-1, 0], [0, 0])  # type: ignore[arg-type]
    right = TokenTree([1, 3], [-1, 0], [1, 1])  # type: ignore[arg-type]
    merged = TokenTree.merge([left, right])
    assert merged == TokenTree([1, 2, 3], [-1, 0, 0], [0, 0, 1])  # type: ignore[arg-type]


def test_duplicate_sibling_of_one_drafter_is_found() -> None:
    assert TokenTree([5, 5], [-1, -1]).duplicate_sibling() == 1  # type: ignore[arg-type]
    assert TokenTree([5, 5], [-1, -1], [0, 1]).duplicate_sibling() is None  # type: ignore[arg-type]
    assert TokenTree([5, 5], [-1, 0]).duplicate_sibling() is None  # type: ignore[arg-type]


def test_taking_a_child_without_its_parent_is_refused() -> None:
    with pytest.raises(TreeError):
        TokenTree.chain([1, 2, 3]).take([1])


def test_arrays_of_a_tree_cannot_be_changed() -> None:
    tree = TokenTree.chain([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        tree.tokens[0] = 9

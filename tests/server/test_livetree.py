"""Alignment of frames against a slow, obvious oracle: every node is live, on the path or dead by its full path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.livetree import MAX_PATH_NAMES, LiveTree
from paceline.shared.errors import LimitError, ProtocolError, TreeError
from paceline.shared.messages import ANCHOR_ID, Grow, Limits, Proposal

FIRST = 5
VOCAB = 4


def grow(first_id: int, at: int, tokens: list[int], parents: list[int], **more: object) -> Grow:
    return Grow(0, at, first_id, np.array(tokens, np.int32), np.array(parents, np.int32), **more)  # type: ignore[arg-type]


@given(st.data())
def test_alignment_agrees_with_full_paths(data: st.DataObject) -> None:
    """The oracle keeps each node's whole output path: live if it extends the output, on the path if it is a prefix."""
    tree = LiveTree(Limits(max_live_nodes=10_000, max_depth=1000), VOCAB, aliases=True)
    committed: list[int] = []
    paths: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) or not paths:
            at = data.draw(st.integers(0, len(committed)))
            tokens, parents, new = [], [], list(paths)
            for _ in range(data.draw(st.integers(1, 6))):
                parent = data.draw(st.integers(-1, len(new) - 1))
                base = tuple(committed[:at]) if parent == ANCHOR_ID else new[parent]
                token = data.draw(st.integers(0, VOCAB - 1))
                if (*base, token) in new:
                    continue
                new.append((*base, token))
                tokens.append(token)
                parents.append(parent)
            growth = tree.grow(grow(len(paths), FIRST + at, tokens, parents), committed, FIRST)
            paths = new
            assert growth.num_joined + len(growth.judged) == len(tokens)
        else:
            token = data.draw(st.integers(0, VOCAB - 1))
            tree.advance(token, FIRST + len(committed))
            committed.append(token)
        for node_id, path in enumerate(paths):
            ahead = path[: len(committed)] == tuple(committed)
            assert (node_id in tree) == (len(path) > len(committed) and ahead)
            assert tree.is_on_path(node_id) == (len(path) <= len(committed) and path == tuple(committed[: len(path)]))
        laid = tree.lay_out(7, FIRST + len(committed) + 5)
        for index, node_id in enumerate(laid.ids):
            tokens_of = [int(laid.tree.tokens[node]) for node in laid.tree.path(index)]
            assert tuple(committed) + tuple(tokens_of) == paths[node_id]
        assert len(laid.ids) <= 7


def test_bonus_token_that_arrived_late_keeps_its_descendants() -> None:
    tree = LiveTree(Limits(), VOCAB, aliases=True)
    tree.grow(grow(0, FIRST, [1, 2, 3, 0], [-1, 0, 1, -1]), [], FIRST)
    assert tree.advance(1, FIRST) == 1
    assert tree.ids == [1, 2]
    growth = tree.grow(grow(4, FIRST, [3], [0]), [1], FIRST)
    assert growth.num_joined == 1
    assert tree.lay_out(9, 99).ids == (1, 2, 4)


def test_children_of_a_late_matching_node_join() -> None:
    tree = LiveTree(Limits(), VOCAB, aliases=True)
    growth = tree.grow(grow(0, FIRST, [1, 2, 3, 0], [-1, 0, 1, 0]), [1, 2], FIRST)
    assert (growth.num_joined, growth.judged, growth.accepted) == (1, [0, 1, 3], [0, 1])
    assert tree.num_stale == 1


def test_one_drafter_may_not_repeat_a_sibling_in_any_frame() -> None:
    for first, second in (((1, -1), (1, -1)), ((1, -1), (2, -1))):
        tree = LiveTree(Limits(), VOCAB, aliases=True)
        tree.grow(grow(0, FIRST, [first[0]], [first[1]]), [], FIRST)
        if first == second:
            with pytest.raises(TreeError, match="distinct siblings"):
                tree.grow(grow(1, FIRST, [second[0]], [second[1]]), [], FIRST)
        else:
            tree.grow(grow(1, FIRST, [second[0]], [second[1]]), [], FIRST)
    late = LiveTree(Limits(), VOCAB, aliases=True)
    with pytest.raises(TreeError, match="twice below one parent"):
        late.grow(grow(0, FIRST, [1, 1], [-1, -1]), [2, 3], FIRST)
    tree = LiveTree(Limits(), VOCAB, aliases=True)
    both = np.array([0, 1], np.uint8)
    assert tree.grow(grow(0, FIRST, [1, 1], [-1, -1], drafters=both), [], FIRST).num_joined == 2
    assert tree.advance(1, FIRST) == 0
    assert len(tree) == 0


def test_twins_of_two_drafters_share_descendants_but_not_in_mss() -> None:
    both = np.array([0, 1, 0, 1], np.uint8)
    frame = grow(0, FIRST, [1, 1, 2, 3], [-1, -1, 0, 1], drafters=both)
    for aliases, expected in ((True, [2, 3]), (False, [2])):
        tree = LiveTree(Limits(), VOCAB, aliases=aliases)
        tree.grow(frame, [], FIRST)
        tree.advance(1, FIRST)
        assert tree.ids == expected


def test_mss_follows_the_accepted_twin() -> None:
    both = np.array([0, 1, 0, 1], np.uint8)
    tree = LiveTree(Limits(), VOCAB, aliases=False)
    tree.grow(grow(0, FIRST, [1, 1, 2, 3], [-1, -1, 0, 1], drafters=both), [], FIRST)
    tree.advance(1, FIRST, accepted=1)
    assert tree.ids == [3]
    growth = tree.grow(grow(4, FIRST, [0], [0]), [1], FIRST)
    assert growth.num_joined == 0


def test_proposals_stay_with_their_parent_and_the_first_counts() -> None:
    one, two = (Proposal(np.array([token], np.int32), np.ones(1)) for token in (1, 2))
    tree = LiveTree(Limits(), VOCAB, aliases=False)
    tree.grow(grow(0, FIRST, [1], [-1], proposals={(-1, 0): one, (0, 0): two}), [], FIRST)
    tree.grow(grow(1, FIRST, [2], [0], proposals={(0, 0): one}), [], FIRST)
    laid = tree.lay_out(9, 99)
    assert laid.proposals == {0: {0: one}, 1: {0: two}}
    tree.advance(1, FIRST)
    assert tree.lay_out(9, 99).proposals == {0: {0: two}}
    with pytest.raises(ProtocolError):
        tree.grow(grow(2, FIRST, [], [], proposals={(7, 0): one}), [1], FIRST)


def test_limits_are_typed_errors() -> None:
    with pytest.raises(LimitError, match="max_live_nodes=3"):
        LiveTree(Limits(max_live_nodes=3), VOCAB, aliases=True).grow(grow(0, 5, [0, 1, 2, 3], [-1] * 4), [], 5)
    with pytest.raises(LimitError, match="max_depth=2"):
        LiveTree(Limits(max_depth=2), VOCAB, aliases=True).grow(grow(0, 5, [0, 1, 2], [-1, 0, 1]), [], 5)
    with pytest.raises(LimitError, match="max_frame_nodes=2"):
        LiveTree(Limits(max_frame_nodes=2), VOCAB, aliases=True).grow(grow(0, 5, [0, 1, 2], [-1, 0, 1]), [], 5)


def test_memory_is_bounded_under_endless_late_frames() -> None:
    tree = LiveTree(Limits(), VOCAB, aliases=True)
    committed = [1] * 10
    for number in range(5000):
        tree.grow(grow(number * 2, FIRST, [1, 2], [-1, -1]), committed, FIRST)
    assert tree.num_path_names <= MAX_PATH_NAMES
    assert len(tree) == 0

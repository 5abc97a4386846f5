"""The live tree against a slow oracle that keeps paths as tuples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.drafting.drafter import ANCHOR_KEY
from paceline.client.drafting.live_tree import ANCHOR_ROW, UNSENT, LiveTree


def hang(tree, parents, tokens, chances, drafter=0):
    parents, tokens = np.array(parents, np.int64), np.array(tokens, np.int32)
    return tree.append(parents, tokens, np.array(chances, np.float64), np.zeros(len(tokens), np.int32), drafter)


def paths_of(tree):
    paths = []
    for row in range(len(tree)):
        above = () if tree.parents[row] == ANCHOR_ROW else paths[tree.parents[row]]
        paths.append((*above, int(tree.tokens[row])))
    return paths


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("grow"), st.integers(0, 30), st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
        ),
        st.tuples(st.just("commit"), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.just(None)),
    ),
    max_size=25,
)


@given(steps)
def test_live_tree_holds_exactly_the_paths_that_can_still_come_true(plan):
    tree, oracle, expanded = LiveTree(), {}, set()
    for kind, first, tokens in plan:
        if kind == "grow":
            row = first % (len(tree) + 1) - 1
            above = () if row == ANCHOR_ROW else paths_of(tree)[row]
            hang(tree, [row] * len(tokens), tokens, [0.25] * len(tokens))
            oracle.update({(*above, token): None for token in tokens})
            if row != ANCHOR_ROW:
                tree.mark_expanded(np.array([row]), 0, anchor=False)
                expanded.add(above)
        else:
            keys, labels = tree.commit(np.array(first, np.int32))
            done = tuple(first)
            assert [key != ANCHOR_KEY for key in keys.tolist()] == [done[: n + 1] in oracle for n in range(len(done))]
            on_path = [path for path in oracle if path[:-1] == done[: len(path) - 1] and len(path) <= len(done)]
            assert len(labels.hits) == len(on_path)
            assert int(labels.hits.sum()) == sum(path == done[: len(path)] for path in on_path)
            assert bool(tree.anchor_expanded) == (done in expanded and done in oracle)
            oracle = {path[len(done) :]: None for path in oracle if path[: len(done)] == done and len(path) > len(done)}
            expanded = {path[len(done) :] for path in expanded if path[: len(done)] == done and len(path) > len(done)}
        paths = paths_of(tree)
        assert sorted(paths) == sorted(oracle)
        assert tree.depths.tolist() == [len(path) for path in paths]
        np.testing.assert_allclose(tree.odds, [0.25 ** len(path) for path in paths])
        assert (np.diff(tree.keys) > 0).all()
        assert (tree.parents < np.arange(len(tree))).all()


def test_merging_keeps_the_row_and_raises_the_odds_below_it():
    tree = LiveTree()
    hang(tree, [ANCHOR_ROW, ANCHOR_ROW], [5, 6], [0.2, 0.1])
    hang(tree, [0], [7], [0.5])
    assert hang(tree, [ANCHOR_ROW, ANCHOR_ROW], [5, 8], [0.6, 0.1], drafter=1) == 1
    assert tree.tokens.tolist() == [5, 6, 7, 8]
    np.testing.assert_allclose(tree.odds, [0.6, 0.1, 0.3, 0.1])
    assert tree.drafters.tolist() == [0, 0, 0, 1]


def test_rows_are_found_by_key_and_gone_keys_are_named():
    tree = LiveTree()
    hang(tree, [ANCHOR_ROW, ANCHOR_ROW], [5, 6], [0.5, 0.5])
    hang(tree, [1], [7], [0.5])
    first, second, third = tree.keys.tolist()
    tree.commit(np.array([6], np.int32))
    assert tree.rows_of(np.array([first, second, third, ANCHOR_KEY])).tolist() == [UNSENT, UNSENT, 0, ANCHOR_ROW]

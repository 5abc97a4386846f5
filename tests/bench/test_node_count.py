"""Static against dynamic trees: which expansions compete, and that nobody scores more nodes than allowed."""

import pytest

from paceline.bench.grid import Grid, run_grid
from paceline.bench.methods import method_names
from paceline.bench.node_count import expansions
from paceline.bench.synthetic import synthetic
from paceline.shared.errors import ParameterError
from paceline.shared.tree import TokenTree


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16, 32])
def test_expansions_fill_their_nodes_and_leave_no_room(num_nodes: int) -> None:
    found = expansions(num_nodes)
    assert len(set(found)) == len(found) > 0
    assert (num_nodes,) in found
    for widths in found:
        tree = TokenTree.from_expansion(widths)
        assert len(tree) <= num_nodes
        assert len(tree) >= 0.8 * num_nodes or len(widths) == 8
        assert list(widths) == sorted(widths, reverse=True)
        last = sum(int(depth) == len(widths) for depth in tree.depths)
        assert len(widths) == 8 or num_nodes - len(tree) < last, "another level would fit"


def test_family_holds_chains_bushes_and_what_is_between() -> None:
    found = expansions(16)
    for widths in ((16,), (8, 1), (4, 3), (4, 1, 1, 1), (2, 2, 2), (2, 2, 1, 1), (1,) * 8):
        assert widths in found


def test_static_and_dynamic_trees_write_the_same_text_beside_the_server_alone() -> None:
    names = method_names("dynamic-6,static-6")
    assert names == ("server-alone", "dynamic-6", "static-6")
    results = run_grid(Grid(synthetic(2, 24), rtts_ms=(20.0,), methods=names))
    assert [row.method for row in results.rows] == list(names)
    assert all(row.flips == 0 for row in results.rows)
    assert results.rows[2].shape.startswith("<")
    assert all(row.tok_s > 0 for row in results.rows)


@pytest.mark.parametrize("name", ["static-0", "dynamic", "static-x", "dynamic-1000"])
def test_names_that_mean_nothing_are_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ParameterError, match="dynamic-N"):
        method_names(name)

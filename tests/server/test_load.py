"""What drafts may add to a step that others share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.acceptance import NodeBudget
from paceline.server.load import SHARED_SHARE, fitting_rate, node_rows
from paceline.shared.messages import StepTime

MODEL = StepTime(0.0072, 0.00003)


def test_a_generation_alone_may_spend_as_it_likes() -> None:
    assert node_rows(MODEL, 1, 1) is None
    assert node_rows(MODEL, 0, 0) is None


@given(st.integers(4, 400), st.integers(0, 200))
def test_drafts_never_make_a_shared_step_longer_than_the_bound(num_generations: int, num_prompt_rows: int) -> None:
    plain = num_generations + num_prompt_rows
    room = node_rows(MODEL, num_generations, plain)
    assert room is not None
    assert room >= 0
    assert not room or MODEL.at(plain + room) <= (1 + SHARED_SHARE) * MODEL.at(1) + 1e-12


def test_room_shrinks_as_generations_join_and_is_gone_in_a_full_step() -> None:
    rooms = [node_rows(MODEL, count, count) or 0 for count in (2, 4, 8, 16, 32, 64)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] // 2 >= 16
    assert rooms[1] // 4 >= 8
    assert rooms[-1] == 0


def test_rows_that_cost_nothing_are_not_rationed() -> None:
    assert (node_rows(StepTime(0.02, 0.0), 50, 50) or 0) > 10_000


def test_the_likeliest_nodes_stay_when_budgets_must_fit() -> None:
    good, bad = NodeBudget(64), NodeBudget(64)
    for _ in range(100):
        good.observe(range(16), [0, 1, 2, 3])
        bad.observe(range(16), [0])
    rate = fitting_rate([good, bad], 0.02, 5)
    assert 2 <= good.paying(rate) <= 5
    assert bad.paying(rate) <= 2
    assert fitting_rate([good, bad], 0.02, None) == 0.02
    assert good.paying(fitting_rate([good, bad], 0.02, 0)) == 0

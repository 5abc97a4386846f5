"""Which nodes the step in flight scores, as a client can know."""

from __future__ import annotations

import numpy as np

from paceline.client.drafting.controller import Controller
from paceline.client.drafting.live_tree import ANCHOR_ROW, LiveTree
from paceline.client.flight import Flight
from paceline.shared.messages import Grow, Limits, StepTime


def grow(first_id: int, count: int) -> Grow:
    return Grow(0, 1, first_id, np.arange(count, dtype=np.int32), np.full(count, -1, np.int32))


def flight_with(rtt_s: float, num_live: int) -> Flight:
    tree = LiveTree()
    tree.append(
        np.full(num_live, ANCHOR_ROW, np.int64),
        np.arange(num_live, dtype=np.int32),
        np.full(num_live, 0.1),
        np.zeros(num_live, np.int32),
        0,
    )
    tree.ids = np.arange(num_live, dtype=np.int64)
    controller = Controller(StepTime(0.03, 0.0001), Limits())
    controller.observe_rtt(rtt_s)
    return Flight(tree, controller)


def test_a_commit_begins_a_step_with_the_nodes_sent_a_round_trip_before() -> None:
    flight = flight_with(0.02, 8)
    flight.on_sent(0.0, [grow(0, 4)])
    flight.on_sent(0.05, [grow(4, 4)])
    flight.on_commit(0.06, num_scored=4)
    assert flight.scored_id == 4
    flight.on_commit(0.09, num_scored=4)
    assert flight.scored_id == 8


def test_after_a_miss_the_first_frame_is_what_the_waiting_server_scores() -> None:
    flight = flight_with(0.0, 0)
    flight.on_sent(0.0, [grow(0, 4)])
    flight.on_commit(0.03, num_scored=4)
    flight.on_sent(0.035, [grow(4, 3)])
    flight.on_sent(0.04, [grow(7, 3)])
    assert flight.scored_id == 7


def test_a_server_that_ran_on_after_a_miss_is_not_expected_to_wait() -> None:
    flight = flight_with(0.0, 0)
    flight.on_sent(0.0, [grow(0, 4)])
    flight.on_commit(0.03, num_scored=4)
    flight.on_commit(0.06, num_scored=0)
    flight.on_sent(0.065, [grow(4, 3)])
    assert flight.scored_id == 4


def test_the_policy_is_told_which_nodes_are_in_the_step_in_flight() -> None:
    controller = Controller(StepTime(0.03, 0.0), Limits())
    controller.observe_rtt(0.06)
    conditions = controller.conditions(32, scored_id=7)
    assert conditions.scored_id == 7
    assert abs(conditions.in_flight - 3.0) < 1e-6

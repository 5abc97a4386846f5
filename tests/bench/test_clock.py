"""The virtual clock."""

import pytest

from paceline.bench.clock import VirtualClock


def test_events_run_in_order_of_time_and_then_of_planning() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append(("late", clock.now)))
    clock.at(1.0, lambda: seen.append(("first", clock.now)))
    clock.at(1.0, lambda: seen.append(("second", clock.now)))
    clock.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_an_event_planned_for_the_past_happens_now() -> None:
    clock, seen = VirtualClock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.run()
    assert seen == [5.0]


def test_run_until_leaves_later_events_for_later() -> None:
    clock, seen = VirtualClock(), []
    clock.at(1.0, lambda: seen.append(1))
    clock.at(3.0, lambda: seen.append(3))
    clock.run(until_s=2.0)
    assert seen == [1]
    clock.run()
    assert seen == [1, 3]


def test_actors_that_never_let_time_pass_are_caught() -> None:
    clock = VirtualClock()

    def again() -> None:
        clock.after(0.0, again)

    again()
    with pytest.raises(RuntimeError, match="within 100 events"):
        clock.run(max_events=100)

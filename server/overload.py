"""What a client is told that finds the queue full: how long it takes, as things go, until there is room again."""

from __future__ import annotations

from paceline.server.counters import EngineCounters
from paceline.shared.errors import BusyError
from paceline.shared.messages import StepTime

_FIRST_STEPS = 64.0
"""Steps that a generation takes, as long as none has ended yet."""
_MIN_S, _MAX_S = 0.5, 60.0


def overloaded(
    counters: EngineCounters, step_time: StepTime, num_running: int, num_waiting: int, max_queue: int
) -> BusyError:
    """The refusal, with the advice when to come back."""
    after_s = seconds_until_room(counters, step_time, num_running)
    state = f"{num_running} generations run and {num_waiting} wait"
    return BusyError(f"expected room in the queue (max_queue={max_queue}), but {state}", after_s)


def seconds_until_room(counters: EngineCounters, step_time: StepTime, num_running: int) -> float:
    """Seconds until one more generation ends: generations that share steps end one after another, evenly on average.

    A generation takes as many steps as those before it took on average, and each of its steps has a row of each
    neighbour. Between half a second and a minute, whatever the figures say.
    """
    num_ended = counters.num_finished + counters.num_cancelled
    # Each commit is one generation's share of one step: what it committed, less the accepted nodes.
    num_steps = (counters.num_committed - counters.num_accepted) / num_ended if num_ended else _FIRST_STEPS
    seconds = num_steps * step_time.at(max(num_running, 1)) / max(num_running, 1)
    return min(max(seconds, _MIN_S), _MAX_S)

"""A virtual clock: events in order of time, and nothing else moves time. The heart of the discrete-event simulator.

Not here: what happens at an event (``simulator``), and how long anything takes (``link``, ``costs``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Time in seconds, and a queue of things to do. Events at one time run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> None:
        """Plan ``action`` for a time; one that is past means now."""
        heapq.heappush(self._queue, (max(time_s, self.now), self._count, action))
        self._count += 1

    def after(self, delay_s: float, action: Action) -> None:
        """Plan ``action`` for ``delay_s`` seconds from now."""
        self.at(self.now + delay_s, action)

    def run(self, until_s: float = float("inf"), max_events: int = 50_000_000) -> None:
        """Run events until none is left, or the next is later than ``until_s``.

        Raises ``RuntimeError`` after ``max_events``: an actor that plans itself again and again without time passing.
        """
        for _ in range(max_events):
            if not self._queue or self._queue[0][0] > until_s:
                return
            self.now, _, action = heapq.heappop(self._queue)
            action()
        raise RuntimeError(f"expected the simulation to end within {max_events} events, got more")

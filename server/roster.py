"""Who runs and who waits, and the KV that they hold: admission, preemption, release.

Order is seniority: running generations stand in the order of their admission. When KV runs short the newest loses its
blocks and waits at the head of the queue; what it had is computed again, through the prefix cache. The most senior one
is never preempted, so somebody always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from paceline.server.kv.pool import KVPool
from paceline.server.participant import Key, Participant
from paceline.server.plan import Part
from paceline.server.scheduler import Share


class Roster:
    """See the module's text. While a step is in flight, freed KV stays in place until ``land``."""

    def __init__(self, pool: KVPool, max_running: int) -> None:
        self._pool = pool
        self._max_running = max_running
        self._running: dict[Key, Participant] = {}
        self._waiting: deque[Participant] = deque()
        self._next_sequence = 0
        self._in_flight = False
        self._doomed: list[int] = []
        self.num_preempted = 0

    @property
    def running(self) -> list[Participant]:
        """Those that share steps, most senior first."""
        return list(self._running.values())

    @property
    def num_running(self) -> int:
        """Generations that share steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Generations that wait for a place or for KV."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Participant]:
        yield from self.running
        yield from list(self._waiting)

    def find(self, key: Key) -> Participant | None:
        """The running or waiting generation of that key."""
        found = self._running.get(key)
        return found or next((one for one in self._waiting if one.key == key), None)

    def is_running(self, participant: Participant) -> bool:
        """Whether it still shares steps."""
        return self._running.get(participant.key) is participant

    def enter(self, participant: Participant) -> None:
        """Puts a new generation at the end of the queue."""
        self._waiting.append(participant)

    def admit(self) -> list[Participant]:
        """Moves waiting generations into the steps while there is a place and room for their tokens."""
        admitted: list[Participant] = []
        while self._waiting and len(self._running) < self._max_running:
            participant = self._waiting[0]
            tokens = participant.generation.tokens
            room = (self._pool.num_free_blocks + self._pool.num_cached_blocks) * self._pool.block_size
            if self._running and room < len(tokens) + 2 * self._pool.block_size:
                break
            self._waiting.popleft()
            participant.sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            participant.cached_len = self._pool.open(participant.sequence, tokens)
            self._running[participant.key] = participant
            admitted.append(participant)
        return admitted

    def fit(self, participant: Participant, share: Share) -> Part | None:
        """Takes KV for a share, at the cost of its nodes and then of the newest generations.

        None if the participant was the newest itself: it waits. Raises ``MemoryError`` if even alone it does not fit.
        """
        assert participant.sequence is not None
        needed = participant.cached_len + share.num_tokens
        is_scored = share.num_tokens == participant.num_missing
        laid_out = participant.generation.lay_out(share.num_nodes if is_scored else 0)
        while not self._pool.reserve(participant.sequence, needed + len(laid_out.tree)):
            if len(laid_out.tree):
                laid_out = participant.generation.lay_out(0)
                continue
            newest = next(reversed(self._running.values()))
            if newest is participant and len(self._running) == 1:
                raise MemoryError(f"expected room for {needed} tokens of KV for one generation: raise --kv-memory")
            self._preempt(newest)
            if newest is participant:
                return None
        return Part(participant, participant.cached_len, share.num_tokens, laid_out, is_scored)

    def remove(self, participant: Participant) -> None:
        """Ends a generation: its place is free at once, its KV as soon as no step uses it."""
        if self._running.pop(participant.key, None) is None:
            self._waiting.remove(participant)
        self._release(participant)

    def take_off(self) -> None:
        """A step begins: KV that it may touch must stay in place."""
        self._in_flight = True

    def land(self) -> None:
        """The step is over."""
        self._in_flight = False
        for sequence in self._doomed:
            self._pool.free(sequence)
        self._doomed.clear()

    def _preempt(self, participant: Participant) -> None:
        del self._running[participant.key]
        self._release(participant)
        self._waiting.appendleft(participant)
        self.num_preempted += 1

    def _release(self, participant: Participant) -> None:
        if participant.sequence is None:
            return
        if self._in_flight:
            self._doomed.append(participant.sequence)
        else:
            self._pool.free(participant.sequence)
        participant.sequence = None
        participant.cached_len = 0

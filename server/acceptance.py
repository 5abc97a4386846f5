"""How likely a generation's next node is to be accepted, by its rank in arrival order, learnt from every step.

The drafter's own ranking decides the order, so acceptance falls with the rank. Ranks are pooled in buckets that double:
1, 2, 3-4, 5-8, and so on. What a node is worth follows from it: ``scheduler`` stops where the next one costs more time
than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.95
"""Weight of the past when a bucket sees one more step; about 20 steps count."""
MIN_RATE = 0.01
"""A node that is accepted less often than this is not worth its bytes, however cheap the server's rows are."""
PROBE_NODES = 4
FIRST_PROBE_STEPS = 16
MAX_PROBE_STEPS = 256
_PRIOR_STEPS = 2.0
_NUM_BUCKETS = 12


def bucket_of(rank: int) -> int:
    """The bucket of a node's rank (0 for the first): 0, 1, 2 (ranks 2-3), 3 (4-7) and so on."""
    return min(rank.bit_length(), _NUM_BUCKETS - 1)


class Acceptance:
    """Decayed counts of scored and accepted nodes in each bucket, with a hopeful prior that two steps outweigh."""

    def __init__(self) -> None:
        self._scored = [_PRIOR_STEPS * max(1, 1 << max(bucket - 1, 0)) for bucket in range(_NUM_BUCKETS)]
        self._accepted = [scored * 0.5 / (1 << bucket) ** 0.8 for bucket, scored in enumerate(self._scored)]
        self.per_step = 1.0
        """Decayed mean of accepted nodes in steps that scored any."""

    def rate(self, rank: int) -> float:
        """The chance that the node of this rank is accepted."""
        bucket = bucket_of(rank)
        return self._accepted[bucket] / self._scored[bucket]

    def observe(self, num_scored: int, accepted_ranks: Sequence[int]) -> None:
        """Learns from one step that scored the nodes of ranks 0..num_scored-1."""
        if not num_scored:
            return
        hits = [0] * _NUM_BUCKETS
        for rank in accepted_ranks:
            hits[bucket_of(rank)] += 1
        for bucket in range(bucket_of(num_scored - 1) + 1):
            first = 0 if bucket == 0 else 1 << (bucket - 1)
            width = 1 if bucket == 0 else 1 << (bucket - 1)
            self._scored[bucket] = MEMORY * self._scored[bucket] + min(width, num_scored - first)
            self._accepted[bucket] = MEMORY * self._accepted[bucket] + hits[bucket]
        self.per_step += 0.1 * (len(accepted_ranks) - self.per_step)

    def paying_nodes(self, min_rate: float, max_nodes: int) -> int:
        """How many nodes, in order, are accepted with a chance of at least ``min_rate`` each."""
        count = 0
        for bucket in range(_NUM_BUCKETS):
            if count >= max_nodes or self._accepted[bucket] < min_rate * self._scored[bucket]:
                break
            count += 1 if bucket == 0 else 1 << (bucket - 1)
        return min(count, max_nodes)


class NodeBudget:
    """How many nodes a generation may have scored per step: as many as pay, and now and then a few to find out.

    A drafter that is always wrong falls to zero; probes come at intervals that double, and end that as soon as one hits.
    """

    def __init__(self, max_nodes: int) -> None:
        self.acceptance = Acceptance()
        self._max_nodes = max_nodes
        self._idle_steps = 0
        self._interval = FIRST_PROBE_STEPS
        self.current = max_nodes

    @property
    def is_probing(self) -> bool:
        """Whether the budget is open only to find out if drafting pays again."""
        return self._idle_steps >= self._interval

    def update(self, min_rate: float) -> int:
        """The budget for the next step, given the acceptance at which one more node pays its time."""
        paying = self.acceptance.paying_nodes(max(min_rate, MIN_RATE), self._max_nodes)
        if paying:
            self._idle_steps = 0
        elif self.is_probing:
            paying = min(PROBE_NODES, self._max_nodes)
        self.current = paying
        return paying

    def observe(self, num_scored: int, accepted_ranks: Sequence[int]) -> None:
        """Learns from one step of this generation."""
        if num_scored:
            was_probe = self.is_probing
            self.acceptance.observe(num_scored, accepted_ranks)
            if was_probe:
                self._idle_steps = 0
                self._interval = FIRST_PROBE_STEPS if accepted_ranks else min(2 * self._interval, MAX_PROBE_STEPS)
        elif self.current == 0:
            self._idle_steps += 1

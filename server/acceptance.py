"""How likely a generation's next node is to be accepted, by its rank in arrival order, learnt from every step.

The drafter's own ranking decides the order, so acceptance falls with the rank. Ranks are pooled in buckets that double:
1, 2, 3-4, 5-8, and so on. What a node is worth follows from it: ``scheduler`` stops where the next one costs more time
than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 0.95
"""Weight of the past when a bucket sees one more step; about 20 steps count."""
MIN_RATE = 0.01
"""A node that is accepted less often than this is not worth its bytes, however cheap the server's rows are."""
PROBE_NODES = 4
FIRST_PROBE_STEPS = 16
MAX_PROBE_STEPS = 256
RELAXATION = 0.05
_PRIOR_STEPS = 2.0
_NUM_BUCKETS = 12


def _prior_rate(bucket: int) -> float:
    return 0.5 / math.pow(2.0, 0.8 * bucket)


def bucket_of(rank: int) -> int:
    """The bucket of a node's rank (0 for the first): 0, 1, 2 (ranks 2-3), 3 (4-7) and so on."""
    return min(rank.bit_length(), _NUM_BUCKETS - 1)


class Acceptance:
    """Decayed counts of judged and accepted nodes in each bucket, with a hopeful prior that two steps outweigh."""

    def __init__(self) -> None:
        self._judged = [_PRIOR_STEPS * max(1, 1 << max(bucket - 1, 0)) for bucket in range(_NUM_BUCKETS)]
        self._accepted = [judged * _prior_rate(bucket) for bucket, judged in enumerate(self._judged)]
        self._seen = [False] * _NUM_BUCKETS
        self._best = 1.0

    def rate(self, rank: int) -> float:
        """The chance that the node of this rank is accepted."""
        return self._rate(bucket_of(rank))

    def _relax(self, bucket: int) -> None:
        """Ranks that nobody tried lately drift back to what the prior says, so that they get another chance."""
        prior = _PRIOR_STEPS * max(1, 1 << max(bucket - 1, 0))
        rate = min(_prior_rate(bucket), self._best)
        self._judged[bucket] += RELAXATION * (prior - self._judged[bucket])
        self._accepted[bucket] += RELAXATION * (prior * rate - self._accepted[bucket])

    def _rate(self, bucket: int) -> float:
        """Of ranks never judged so far: what the prior says, but no more than the best of those that were."""
        rate: float = self._accepted[bucket] / self._judged[bucket]
        return rate if self._seen[bucket] else min(rate, self._best)

    def observe(self, judged_ranks: Sequence[int], accepted_ranks: Sequence[int]) -> None:
        """Learns from the nodes whose fate one step decided, scored or not: those on the path and those that died."""
        judged, hits = [0] * _NUM_BUCKETS, [0] * _NUM_BUCKETS
        for rank in judged_ranks:
            judged[bucket_of(rank)] += 1
        for rank in accepted_ranks:
            hits[bucket_of(rank)] += 1
        for bucket in range(_NUM_BUCKETS):
            if judged[bucket]:
                self._judged[bucket] = MEMORY * self._judged[bucket] + judged[bucket]
                self._accepted[bucket] = MEMORY * self._accepted[bucket] + hits[bucket]
                self._seen[bucket] = True
            elif self._seen[bucket]:
                self._relax(bucket)
        self._best = max((self._rate(bucket) for bucket in range(_NUM_BUCKETS) if self._seen[bucket]), default=1.0)

    def expected(self, num_nodes: int) -> float:
        """How many of the first ``num_nodes`` nodes are accepted on average."""
        total, first = 0.0, 0
        for bucket in range(_NUM_BUCKETS):
            width = min(1 if bucket == 0 else 1 << (bucket - 1), num_nodes - first)
            if width <= 0:
                break
            total += width * self._rate(bucket)
            first += width
        return total

    def paying_nodes(self, min_rate: float, max_nodes: int) -> int:
        """How many nodes, in order, to score so that those accepted outweigh all rows at ``min_rate`` each the most."""
        best, best_count, total, count = 0.0, 0, 0.0, 0
        for bucket in range(_NUM_BUCKETS):
            width = min(1 if bucket == 0 else 1 << (bucket - 1), max_nodes - count)
            if width <= 0:
                break
            total += width * (self._rate(bucket) - min_rate)
            count += width
            if total > best:
                best, best_count = total, count
        return best_count


class NodeBudget:
    """How many nodes a generation may have scored per step: as many as pay, and now and then a few to find out.

    A drafter that is always wrong falls to zero. Nodes that arrive all the same are still judged by what is committed,
    so that a drafter which turns right is noticed; if none arrive, the budget opens for a few at intervals that double.
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

    @property
    def expected(self) -> float:
        """Nodes that a step with a full budget accepts on average."""
        return self.acceptance.expected(self.current)

    def paying(self, min_rate: float) -> int:
        """How many nodes pay at that acceptance."""
        return self.acceptance.paying_nodes(max(min_rate, MIN_RATE), self._max_nodes)

    def update(self, min_rate: float) -> int:
        """The budget for the next step, given the acceptance at which one more node pays its time."""
        paying = self.paying(min_rate)
        self._idle_steps = 0 if paying else self._idle_steps + 1
        if self.is_probing:
            paying = min(PROBE_NODES, self._max_nodes)
        self.current = paying
        return paying

    def observe(self, judged_ranks: Sequence[int], accepted_ranks: Sequence[int]) -> None:
        """Learns from the arrival ranks of nodes whose fate was decided, and of those that were accepted."""
        if judged_ranks:
            if self.is_probing:
                self._interval = FIRST_PROBE_STEPS if accepted_ranks else min(2 * self._interval, MAX_PROBE_STEPS)
            self._idle_steps = 0
            self.acceptance.observe(judged_ranks, accepted_ranks)

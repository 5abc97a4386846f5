"""How likely a generation's next node is to be accepted, by its rank in arrival order, learnt from every step.

The drafter's own ranking decides the order, so acceptance falls with the rank. Ranks are pooled in buckets that double:
1, 2, 3-4, 5-8, and so on. What a node is worth follows from it: ``scheduler`` stops where the next one costs more time
than it saves.

Late ranks hit rarely, so a few unlucky steps say little about them. Each bucket starts from a share of what the one
before it is worth, and takes evidence worth a hit or two to leave that. A drafter that is always wrong must not live on
such hopes: how likely it is that the drafts are useless is kept apart (Bayes, from steps in which nothing came true).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 0.98
"""Weight of the past when a bucket sees one more step; about 50 steps count."""
MIN_RATE = 0.005
"""A node that is accepted less often than this is not worth its bytes, however cheap the server's rows are."""
PROBE_NODES = 4
FIRST_PROBE_STEPS = 16
MAX_PROBE_STEPS = 256
RELAXATION = 0.05
_NUM_BUCKETS = 12
_FIRST_RATE = 0.45
_SHARE = 0.45
"""What a rank of a bucket is worth, at first, in units of a rank of the bucket before."""
_PRIOR_HITS = 1.0
_FIRST_DOUBT = 0.15
_LEAST_DOUBT = 0.01
_LEAST_LUCK = 0.3
"""How often good drafts come to nothing in a step at least."""


def bucket_of(rank: int) -> int:
    """The bucket of a node's rank (0 for the first): 0, 1, 2 (ranks 2-3), 3 (4-7) and so on."""
    return min(rank.bit_length(), _NUM_BUCKETS - 1)


def _width(bucket: int) -> int:
    return 1 if bucket == 0 else 1 << (bucket - 1)


class Acceptance:
    """Decayed counts of judged and accepted nodes in each bucket, and the doubt that drafts are of any use."""

    def __init__(self) -> None:
        self._judged = [0.0] * _NUM_BUCKETS
        self._accepted = [0.0] * _NUM_BUCKETS
        self._doubt = _FIRST_DOUBT
        self._rates = [0.0] * _NUM_BUCKETS
        self._refresh()

    def rate(self, rank: int) -> float:
        """The chance that the node of this rank is accepted."""
        return self._rate(bucket_of(rank))

    def _rate(self, bucket: int) -> float:
        return (1.0 - self._doubt) * self._rates[bucket]

    def _refresh(self) -> None:
        """The rates if drafts are of use: counts, shrunk towards what the buckets before promise."""
        hope = _FIRST_RATE
        for bucket in range(_NUM_BUCKETS):
            prior_trials = _PRIOR_HITS / max(hope, 1e-6)
            rate = (self._accepted[bucket] + _PRIOR_HITS) / (self._judged[bucket] + prior_trials)
            self._rates[bucket] = min(rate, 1.0)
            hope = _SHARE * max(rate, hope if bucket else rate)

    def observe(self, judged_ranks: Sequence[int], accepted_ranks: Sequence[int]) -> None:
        """Learns from the nodes whose fate one step decided, scored or not: those on the path and those that died."""
        if not judged_ranks:
            return
        judged, hits = [0] * _NUM_BUCKETS, [0] * _NUM_BUCKETS
        for rank in judged_ranks:
            judged[bucket_of(rank)] += 1
        for rank in accepted_ranks:
            hits[bucket_of(rank)] += 1
        self._doubt_or_trust(judged, bool(accepted_ranks))
        for bucket in range(_NUM_BUCKETS):
            # Ranks that nobody tried lately drift back to what the others promise: they get another chance.
            memory = MEMORY if judged[bucket] else 1.0 - RELAXATION
            self._judged[bucket] = memory * self._judged[bucket] + judged[bucket]
            self._accepted[bucket] = memory * self._accepted[bucket] + hits[bucket]
        self._refresh()

    def _doubt_or_trust(self, judged: Sequence[int], has_hit: bool) -> None:
        if has_hit:
            self._doubt = _LEAST_DOUBT
            return
        promised = sum(count * rate for count, rate in zip(judged, self._rates, strict=True))
        luck = max(_LEAST_LUCK, math.exp(-promised))
        self._doubt = self._doubt / (self._doubt + (1.0 - self._doubt) * luck)

    def expected(self, num_nodes: int) -> float:
        """How many of the first ``num_nodes`` nodes are accepted on average."""
        total, first = 0.0, 0
        for bucket in range(_NUM_BUCKETS):
            width = min(_width(bucket), num_nodes - first)
            if width <= 0:
                break
            total += width * self._rate(bucket)
            first += width
        return total

    def paying_nodes(self, min_rate: float, max_nodes: int) -> int:
        """How many nodes, in order, to score so that those accepted outweigh all rows at ``min_rate`` each the most."""
        best, best_count, total, count = 0.0, 0, 0.0, 0
        for bucket in range(_NUM_BUCKETS):
            width = min(_width(bucket), max_nodes - count)
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

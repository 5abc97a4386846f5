"""Who takes part in a step and with how many rows: pure arithmetic on counts, no tokens, no KV, no clock.

Iteration-level batching: whoever has something to compute takes part in the next step; nobody waits for a batch to
fill. Rows go, in this order, to

    1. decoding       the one committed token without KV of every generation, so that each gets on by a token at least
    2. nodes          of the live trees: equal shares up to each one's budget, spare rows to those with the fewest
                      verified so far
    3. prefill        chunks of prompts, oldest first, each younger one a few rows; so long that a step stays short

Budgets: one more node pays while its chance to be accepted is higher than the tokens that the whole step would commit
in the time that the node's row takes (``min_rate``). So trees shrink as generations join, and grow as they leave. How
many rows all nodes of a shared step may take together is a matter of its own (``load``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.shared.messages import StepTime

DECODING_PER_PART = 8
MAX_PARTS = 5
"""Prompts are spread over a step for every eight generations that decode, five at most."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """max_rows: packed rows per step. min_chunk: rows that prefill has at least, so that it ends.

    prefill_step_s: how long prefill may make a step in which others decode, but no longer than twice what the step
    takes without it; twice that if nobody decodes: whoever opens meanwhile waits for its end, but short chunks cost a
    lone prompt up to a fifth of its time.
    """

    max_rows: int = 1024
    prefill_step_s: float = 0.2
    min_chunk: int = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runnable generation. num_missing: committed tokens without KV, >= 1. num_live: nodes that could be scored.

    max_nodes: its node budget. num_verified: nodes scored for it so far. Candidates stand oldest first.
    """

    num_missing: int
    num_live: int
    max_nodes: int
    num_verified: int


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one candidate: committed tokens and nodes. (0, 0): not in this step."""

    num_tokens: int
    num_nodes: int


def min_rate(step_time: StepTime, num_generations: int, accepted_per_step: float, num_rows: int) -> float:
    """The acceptance from which one more row pays: tokens per second of the step, times the seconds of a row."""
    tokens = num_generations + accepted_per_step
    return step_time.per_row_s * tokens / max(step_time.at(num_rows), 1e-9)


def schedule(
    candidates: Sequence[Candidate], limits: StepLimits, step_time: StepTime, max_nodes: int | None = None
) -> list[Share]:
    """One share for each candidate, in their order; at least one token in all if there is a candidate.

    max_nodes: for all of them together, None for as many as there are rows.
    """
    num_tokens = [0] * len(candidates)
    rows_left = limits.max_rows
    decoding = [i for i, candidate in enumerate(candidates) if candidate.num_missing == 1]
    # With more generations than rows the least served go first, so that none starves.
    for index in sorted(decoding, key=lambda i: candidates[i].num_verified)[:rows_left]:
        num_tokens[index] = 1
        rows_left -= 1
    node_rows = rows_left if max_nodes is None else min(rows_left, max_nodes)
    num_nodes = _share_nodes(candidates, [index for index in decoding if num_tokens[index]], node_rows)
    rows_left -= sum(num_nodes)
    nodes_left = node_rows - sum(num_nodes)
    prefilling = [i for i, candidate in enumerate(candidates) if candidate.num_missing > 1]
    seconds_left = _prefill_seconds(limits, step_time, limits.max_rows - rows_left, is_shared=bool(decoding))
    most = max(int(seconds_left / max(step_time.per_row_s, 1e-9)), limits.min_chunk)
    backlog = sum(candidates[index].num_missing for index in prefilling)
    prefill_left = min(rows_left, most, max(_spread(backlog, len(decoding)), limits.min_chunk))
    kept = sum(min(candidates[index].num_missing, limits.min_chunk) for index in prefilling)
    for index in prefilling:
        candidate = candidates[index]
        # A short prompt does not wait until a long one before it is through: some rows are kept for the younger.
        least = min(candidate.num_missing, limits.min_chunk)
        kept -= least
        own = max(prefill_left - kept, min(least, prefill_left))
        num_tokens[index] = min(candidate.num_missing, own)
        prefill_left -= num_tokens[index]
        if num_tokens[index] == candidate.num_missing:
            num_nodes[index] = min(candidate.num_live, candidate.max_nodes, prefill_left, nodes_left)
            prefill_left -= num_nodes[index]
            nodes_left -= num_nodes[index]
    return [Share(tokens, nodes) for tokens, nodes in zip(num_tokens, num_nodes, strict=True)]


def _prefill_seconds(limits: StepLimits, step_time: StepTime, num_rows: int, *, is_shared: bool) -> float:
    """How much longer prefill may make a step of that many rows."""
    seconds = step_time.at(num_rows)
    if not is_shared:
        return 2 * limits.prefill_step_s - seconds
    return min(limits.prefill_step_s - seconds, seconds)


def _spread(backlog: int, num_decoding: int) -> int:
    """Rows of prefill that a step takes at least to be done soon.

    Where many decode, prompts come often: taken whole, they would come in bursts, and one slow step in twenty is what
    the 95th percentile is made of. So a step takes a part of what there is, and a prompt a few steps more.
    """
    parts = min(max(num_decoding / DECODING_PER_PART, 1.0), MAX_PARTS)
    return math.ceil(backlog / parts)


def _share_nodes(candidates: Sequence[Candidate], indices: Sequence[int], rows_left: int) -> list[int]:
    """Water-filling: everybody gets an equal share or what it wants, whichever is less; what is left goes on."""
    wanted = {i: min(candidates[i].num_live, candidates[i].max_nodes) for i in indices}
    nodes = [0] * len(candidates)
    # Fewest verified first: they get the odd rows.
    open_indices = sorted((i for i in indices if wanted[i]), key=lambda i: candidates[i].num_verified)
    while open_indices and rows_left > 0:
        share = max(rows_left // len(open_indices), 1)
        for index in open_indices:
            given = min(share, wanted[index] - nodes[index], rows_left)
            nodes[index] += given
            rows_left -= given
        open_indices = [i for i in open_indices if nodes[i] < wanted[i]]
    return nodes

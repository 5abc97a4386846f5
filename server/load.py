"""How the rows of a step are divided under load: node budgets for everybody, and what drafts may add to a shared step.

A step has one length for everybody in it. A generation that has the server to itself may spend rows as it likes; in a
shared step each node makes all the others wait, also those whose own drafts come to nothing. So drafts may make a
shared step longer than a step of one token by a fifth, by more among a few, and that room is gone first as generations
join: from then on steps are as short as without drafts, and the server holds as many generations at a given pace as if
nobody drafted. Half-empty steps are where drafts cost little and bring most anyway.

Which generations get the rows: ``fitting_rate`` raises what a node must be worth until the nodes fit, so the likeliest
nodes stay. Budgets follow the number of generations and not the prompts that come and go, because clients size their
trees by them; a step that prompts fill scores fewer nodes than the budgets say.

Not here: what a node is worth (``acceptance``), and the arithmetic of a step (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.acceptance import NodeBudget
from paceline.server.participant import Participant
from paceline.server.scheduler import Candidate, Share, StepLimits, min_rate, schedule
from paceline.shared.messages import StepTime

SHARED_SHARE = 0.2
"""What drafts may add to a one-token step that many share, as a part of it."""
FEW = 4
"""Up to so many generations the room grows as they get fewer, so that each keeps a tree of some size."""
_RAISE = 1.5


def node_rows(step_time: StepTime, num_generations: int, num_plain_rows: int) -> int | None:
    """How many rows of the next step may be nodes, None for any number.

    num_plain_rows: rows that the step has anyway, for committed tokens and prompts.
    """
    if num_generations <= 1:
        return None
    room = SHARED_SHARE * max(1.0, FEW / num_generations)
    seconds = (1.0 + room) * step_time.at(1) - step_time.at(num_plain_rows)
    return max(int(seconds / max(step_time.per_row_s, 1e-9)), 0)


def fitting_rate(budgets: Sequence[NodeBudget], min_rate: float, max_nodes: int | None) -> float:
    """The acceptance that a node must have, at least ``min_rate``, so that all the budgets together fit."""
    rate = min_rate if max_nodes != 0 else 1.0
    while max_nodes is not None and rate < 1.0 and sum(budget.paying(rate) for budget in budgets) > max_nodes:
        rate = min(_RAISE * rate, 1.0)
    return rate


def _set_budget(budget: NodeBudget, rate: float, max_nodes: int | None) -> int:
    """No room says nothing about the drafts, so there is nothing to find out by probing either."""
    if max_nodes == 0:
        budget.current = 0
        return 0
    return budget.update(rate)


def shares(participants: Sequence[Participant], limits: StepLimits, step_time: StepTime) -> list[Share]:
    """Sets everybody's node budget and says what each gets of the next step."""
    decoding = [one for one in participants if one.num_missing == 1]
    drafting = [one for one in decoding if one.has_nodes]
    accepted = sum(one.budget.expected for one in drafting)
    rows = len(participants) + sum(min(len(one.generation.live), one.budget.current) for one in drafting)
    rate = min_rate(step_time, max(len(decoding), 1), accepted, rows)
    room = node_rows(step_time, len(participants), len(participants))
    rate = fitting_rate([one.budget for one in drafting], rate, room)
    candidates = [
        Candidate(one.num_missing, len(one.generation.live), _set_budget(one.budget, rate, room), one.num_verified)
        for one in participants
    ]
    num_missing = min(sum(one.num_missing for one in participants), limits.max_rows)
    return schedule(candidates, limits, step_time, node_rows(step_time, len(participants), num_missing))

"""How long a client takes to draft a whole tree: the real session and drafters, committed text instead of a server.

Wall time is what a user feels; the thread's own CPU time says the same on a machine that does other things meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import Drafter, DraftSequence
from paceline.client.drafting.live_tree import ANCHOR_ROW, LiveTree
from paceline.client.drafting.policy import Policy
from paceline.client.session import ClientSession, Task
from paceline.shared.messages import Commit, Grow, Welcome
from paceline.shared.sampling import SamplingParams, Verifier

CONTEXT_LEN = 500
NUM_TREES = 40
_LEAST_ROOM = 32


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Medians in milliseconds, and nodes a tree."""

    median_ms: float
    cpu_median_ms: float
    mean_nodes: float


def time_drafts(
    welcome: Welcome,
    drafters: Sequence[Drafter],
    make_policy: Callable[[], Policy],
    text: NDArray[np.int32],
    num_trees: int = NUM_TREES,
) -> DraftTiming:
    """Draft up to ``num_trees`` trees behind the first 500 tokens of ``text`` and on, as if it were the target's.

    Raises ``ValueError`` for a text that is too short for a few trees.
    """
    if len(text) < CONTEXT_LEN + _LEAST_ROOM:
        raise ValueError(f"expected {CONTEXT_LEN + _LEAST_ROOM} tokens of text at least, got {len(text)}")
    task = Task(text[:CONTEXT_LEN], SamplingParams(max_tokens=None), Verifier.GREEDY, patience_s=0.0)
    session = ClientSession(1, task, welcome, drafters, policy=make_policy())
    sequences = [drafter.start() for drafter in drafters]
    session.open(0.0)
    walls: list[float] = []
    cpus: list[float] = []
    nodes: list[int] = []
    at = CONTEXT_LEN
    try:
        while len(walls) <= num_trees and at < len(text) - 1:
            wall, cpu, sent = time.perf_counter(), time.thread_time(), session.stats.drafted
            draft_tree(session, drafters, sequences)
            frames = [message for message in session.outgoing(0.0) if isinstance(message, Grow)]
            walls.append(time.perf_counter() - wall)
            cpus.append(time.thread_time() - cpu)
            nodes.append(sum(len(frame.tokens) for frame in frames))
            assert session.stats.drafted - sent == nodes[-1]
            num_tokens = num_accepted(session.tree, text[at:]) + 1
            session.receive(Commit(1, at, text[at : at + num_tokens], num_tokens - 1, nodes[-1], 128, 0.05), 0.0)
            at += num_tokens
    finally:
        for sequence in sequences:
            sequence.close()
    # The first tree includes the prompt.
    return DraftTiming(float(np.median(walls[1:]) * 1e3), float(np.median(cpus[1:]) * 1e3), float(np.mean(nodes[1:])))


def draft_tree(session: ClientSession, drafters: Sequence[Drafter], sequences: Sequence[DraftSequence]) -> None:
    """By turns until nothing is left to ask; instant drafters answer as often as they are asked."""
    busy = True
    while busy:
        busy = False
        for index, drafter in enumerate(drafters):
            while (request := session.next_draft(index, 0.0)) is not None:
                session.drafted(index, sequences[index].expand(request), 0.0)
                busy = True
                if not drafter.is_instant:
                    break


def num_accepted(tree: LiveTree, text: NDArray[np.int32]) -> int:
    """How many tokens of ``text`` a path of the sent tree holds."""
    row = ANCHOR_ROW
    for depth, token in enumerate(text.tolist()):
        matches = np.flatnonzero((tree.parents == row) & (tree.tokens == token) & tree.sent)
        if not len(matches):
            return depth
        row = int(matches[0])
    return len(text)

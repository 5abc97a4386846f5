"""What trees are worth along text that the target has already written: no target needed, the draft alone is run.

Greedy and coupled output does not depend on drafts, so a recorded text is its own answer whatever tree is drafted: a
step accepts as many of its next tokens as a path of the tree holds. That makes it cheap to compare shapes of trees and
drafters on the same texts.

Not here: naive and mss, whose texts depend on the drafts (``lockstep``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.bench.budget_policy import BudgetPolicy, TreeBudget
from paceline.bench.draft_time import draft_tree, num_accepted
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.policy import Policy, StaticPolicy
from paceline.client.session import ClientSession, Task
from paceline.shared.messages import Commit, Grow, Welcome
from paceline.shared.sampling import SamplingParams

CHAIN = (1, 1, 1, 1)
EXPANSION = (2, 2, 2, 2)
STANDARD_NODES = 32
BUDGETS = (8, 16, STANDARD_NODES, 64)
MERGED = "merged"


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A prompt and what the target wrote behind it with these parameters (greedy, or coupled with a seed)."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Walk:
    """Tokens per verification step, bonus included; median time to draft a tree, the thread's own; nodes a tree."""

    tokens_per_step: float
    draft_ms: float
    mean_nodes: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to grow trees. name: for people. make: a policy for a session; argument: the number of its main drafter."""

    name: str
    make: Callable[[int], Policy]


def shapes() -> list[Shape]:
    """Chain, static tree, dynamic trees of several sizes."""
    static = [
        Shape("chain <1,1,1,1>", lambda main: StaticPolicy(CHAIN)),
        Shape("static <2,2,2,2>", lambda main: StaticPolicy(EXPANSION)),
    ]
    return static + [_dynamic(nodes) for nodes in BUDGETS]


def _dynamic(nodes: int) -> Shape:
    return Shape(f"dynamic {nodes}", lambda main: BudgetPolicy(TreeBudget(num_nodes=nodes), main))


def compare(
    welcome: Welcome,
    modes: Mapping[str, Sequence[Written]],
    drafters: Sequence[Drafter],
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[dict[str, float | str]]:
    """One row for each shape and set of drafters: ``tokens_per_step`` in each mode, ``draft_ms``, ``nodes``.

    modes: name -> texts. Drafters stand with the instant ones first; each is measured alone, then all merged.
    """
    sets: list[tuple[str, Sequence[Drafter]]] = [(drafter.name, [drafter]) for drafter in drafters]
    if len(drafters) > 1:
        sets.append((MERGED, drafters))
    jobs = [(name, chosen, shape) for name, chosen in sets for shape in shapes()]
    rows: list[dict[str, float | str]] = []
    for number, (name, chosen, shape) in enumerate(jobs):
        row: dict[str, float | str] = {"drafters": name, "tree": shape.name}
        for mode, texts in modes.items():
            walk = walk_texts(welcome, texts, chosen, shape)
            row |= {mode: round(walk.tokens_per_step, 4), "nodes": round(walk.mean_nodes, 2)}
            row["draft_ms"] = round(walk.draft_ms, 3)
        rows.append(row)
        on_done(number + 1, len(jobs))
    return rows


def walk_texts(welcome: Welcome, texts: Sequence[Written], drafters: Sequence[Drafter], shape: Shape) -> Walk:
    """Draft along the texts, one calibration for all. Raises ``ValueError`` if no text has any output."""
    acceptance = Acceptance()
    num_tokens, times, nodes = 0, [], []
    for text in texts:
        for count, seconds, size in _steps(welcome, text, drafters, shape, acceptance):
            num_tokens += count
            times.append(seconds)
            nodes.append(size)
    if not times:
        raise ValueError("expected at least one text with output, got none")
    return Walk(num_tokens / len(times), float(np.median(times) * 1e3), float(np.mean(nodes)))


def _steps(
    welcome: Welcome, text: Written, drafters: Sequence[Drafter], shape: Shape, acceptance: Acceptance
) -> list[tuple[int, float, int]]:
    """(tokens, seconds to draft, nodes) of every step along one text."""
    task = Task(text.prompt, text.sampling, text.sampling.default_verifier(), patience_s=0.0)
    controller = Controller(welcome.step_time, welcome.limits, can_switch=False)
    policy = shape.make(len(drafters) - 1)
    session = ClientSession(1, task, welcome, drafters, policy=policy, acceptance=acceptance, controller=controller)
    sequences = [drafter.start() for drafter in drafters]
    session.open(0.0)
    made: list[tuple[int, float, int]] = []
    at, last = 0, len(text.output) - 1
    try:
        while at <= last:
            started = time.thread_time()
            draft_tree(session, drafters, sequences)
            sent = [message for message in session.outgoing(0.0) if isinstance(message, Grow)]
            seconds = time.thread_time() - started
            size = sum(len(frame.tokens) for frame in sent)
            count = min(num_accepted(session.tree, text.output[at:]), last - at)
            tokens = text.output[at : at + count + 1]
            session.receive(Commit(1, len(text.prompt) + at, tokens, count, size, 128, 0.05), 0.0)
            made.append((len(tokens), seconds, size))
            at += len(tokens)
    finally:
        for sequence in sequences:
            sequence.close()
    return made

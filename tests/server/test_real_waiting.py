"""The stop-and-wait baselines over a real socket: whatever they draft, the text is the target's, one tree a step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from paceline.bench.baselines.model_source import ModelSource, path_of
from paceline.bench.baselines.real_waiting import Answer, RealWaitingClient
from paceline.bench.baselines.shapes import BestFirst, Chain, Expansion, Shape
from paceline.bench.whole_tree_server import WholeTreeEngine
from paceline.client.address import parse_address
from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, DraftRequest
from paceline.client.link import Link, LinkSettings
from paceline.server.engine import EngineSettings
from paceline.server.plan import StepPlan
from paceline.server.scripted import ScriptedTarget, markov
from paceline.shared.messages import PROTOCOL_VERSION, Commit, Grow, Hello, Open, StepTime
from paceline.shared.sampling import SamplingParams, Verifier

PROMPT = [65, 66, 67, 68]
VOCAB = 258


class Reciter:
    """A drafter that knows a text: the right token first, or behind a wrong one at every ``slip``-th position.

    Refuses requests that do not continue what it was told.
    """

    name, is_instant, max_context, chunk_len = "reciter", False, 4096, 3

    def __init__(self, text: Sequence[int], slip: int = 0) -> None:
        self.text, self.slip = list(text), slip

    def start(self) -> Recital:
        return Recital(self)

    def close(self) -> None:
        """Nothing to free."""


class Recital:
    def __init__(self, drafter: Reciter) -> None:
        self.drafter = drafter
        self.held: list[int] = []
        self.paths: dict[int, list[int]] = {}

    def expand(self, request: DraftRequest) -> Candidates:
        assert request.start in (len(self.held), len(self.held) - 1)
        assert len(request.token_ids) <= self.drafter.chunk_len
        for key, token in zip(request.path_keys.tolist(), request.token_ids.tolist(), strict=True):
            assert key not in self.paths or self.paths[key][-1] == token
        self.held = self.held[: request.start] + request.token_ids.tolist()
        alive = set(request.alive_keys.tolist())
        self.paths = {key: path for key, path in self.paths.items() if key in alive}
        rows = [self.held] if request.wants_anchor else []
        for key, token, parent, depth in zip(
            request.keys.tolist(),
            request.tokens.tolist(),
            request.parent_keys.tolist(),
            request.depths.tolist(),
            strict=True,
        ):
            above = [] if parent == ANCHOR_KEY else self.paths[parent]
            self.paths[key] = [*above[-(depth - 1) :], token] if depth > 1 else [token]
            assert len(self.paths[key]) == depth
            rows.append([*self.held, *self.paths[key]])
        ids = np.array([self.answer(row) for row in rows], np.int32).reshape(len(rows), 3)[:, : request.width]
        logprobs = np.log(np.tile([0.6, 0.3, 0.1], (len(rows), 1))).astype(np.float32)[:, : request.width]
        return Candidates(ids, logprobs)

    def answer(self, context: list[int]) -> list[int]:
        text, place = self.drafter.text, len(context)
        right = text[place] if context == text[:place] and place < len(text) else 7
        others = [(right + 1) % VOCAB, (right + 2) % VOCAB]
        slips = self.drafter.slip and place % self.drafter.slip == 0
        return [others[0], right, others[1]] if slips else [right, *others]

    def close(self) -> None:
        """Nothing to give back."""


async def run(server: Any, drafter: Reciter, shape: Shape, *, is_proactive: bool, num_tokens: int = 40) -> Answer:
    link = await Link.connect(
        parse_address(server.url), Hello(PROTOCOL_VERSION, "test"), None, LinkSettings(connect_s=20)
    )
    with ThreadPoolExecutor(1) as pool:
        client = RealWaitingClient(link, drafter, pool)
        try:
            await asyncio.wait_for(client.serve([1, 2, 3], 5, shape, is_proactive=is_proactive), 60)
            return await asyncio.wait_for(client.serve(PROMPT, num_tokens, shape, is_proactive=is_proactive), 60)
        finally:
            await client.close()


@pytest.mark.parametrize("slip", [0, 3, 1])
@pytest.mark.parametrize(
    ("shape", "is_proactive"),
    [(Chain(4), False), (Expansion((2, 1, 1)), False), (BestFirst(8, 4), True)],
    ids=["chain", "tree", "specedge"],
)
async def test_baselines_write_the_targets_text(serve: Any, shape: Shape, is_proactive: bool, slip: int) -> None:
    async with serve(step_s=0.0002) as server:
        text = PROMPT + server.target.greedy(PROMPT, 140)
        answer = await run(server, Reciter(text, slip), shape, is_proactive=is_proactive)
    tokens = [token for _, some in answer.arrivals for token in some]
    assert len(tokens) >= 40
    assert tokens == text[4 : 4 + len(tokens)]
    commits = [one.message for one in answer.trace.arrived if isinstance(one.message, Commit)]
    grows = [one.message for one in answer.trace.sent if isinstance(one.message, Grow)]
    assert sum(commit.num_drafted for commit in commits) > 0 or slip == 1
    if slip == 0 and shape == Chain(4):
        # Where a frame came too late for its step, what is left of the chain is shorter.
        assert len(grows[0].tokens) == 4 and all(1 <= len(grow.tokens) <= 4 for grow in grows)


def test_the_baselines_server_scores_every_node() -> None:
    target = ScriptedTarget(markov(32, 0), 32)
    # Rows that cost as much as a step would make our own budget score next to nothing.
    engine = WholeTreeEngine(target, EngineSettings(step_time=StepTime(0.001, 0.01)))
    engine.open((0, 0), Open(0, np.array([1, 2], np.int32), SamplingParams(max_tokens=200), Verifier.GREEDY), 0.0)
    first_id = 0
    for step in range(20):
        frame = Grow(0, 2 + step, first_id, np.array([31, 30, 29, 28], np.int32), np.full(4, -1, np.int32))
        if step:
            engine.grow((0, 0), frame, float(step))
            first_id += 4
        plan = engine.next_step(float(step))
        assert isinstance(plan, StepPlan)
        messages = engine.finish(plan, target.forward(plan.batch), step + 0.5)
        commit = next(message for _, message in messages if isinstance(message, Commit))
        if len(commit.tokens) > 1 or commit.at != 2 + step:
            break
        assert commit.num_scored == (4 if step else 0)


def test_a_guess_that_comes_true_keeps_its_draft_and_its_kv() -> None:
    text = list(range(100, 140))
    source = ModelSource(Reciter(text), text[:8])
    source.read_prompt()
    shape = Chain(2)
    draft = shape.grow(source, 0, 10)
    assert [path_of(draft, node) for node in range(2)] == [(108,), (108, 109)]
    num_calls = len(source.calls)
    ((guess, _),) = source.below(draft, [1], 1)[0]
    path = (108, 109, guess)
    source.ahead_of(path)
    ahead = shape.grow(source, 0, 10)
    assert ahead.tokens == [111, 112]
    source.commit(list(path))
    again = shape.grow(source, 0, 10)
    assert again.tokens == ahead.tokens
    # The leaf, then one call a level below its guess; what was committed is known by its nodes, not computed again.
    assert [call.num_rows for call in source.calls[num_calls:]][:4] == [1, 1, 1, 0]


def test_a_draft_below_a_guess_that_turned_out_wrong_ends_before_its_next_call() -> None:
    text = list(range(100, 140))
    source = ModelSource(Reciter(text), text[:8])
    draft = Chain(1).grow(source, 0, 10)
    source.ahead_of((108, 5))
    source.truth = (108, 109)
    num_calls = len(source.calls)
    assert not len(Chain(4).grow(source, 0, 10))
    assert len(source.calls) == num_calls
    assert draft.tokens == [108]

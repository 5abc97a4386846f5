"""Thousands of mixed generations through one engine: nothing leaks, whatever way they end."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan
from paceline.server.scripted import ScriptedTarget, markov
from paceline.shared.messages import ANCHOR_ID, Commit, Fault, Grow, Open, StepTime
from paceline.shared.sampling import SamplingParams

STEP = StepTime(0.03, 0.0005)
VOCAB, NUM_CONNECTIONS = 24, 6


@dataclass(slots=True)
class Live:
    """What a client knows of its generation."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    proposed: set[tuple[int, ...]] = field(default_factory=set)
    next_id: int = 0


class Crowd:
    """Clients that come, draft well or badly, and leave in every way there is, by the dice of one seed."""

    def __init__(self, num_generations: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.target = ScriptedTarget(
            markov(VOCAB, 1), VOCAB, eos_token_ids=(0,), num_blocks=22, block_size=4, max_context=60
        )
        self.engine = Engine(self.target, EngineSettings(max_running=6, max_queue=4, step_time=STEP))
        self.live: dict[tuple[int, int], Live] = {}
        self.ends: Counter[str] = Counter()
        self.num_left = num_generations
        self.now = 0.0

    def run(self, until: int) -> None:
        """Steps until no more than ``until`` generations are to be opened, and at 0 until all are done."""
        while self.num_left > until or (until == 0 and not self.engine.is_idle):
            self.come()
            self.draft()
            self.leave()
            plan = self.engine.next_step(self.now)
            self.hear(self.engine.take_messages())
            if not isinstance(plan, StepPlan):
                continue
            logits = self.target.forward(plan.batch)
            self.target.num_rows.clear()
            self.draft()
            self.leave()
            self.now += STEP.at(plan.batch.num_rows)
            self.hear(self.engine.finish(plan, logits, self.now))

    def come(self) -> None:
        while self.num_left and len(self.live) < 9 and self.rng.random() < 0.6:
            prompt = [self.rng.randrange(1, 4) for _ in range(self.rng.randint(1, 30))]
            key = (self.rng.randrange(NUM_CONNECTIONS), self.num_left)
            sampling = SamplingParams(max_tokens=self.rng.randint(1, 25))
            self.engine.open(
                key, Open(key[1], np.array(prompt, np.int32), sampling, sampling.default_verifier()), self.now
            )
            self.live[key] = Live(prompt)
            self.num_left -= 1

    def draft(self) -> None:
        """Some send a chain of right, then wrong tokens, and siblings that are wrong."""
        for key, one in self.live.items():
            if self.rng.random() < 0.5:
                continue
            right = self.target.greedy(one.prompt + one.output, self.rng.randint(0, 3))
            tokens, parents, path, above = [], [], tuple(one.output), ANCHOR_ID
            for token in [*right, self.rng.randrange(VOCAB)]:
                wanted = {token, self.rng.randrange(VOCAB)}
                fresh = [other for other in wanted if (*path, other) not in one.proposed]
                if token not in fresh:
                    break
                for other in sorted(fresh, key=lambda other: other == token):
                    one.proposed.add((*path, other))
                    tokens.append(other)
                    parents.append(above)
                path, above = (*path, token), one.next_id + len(tokens) - 1
            if tokens:
                at = len(one.prompt) + len(one.output)
                frame = Grow(key[1], at, one.next_id, np.array(tokens, np.int32), np.array(parents, np.int32))
                self.engine.grow(key, frame, self.now)
                one.next_id += len(tokens)

    def leave(self) -> None:
        if self.live and self.rng.random() < 0.05:
            self.engine.cancel(self.rng.choice(list(self.live)))
        if self.rng.random() < 0.01:
            connection = self.rng.randrange(NUM_CONNECTIONS)
            self.engine.disconnect(connection)
            for key in [key for key in self.live if key[0] == connection]:
                del self.live[key]
                self.ends["disconnected"] += 1

    def hear(self, messages: list) -> None:
        for key, message in messages:
            if key not in self.live:
                continue
            if isinstance(message, Commit):
                self.live[key].output += message.tokens.tolist()
            if isinstance(message, Fault) or (isinstance(message, Commit) and message.finish is not None):
                one = self.live.pop(key)
                end = message.code if isinstance(message, Fault) else str(message.finish)
                assert end == "cancelled" or one.output == self.target.greedy(one.prompt, len(one.output))
                self.ends[end] += 1


@pytest.mark.parametrize("num_generations", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_blocks_return_to_zero_and_memory_stays_flat(num_generations: int) -> None:
    crowd = Crowd(num_generations, seed=1)
    pool, engine = crowd.target.pool, crowd.engine
    crowd.run(until=num_generations // 5)
    gc.collect()
    num_objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        crowd.run(until=0)
        gc.collect()
        left_behind = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert left_behind < 100_000
    assert len(gc.get_objects()) <= num_objects + 100
    assert sum(crowd.ends.values()) == num_generations
    assert set(crowd.ends) == {"stop", "length", "cancelled", "disconnected"}
    assert min(crowd.ends.values()) >= num_generations // 100
    assert engine.num_preempted >= num_generations // 100
    assert engine.counters.num_accepted > num_generations
    assert engine.counters.num_faults == 0
    assert pool.num_used_blocks == 0
    assert pool.num_free_blocks + pool.num_cached_blocks == pool.num_blocks
    pool.clear_cache()
    assert pool.num_free_blocks == pool.num_blocks

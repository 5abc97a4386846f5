"""Speculation inside the server: draft model and target take turns on the same machine, for all generations at once.

Each round drafts a tree for every generation (the calls are batched level by level, and cost the server's own time),
then verifies all trees in one step. No network is on the way of a draft; it is on the way of the text only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.bench.baselines.shapes import Draft, Shape
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime
from paceline.bench.frames import weight
from paceline.bench.link import LinkModel, Pipe
from paceline.bench.playback import Oracle
from paceline.bench.recording import Recording
from paceline.bench.stats import Lane, Served, Span
from paceline.shared.messages import Commit, FinishReason, Open, StepTime
from paceline.shared.sampling import SamplingParams, Verifier


@dataclass(slots=True)
class _Generation:
    oracle: Oracle
    served: Served
    down: Pipe
    on_done: Callable[[], None]
    num_missing: int
    place: int = 0


class ColocatedServer:
    """Rounds of drafting and verifying, as long as there is a generation."""

    def __init__(self, clock: VirtualClock, step_time: StepTime, draft_time: DraftTime, shape: Shape | None) -> None:
        """shape: None drafts nothing."""
        self._clock, self._step_time, self._draft_time, self._shape = clock, step_time, draft_time, shape
        self._generations: list[_Generation] = []
        self._is_busy = False

    def open(self, recording: Recording, link: LinkModel, seed: int, on_done: Callable[[], None]) -> Served:
        """Sends the prompt and runs it."""
        served = Served(self._clock.now)
        oracle, prompt = Oracle(recording), recording.prompt
        size = weight(Open(0, prompt, SamplingParams(max_tokens=len(oracle.output)), Verifier.GREEDY), is_up=True)
        served.bytes_up += size
        arrival = Pipe(link, is_up=True, seed=seed).send(self._clock.now, size)
        down = Pipe(link, is_up=False, seed=seed)
        generation = _Generation(oracle, served, down, on_done, len(prompt))

        def arrive() -> None:
            self._generations.append(generation)
            if not self._is_busy:
                self._round()

        self._clock.at(arrival, arrive)
        return served

    def _round(self) -> None:
        """Draft for everybody whose prompt is done, then one step for all."""
        self._is_busy = True
        now = self._clock.now
        drafts: list[tuple[_Generation, Draft]] = []
        for generation in self._generations:
            left = len(generation.oracle.output) - generation.place - 1
            is_drafted = self._shape is not None and generation.num_missing == 1
            drafts.append((generation, self._grow(generation, left) if is_drafted else Draft(generation.place)))
        seconds = self._seconds([draft for _, draft in drafts])
        begin = now + seconds
        num_rows = sum(generation.num_missing + len(draft) for generation, draft in drafts)
        end = begin + self._step_time.at(num_rows)
        for generation, draft in drafts:
            if seconds:
                generation.served.spans.append(Span(Lane.DRAFT, now, begin, len(draft)))
            generation.served.spans.append(Span(Lane.STEP, begin, end, len(draft) + 1))
        self._clock.at(end, lambda: self._verified(drafts, end - begin))

    def _grow(self, generation: _Generation, max_depth: int) -> Draft:
        assert self._shape is not None
        return self._shape.grow(generation.oracle, generation.place, max_depth)

    def _seconds(self, drafts: list[Draft]) -> float:
        """The calls of one level go together, whoever they are for."""
        levels: dict[int, int] = {}
        for draft in drafts:
            for level, rows in enumerate(draft.calls):
                levels[level] = levels.get(level, 0) + rows
        return sum(self._draft_time.at(rows) for rows in levels.values())

    def _verified(self, drafts: list[tuple[_Generation, Draft]], step_s: float) -> None:
        for generation, draft in drafts:
            self._commit(generation, draft, step_s)
        self._generations = [one for one in self._generations if one.place < len(one.oracle.output)]
        self._is_busy = False
        if self._generations:
            self._round()

    def _commit(self, generation: _Generation, draft: Draft, step_s: float) -> None:
        oracle, served, now = generation.oracle, generation.served, self._clock.now
        accepted = draft.accepted(oracle)
        tokens = oracle.output[generation.place : generation.place + len(accepted) + 1]
        at = oracle.prompt_len + generation.place
        generation.place += len(tokens)
        generation.num_missing = 1
        is_last = generation.place == len(oracle.output)
        finish = FinishReason.LENGTH if is_last else None
        commit = Commit(0, at, np.array(tokens, np.int32), len(accepted), len(draft), 64, step_s, finish)
        served.num_steps += 1
        served.num_drafted += len(draft)
        served.num_accepted += len(accepted)
        size = weight(commit, is_up=False)
        served.bytes_down += size
        arrival = generation.down.send(now, size)
        served.spans.append(Span(Lane.DOWN, now, arrival, len(tokens)))

        def arrive() -> None:
            served.arrive(self._clock.now, tokens)
            if is_last:
                served.is_finished = True
                generation.on_done()

        self._clock.at(arrival, arrive)

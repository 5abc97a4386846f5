"""Speculation inside the server: draft model and target take turns on the same machine, for all generations at once.

Each round drafts a tree for every generation (the calls are batched level by level, and cost the server's own time),
then verifies all trees in one step. Prompts are prefilled in the chunks that the real scheduler would cut; the draft
model reads them too. No network is on the way of a draft; it is on the way of the text only.

More than such systems have: the draft model reads its context for nothing, and trees take no time to build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.bench.baselines.shapes import Draft, Shape
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import ServerCost
from paceline.bench.frames import Weigh, weight
from paceline.bench.link import LinkModel, Pipe
from paceline.bench.playback import Oracle
from paceline.bench.recording import Recording
from paceline.bench.stats import Lane, Served, Span
from paceline.server.scheduler import Candidate, Share, StepLimits, schedule
from paceline.shared.messages import Commit, FinishReason, Open
from paceline.shared.sampling import SamplingParams, Verifier


@dataclass(slots=True)
class _Generation:
    """num_missing: tokens without KV; 1 once the prompt is done. place: tokens of output that are committed."""

    oracle: Oracle
    served: Served
    down: Pipe
    on_done: Callable[[], None]
    num_missing: int
    place: int = 0

    @property
    def context_len(self) -> int:
        """Tokens with KV."""
        return self.oracle.prompt_len + self.place - self.num_missing


@dataclass(frozen=True, slots=True)
class _Turn:
    """One generation's part of a round."""

    generation: _Generation
    share: Share
    draft: Draft


class ColocatedServer:
    """Rounds of drafting and verifying, as long as there is a generation."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: ServerCost,
        shape: Shape | None,
        limits: StepLimits | None = None,
        *,
        weigh: Weigh = weight,
    ) -> None:
        """shape: None drafts nothing."""
        self._clock, self._cost, self._shape, self._weigh = clock, cost, shape, weigh
        self._limits = limits or StepLimits()
        self._generations: list[_Generation] = []
        self._is_busy = False

    def open(self, recording: Recording, link: LinkModel, seed: int, on_done: Callable[[], None]) -> Served:
        """Sends the prompt and runs it."""
        served = Served(self._clock.now)
        oracle, prompt = Oracle(recording), recording.prompt
        size = self._weigh(Open(0, prompt, SamplingParams(max_tokens=len(oracle.output)), Verifier.GREEDY), is_up=True)
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
        turns = self._turns()
        seconds = self._draft_seconds(turns)
        begin = now + seconds
        num_rows = sum(turn.share.num_tokens + len(turn.draft) for turn in turns)
        end = begin + self._cost.at(num_rows, sum(turn.generation.context_len for turn in turns))
        for turn in turns:
            if seconds:
                turn.generation.served.spans.append(Span(Lane.DRAFT, now, begin, len(turn.draft)))
            turn.generation.served.spans.append(Span(Lane.STEP, begin, end, len(turn.draft) + 1))
        self._clock.at(end, lambda: self._verified(turns, end - begin))

    def _turns(self) -> list[_Turn]:
        drafts = [self._grow(one) if one.num_missing == 1 else Draft(one.place) for one in self._generations]
        candidates = [
            Candidate(one.num_missing, len(draft), len(draft), 0)
            for one, draft in zip(self._generations, drafts, strict=True)
        ]
        shares = schedule(candidates, self._limits, self._cost.step_time)
        turns = zip(self._generations, shares, drafts, strict=True)
        return [_Turn(one, share, draft) for one, share, draft in turns if share.num_tokens]

    def _grow(self, generation: _Generation) -> Draft:
        left = len(generation.oracle.output) - generation.place - 1
        if self._shape is None:
            return Draft(generation.place)
        return self._shape.grow(generation.oracle, generation.place, left)

    def _draft_seconds(self, turns: list[_Turn]) -> float:
        """The calls of one level go together, whoever they are for; prompts ride on the first."""
        levels: dict[int, int] = {}
        for turn in turns:
            for level, rows in enumerate(turn.draft.calls):
                levels[level] = levels.get(level, 0) + rows
        if self._shape is not None:
            prompts = sum(turn.share.num_tokens for turn in turns if not turn.draft.calls)
            levels[0] = levels.get(0, 0) + prompts
        return sum(self._cost.draft.at(rows) for rows in levels.values() if rows)

    def _verified(self, turns: list[_Turn], step_s: float) -> None:
        for turn in turns:
            turn.generation.num_missing -= turn.share.num_tokens
            if not turn.generation.num_missing:
                self._commit(turn.generation, turn.draft, step_s)
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
        size = self._weigh(commit, is_up=False)
        served.bytes_down += size
        arrival = generation.down.send(now, size)
        served.spans.append(Span(Lane.DOWN, now, arrival, len(tokens)))

        def arrive() -> None:
            served.arrive(self._clock.now, tokens)
            if is_last:
                served.is_finished = True
                generation.on_done()

        self._clock.at(arrival, arrive)

"""Stop-and-wait speculation over a link: draft, send, wait for the verdict, draft again.

The server verifies whatever waits when it becomes free, all in one step. With ``is_proactive`` the client uses the wait
as SpecEdge does (arXiv 2505.17052, section 4): it guesses that the likeliest leaf will be accepted whole and what the
bonus token will be, and drafts on from there; if exactly that happens the next tree is ready, else it was in vain.

Both are given more than their systems have: a guess in vain is dropped without finishing the call it is in, and
verdicts cost no time beyond the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.bench.baselines.shapes import Draft, Shape
from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime
from paceline.bench.frames import weight
from paceline.bench.link import LinkModel, Pipe
from paceline.bench.playback import Oracle
from paceline.bench.recording import Recording
from paceline.bench.stats import Lane, Served, Span
from paceline.shared.messages import Commit, FinishReason, Grow, Open
from paceline.shared.sampling import SamplingParams, Verifier


@dataclass(frozen=True, slots=True)
class Job:
    """Rows for one client's part of a step, and what to do when it is done; it learns when the step began."""

    num_rows: int
    done: Callable[[float], None]


class StepCost(Protocol):
    """What a step takes."""

    def at(self, num_rows: int, /) -> float:
        """Seconds for a step of so many packed rows."""
        ...


class VerifyServer:
    """Runs one step after another; a step takes every job that waits when it begins."""

    def __init__(self, clock: VirtualClock, step_time: StepCost) -> None:
        self._clock = clock
        self._step_time = step_time
        self._jobs: list[Job] = []
        self._is_busy = False

    def submit(self, job: Job) -> None:
        """Queue a job; begins at once if the server is idle."""
        self._jobs.append(job)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        jobs, self._jobs = self._jobs, []
        self._is_busy = True
        began = self._clock.now
        seconds = self._step_time.at(sum(job.num_rows for job in jobs))
        self._clock.after(seconds, lambda: self._finish(jobs, began))

    def _finish(self, jobs: list[Job], began: float) -> None:
        self._is_busy = False
        for job in jobs:
            job.done(began)
        if self._jobs and not self._is_busy:
            self._begin()


@dataclass(frozen=True, slots=True)
class Guess:
    """What was drafted during a wait: right if ``leaf`` ends the accepted path and ``bonus`` follows."""

    leaf: int
    bonus: int
    draft: Draft
    ready_at: float


class WaitingClient:
    """One request. ``on_done`` is called when the last token has arrived."""

    def __init__(
        self,
        clock: VirtualClock,
        server: VerifyServer,
        recording: Recording,
        shape: Shape,
        cost: DraftTime,
        link: LinkModel,
        *,
        seed: int = 0,
        is_proactive: bool = False,
        cached_len: int = 0,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """cached_len: tokens of the prompt whose KV the server has already."""
        self._clock, self._server, self._shape, self._cost = clock, server, shape, cost
        self._oracle = Oracle(recording)
        self._prompt = recording.prompt
        self._up, self._down = Pipe(link, is_up=True, seed=seed), Pipe(link, is_up=False, seed=seed)
        self._is_proactive = is_proactive
        self._cached_len = cached_len
        self._on_done = on_done
        self._place = 0
        self._first_id = 0
        self._draft = Draft(0)
        self._guess: Guess | None = None
        self.served = Served(clock.now)

    def start(self) -> None:
        """Send the prompt. The first answer is the token after it, without any draft."""
        sampling = SamplingParams(max_tokens=len(self._oracle.output))
        size = weight(Open(0, self._prompt, sampling, Verifier.GREEDY), is_up=True)
        self._send(size, len(self._prompt) - self._cached_len, [])

    def _send(self, size: int, num_rows: int, accepted: list[int]) -> None:
        now = self._clock.now
        self.served.bytes_up += size
        arrival = self._up.send(now, size)
        self.served.spans.append(Span(Lane.UP, now, arrival, num_rows))
        self._clock.at(
            arrival, lambda: self._server.submit(Job(num_rows, lambda began: self._verified(began, accepted)))
        )

    def _verified(self, began: float, accepted: list[int]) -> None:
        """On the server: the step is over; commit the accepted nodes and the bonus token."""
        now = self._clock.now
        place = self._place
        tokens = self._oracle.output[place : place + len(accepted) + 1]
        self.served.num_steps += 1
        self.served.spans.append(Span(Lane.STEP, began, now, len(self._draft) + 1))
        is_last = place + len(tokens) == len(self._oracle.output)
        commit = Commit(
            generation=0,
            at=len(self._prompt) + place,
            tokens=np.array(tokens, np.int32),
            num_drafted=len(accepted),
            num_scored=len(self._draft),
            node_budget=64,
            step_s=now - began,
            finish=FinishReason.LENGTH if is_last else None,
        )
        size = weight(commit, is_up=False)
        self.served.bytes_down += size
        arrival = self._down.send(now, size)
        self.served.spans.append(Span(Lane.DOWN, now, arrival, len(tokens)))
        self._clock.at(arrival, lambda: self._committed(tokens, accepted))

    def _committed(self, tokens: list[int], accepted: list[int]) -> None:
        """On the client."""
        first = not self.served.arrivals
        self.served.arrive(self._clock.now, tokens)
        self.served.num_accepted += len(accepted)
        self._place += len(tokens)
        if self._place == len(self._oracle.output):
            self.served.is_finished = True
            self._on_done()
            return
        guess, self._guess = self._guess, None
        # The draft model reads the prompt while the server does; the rest of its way is the same for all.
        if guess is not None and accepted and guess.leaf == accepted[-1] and guess.bonus == tokens[-1]:
            self._draft, ready = guess.draft, max(guess.ready_at, self._clock.now)
        else:
            self._draft = self._grow(self._place)
            ready = self._clock.now + self._draft.seconds(self._cost, 0 if first else 1)
            self.served.spans.append(Span(Lane.DRAFT, self._clock.now, ready, len(self._draft)))
        self._clock.at(ready, self._send_draft)

    def _grow(self, place: int) -> Draft:
        return self._shape.grow(self._oracle, place, len(self._oracle.output) - place - 1)

    def _send_draft(self) -> None:
        draft = self._draft
        size = 0
        if len(draft):
            parents = np.array([p + self._first_id if p >= 0 else -1 for p in draft.parents], np.int32)
            tokens = np.array(draft.tokens, np.int32)
            grow = Grow(0, len(self._prompt) + self._place, self._first_id, tokens, parents)
            size = weight(grow, is_up=True)
        self._first_id += len(draft)
        self.served.num_drafted += len(draft)
        self._send(size, len(draft) + 1, draft.accepted(self._oracle))
        if self._is_proactive and len(draft):
            self._guess = self._guess_ahead(draft)

    def _guess_ahead(self, draft: Draft) -> Guess | None:
        """SpecEdge's one guess: the likeliest leaf and the likeliest token behind it."""
        leaf = draft.likeliest_leaf
        (options,) = self._oracle.below(draft, [leaf], 1)
        place = draft.place + draft.depth(leaf) + 1
        if not options or place >= len(self._oracle.output):
            return None
        # If the guess is wrong its tree is never used, so it may be grown as if it were right.
        ahead = self._grow(place)
        begin = self._clock.now
        ready = begin + self._cost.at(1) + ahead.seconds(self._cost)
        self.served.spans.append(Span(Lane.DRAFT, begin, ready, len(ahead)))
        return Guess(leaf, options[0][0], ahead, ready)

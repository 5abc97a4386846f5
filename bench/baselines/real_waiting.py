"""Stop-and-wait speculation against a real server: the baselines' rules with a real draft model and a real link.

The server is ours: a wish for patience keeps it from stepping without a tree, so that it waits as the published systems
do. Drafting runs on a thread of its own; with ``is_proactive`` it goes on during the wait by SpecEdge's rule (one
guess: the likeliest leaf and the likeliest token behind it, arXiv 2505.17052, section 4). Greedy only.

Not here: the same rules on a virtual clock (``waiting``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import numpy as np

from paceline.bench.baselines.model_source import ModelSource, Path, path_of
from paceline.bench.baselines.shapes import Draft, Shape
from paceline.client.drafting.drafter import Drafter
from paceline.client.faults import error_from_fault
from paceline.client.link import Link
from paceline.client.trace import Arrived, Sent, Trace
from paceline.shared.errors import PacelineError
from paceline.shared.messages import ANCHOR_ID, Cancel, ClientMessage, Commit, Fault, Grow, Open
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import encode

Result = TypeVar("Result")
PATIENCE_S = 2.0
"""What the server is asked to wait for a tree: the most it grants."""
_SPARE_TOKENS = 64
"""Asked for beyond what is counted, so that no tree is cut short by the end of the text."""


@dataclass(slots=True)
class Answer:
    """What one prompt brought. Times of ``perf_counter``. arrivals: the tokens of each commit."""

    opened_at: float
    arrivals: list[tuple[float, list[int]]] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Guess:
    path: Path
    draft: Draft


class RealWaitingClient:
    """Serves one prompt after another over one link, which it closes in the end."""

    def __init__(self, link: Link, drafter: Drafter, pool: Executor) -> None:
        self._link, self._drafter, self._pool = link, drafter, pool
        self._news: asyncio.Queue[Arrived | PacelineError] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())
        self._number = 0

    async def close(self) -> None:
        """Say goodbye."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._link.close()

    async def serve(self, prompt: list[int], max_tokens: int, shape: Shape, *, is_proactive: bool) -> Answer:
        """At least ``max_tokens`` tokens. Raises ``LinkError`` or what the server reported."""
        self._number += 1
        answer = Answer(perf_counter())
        source = ModelSource(self._drafter, prompt)
        sampling = SamplingParams(max_tokens=max_tokens + _SPARE_TOKENS, ignore_eos=True)
        opening = Open(self._number, np.array(prompt, np.int32), sampling, Verifier.GREEDY, patience_s=PATIENCE_S)
        await self._send(opening, answer)
        try:
            await self._run(source.read_prompt)
            await self._rounds(source, answer, max_tokens, shape, is_proactive=is_proactive)
            await self._send(Cancel(self._number), Answer(0.0))
        finally:
            source.close()
        answer.trace.calls = source.calls
        return answer

    async def _rounds(
        self, source: ModelSource, answer: Answer, max_tokens: int, shape: Shape, *, is_proactive: bool
    ) -> None:
        sent = _SentNodes()
        guess: _Guess | None = None
        tokens = await self._next_commit(answer)
        source.commit(tokens)
        while answer.num_tokens < max_tokens:
            left = max_tokens + _SPARE_TOKENS - answer.num_tokens - 1
            if guess is not None and guess.path == tuple(tokens):
                draft = guess.draft
            else:
                draft = await self._run(shape.grow, source, 0, left)
            if not self._news.empty():
                # The server scored a tree in two parts: what was drafted meanwhile hangs below a past anchor.
                tokens, guess = await self._next_commit(answer), None
                source.commit(tokens)
                sent.commit(tokens)
                continue
            frame = sent.frame(self._number, len(source.tokens), draft)
            if len(frame.tokens):
                await self._send(frame, answer)
            ahead = self._run(_guess_ahead, source, draft, shape, left) if is_proactive and len(draft) else None
            tokens = await self._next_commit(answer)
            source.truth = tuple(tokens)
            guess = None if ahead is None else await ahead
            source.commit(tokens)
            sent.commit(tokens)

    def _run(self, work: Callable[..., Result], *arguments: object) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def _read(self) -> None:
        try:
            async for received in self._link.messages():
                self._news.put_nowait(Arrived(perf_counter(), received.message, received.num_bytes, received.rtt_s))
        except PacelineError as error:
            self._news.put_nowait(error)

    async def _next_commit(self, answer: Answer) -> list[int]:
        while True:
            news = await self._news.get()
            if isinstance(news, PacelineError):
                raise news
            message = news.message
            if isinstance(message, Fault):
                raise error_from_fault(message)
            if getattr(message, "generation", None) != self._number:
                continue
            answer.trace.arrived.append(news)
            if isinstance(message, Commit):
                tokens: list[int] = message.tokens.tolist()
                answer.arrivals.append((news.at, tokens))
                answer.num_tokens += len(tokens)
                return tokens

    async def _send(self, message: ClientMessage, answer: Answer) -> None:
        data = encode(message, self._link.padding)
        answer.trace.sent.append(Sent(perf_counter(), message, len(data)))
        await self._link.send(data)


class _SentNodes:
    """Ids of nodes that the server may still have, by their path from the anchor.

    A busy server may score a tree in parts, and what is left of it lives on: such nodes are not proposed twice.
    """

    def __init__(self) -> None:
        self._ids: dict[Path, int] = {}
        self._next_id = 0

    def commit(self, tokens: list[int]) -> None:
        """Tokens became final; nodes below them have shorter paths now, all others are gone."""
        path, count = tuple(tokens), len(tokens)
        self._ids = {node[count:]: key for node, key in self._ids.items() if len(node) > count and node[:count] == path}

    def frame(self, number: int, at: int, draft: Draft) -> Grow:
        """What is new of a draft below the anchor."""
        first_id = self._next_id
        tokens: list[int] = []
        parents: list[int] = []
        for node, token in enumerate(draft.tokens):
            path = path_of(draft, node)
            if path not in self._ids:
                self._ids[path] = first_id + len(tokens)
                tokens.append(token)
                parents.append(self._ids[path[:-1]] if path[1:] else ANCHOR_ID)
        self._next_id += len(tokens)
        return Grow(number, at, first_id, np.array(tokens, np.int32), np.array(parents, np.int32))


def _guess_ahead(source: ModelSource, draft: Draft, shape: Shape, left: int) -> _Guess | None:
    leaf = draft.likeliest_leaf
    (options,) = source.below(draft, [leaf], 1)
    if not options:
        return None
    path = (*path_of(draft, leaf), options[0][0])
    source.ahead_of(path)
    return _Guess(path, shape.grow(source, 0, left))

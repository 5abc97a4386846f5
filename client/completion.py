"""One answer on its way to a Python program: events of a generation become chunks of text.

Not here: starting one (``api``), the machinery behind the events (``stream``).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.client.events import Finished, Tokens
from paceline.client.result import Chunk, Completion, Piece, Stats
from paceline.client.stream import GenerationStream
from paceline.shared.detokenize import TextStream
from paceline.shared.messages import FinishReason, TokenLogprobs

OnEnd = Callable[[NDArray[np.int32]], None]
"""Called with prompt and output of a generation that wrote something, however it ended."""


class CompletionStream:
    """An answer on its way: iterate it once for its chunks; ``completion`` afterwards. Leaving early cancels it."""

    def __init__(
        self, generation: GenerationStream, decoder: TextStream | None, on_end: OnEnd = lambda tokens: None
    ) -> None:
        self._generation = generation
        self._decoder = decoder
        self._on_end = on_end
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[TokenLogprobs] = []
        self._started_at = self._first_at = self._ended_at = 0.0

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self.chunks()

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The chunks. Raises what the server or the link reported."""
        self._started_at = self._ended_at = time.perf_counter()
        events = self._generation.run()
        try:
            held: Chunk | None = None
            async for event in events:
                if isinstance(event, Tokens):
                    if held is not None:
                        yield held
                    self._first_at = self._first_at or time.perf_counter()
                    held = self._chunk(event)
                    if self._generation.session.finish is None:
                        yield held
                        held = None
                elif isinstance(event, Finished):
                    yield self._last_chunk(held, event.reason)
                    held = None
        finally:
            self._ended_at = time.perf_counter()
            if self._ids:
                self._on_end(np.concatenate([self._generation.session.task.prompt, np.array(self._ids, np.int32)]))
            await events.aclose()

    def _chunk(self, event: Tokens) -> Chunk:
        ids = tuple(event.token_ids.tolist())
        drafted = tuple(bool(flag) for flag in event.drafted)
        pieces = tuple(Piece(self._push(token), flag) for token, flag in zip(ids, drafted, strict=True))
        text = "".join(piece.text for piece in pieces)
        self._texts.append(text)
        self._ids += ids
        self._drafted += drafted
        self._logprobs += event.logprobs
        return Chunk(text, ids, drafted, pieces, event.logprobs)

    def _push(self, token: int) -> str:
        return "" if self._decoder is None else self._decoder.push((token,))[0]

    def _last_chunk(self, held: Chunk | None, reason: FinishReason) -> Chunk:
        tail = "" if self._decoder is None else self._decoder.finish()
        self._texts.append(tail)
        if held is None:
            return Chunk(tail, (), (), (Piece(tail, drafted=False),), (), reason)
        pieces = (*held.pieces, Piece(tail, drafted=False)) if tail else held.pieces
        return replace(held, text=held.text + tail, pieces=pieces, finish_reason=reason)

    @property
    def stats(self) -> Stats:
        """Figures so far."""
        generation = self._generation
        counts = generation.session.stats
        return Stats(
            verify_steps=counts.verify_steps,
            tokens_per_step=len(self._ids) / counts.verify_steps if counts.verify_steps else 0.0,
            drafted=counts.drafted,
            accepted=counts.accepted,
            bytes_up=generation.bytes_up,
            bytes_down=generation.bytes_down,
            ttft_s=self._first_at - self._started_at if self._first_at else 0.0,
            total_s=self._ended_at - self._started_at,
            rtt_s=generation.rtt_s,
        )

    @property
    def completion(self) -> Completion:
        """The answer, whole or as far as it came."""
        session = self._generation.session
        return Completion(
            text="".join(self._texts),
            prompt_tokens=tuple(session.task.prompt.tolist()),
            token_ids=tuple(self._ids),
            finish_reason=session.finish or FinishReason.CANCELLED,
            stats=self.stats,
            drafted=tuple(self._drafted),
            logprobs=tuple(self._logprobs),
            explanation=self._generation.explanation,
        )

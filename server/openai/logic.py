"""Runs OpenAI requests through the engine, without drafts, and shapes what comes back.

A request is a connection of its own to the engine's driver; each choice of each prompt is one generation on it. Text is
made here, from the committed ids, with the same detokenizer and stop-string matcher that the engine stops by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.server.driver import EngineDriver
from paceline.server.text import TargetText
from paceline.shared.detokenize import TextStream
from paceline.shared.errors import (
    BusyError,
    ContextError,
    LimitError,
    PacelineError,
    ParameterError,
    TreeError,
)
from paceline.shared.messages import Commit, Fault, FinishReason, Open, Opened, ServerMessage, TokenLogprobs
from paceline.shared.sampling import SamplingParams

_KINDS: dict[str, type[PacelineError]] = {kind.code: kind for kind in (BusyError, ContextError, LimitError, TreeError)}


@dataclass(slots=True)
class Delta:
    """What one step added to a choice. text may be empty, while a character or a stop string is undecided."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None = None


@dataclass(slots=True)
class Usage:
    """Counts and times of a request, all choices together. Times in seconds of the monotonic clock."""

    num_prompt: int
    began_at: float
    num_cached: int = 0
    num_output: int = 0
    first_at: float | None = None
    last_at: float = 0.0

    def to_json(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    def timings(self) -> dict[str, object]:
        """llama.cpp's timings object, which existing tools read. No draft runs on the server alone."""
        first = self.first_at or self.last_at or self.began_at
        prompt_s, predicted_s = max(first - self.began_at, 1e-9), max(self.last_at - first, 1e-9)
        computed = max(self.num_prompt - self.num_cached, 0)
        return {
            "cache_n": self.num_cached,
            "prompt_n": computed,
            "prompt_ms": prompt_s * 1e3,
            "prompt_per_second": computed / prompt_s,
            "predicted_n": self.num_output,
            "predicted_ms": predicted_s * 1e3,
            "predicted_per_second": max(self.num_output - 1, 0) / predicted_s,
            "draft_n": 0,
            "draft_n_accepted": 0,
        }


@dataclass(slots=True)
class Job:
    """One HTTP request on the engine. Use as ``async with``: leaving frees everything that still runs."""

    driver: EngineDriver
    text: TargetText
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    usage: Usage = field(init=False)
    _news: asyncio.Queue[ServerMessage | None] = field(default_factory=asyncio.Queue)
    _streams: list[TextStream] = field(default_factory=list)
    _connection: int = -1
    _num_open: int = 0

    def __post_init__(self) -> None:
        self.usage = Usage(sum(len(prompt) for prompt in self.prompts), time.monotonic())

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.sampling.n

    async def __aenter__(self) -> Job:
        """Opens all choices. Raises what the engine refuses them with, before anything is sent to the client."""
        self._connection = self.driver.connect(self._take)
        try:
            waiting = self.num_choices
            eos_ids = self.driver.served.engine.rules.eos_ids if self.driver.served is not None else ()
            for index in range(waiting):
                prompt, choice = divmod(index, self.sampling.n)
                ids = np.array(self.prompts[prompt], np.int32)
                verifier = self.sampling.default_verifier()
                request = Open(index, ids, self.sampling, verifier, choice=choice, patience_s=0.0, drafting=False)
                self._streams.append(TextStream.of(self.text.decode, self.sampling, eos_ids))
                self.driver.submit(self._connection, request, self._accepted)
            early: list[ServerMessage] = []
            while waiting:
                message = await self._news.get()
                if message is None:
                    waiting -= 1
                elif isinstance(message, Fault):
                    raise error_of(message)
                else:
                    early.append(message)
            for message in early:
                self._news.put_nowait(message)
        except BaseException:
            self.driver.disconnect(self._connection)
            raise
        self._num_open = self.num_choices
        return self

    async def __aexit__(self, *_: object) -> None:
        """Frees what still runs."""
        self.driver.disconnect(self._connection)

    async def deltas(self, idle_s: float) -> AsyncIterator[Delta | None]:
        """What the steps add, until all choices have ended; None after each ``idle_s`` seconds without news.

        Raises the error that ended a choice: the others end with it.
        """
        while self._num_open:
            try:
                message = await asyncio.wait_for(self._news.get(), idle_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(message, Fault):
                raise error_of(message)
            if isinstance(message, Opened):
                self.usage.num_cached += message.cached_tokens
            if isinstance(message, Commit):
                yield self._delta(message)

    def _delta(self, commit: Commit) -> Delta:
        now = time.monotonic()
        self.usage.first_at = self.usage.first_at or now
        self.usage.last_at = now
        self.usage.num_output += len(commit.tokens)
        stream = self._streams[commit.generation]
        ids = commit.tokens.tolist()
        text, _ = stream.push(ids)
        if commit.finish is not None:
            self._num_open -= 1
            text += stream.finish()
        return Delta(commit.generation, text, ids, commit.logprobs, commit.finish)

    def _take(self, messages: Sequence[ServerMessage]) -> None:
        for message in messages:
            self._news.put_nowait(message)

    def _accepted(self) -> None:
        self._news.put_nowait(None)


def error_of(fault: Fault) -> PacelineError:
    """A fault as the error that it was."""
    if fault.param or fault.code == ParameterError.code:
        return ParameterError(fault.param, fault.message)
    return _KINDS.get(fault.code, PacelineError)(fault.message)


def token_entry(text: TargetText, token: int, logprob: float) -> dict[str, object]:
    """One token of a chat answer's log-probabilities."""
    piece = text.piece(token)
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def chat_logprobs(text: TargetText, delta: Delta) -> dict[str, object] | None:
    """The log-probabilities of a delta in the chat endpoint's shape, one entry for each token."""
    if not delta.logprobs:
        return None
    content = [
        {
            **token_entry(text, token, entry.logprob),
            "top_logprobs": [token_entry(text, other, logprob) for other, logprob in entry.top],
        }
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content}


def completion_logprobs(text: TargetText, delta: Delta, offset: int) -> dict[str, object] | None:
    """The same in the completion endpoint's shape. offset: characters of text before this delta."""
    if not delta.logprobs:
        return None
    pieces = [text.piece(token) for token in delta.token_ids]
    offsets = [offset + sum(len(piece) for piece in pieces[:index]) for index in range(len(pieces))]
    return {
        "tokens": pieces,
        "token_logprobs": [entry.logprob for entry in delta.logprobs],
        "top_logprobs": [{text.piece(token): value for token, value in entry.top} for entry in delta.logprobs],
        "text_offset": offsets,
    }

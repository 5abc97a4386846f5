"""Answers in OpenAI's shapes: whole, and as the chunks of a stream. Values only.

First chunk: the role. Chunks with text: finish_reason null, never empty. Last chunk of a choice: an empty delta with
the reason. All chunks share id, created and model.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from paceline.server.openai.logic import Delta, Usage, chat_logprobs, completion_logprobs
from paceline.server.text import TargetText


class Answer(ABC):
    """One response under way."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, response_id: str, model: str, text: TargetText) -> None:
        self.text = text
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        self._texts: dict[int, list[str]] = {}
        self._finish: dict[int, str] = {}
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._offsets: dict[int, int] = {}

    def add(self, delta: Delta) -> dict[str, Any] | None:
        """Takes a delta in; returns its log-probabilities in the endpoint's shape."""
        offset = self._offsets.get(delta.choice, 0)
        self._offsets[delta.choice] = offset + len(delta.text)
        self._texts.setdefault(delta.choice, []).append(delta.text)
        if delta.finish is not None:
            self._finish[delta.choice] = str(delta.finish)
        shaped = self._shape(delta, offset)
        if shaped is not None:
            self._logprobs.setdefault(delta.choice, []).append(shaped)
        return shaped

    def whole(self, num_choices: int, usage: Usage) -> dict[str, Any]:
        """The answer to a request without stream."""
        choices = [self._choice(index) for index in range(num_choices)]
        counts = {"usage": usage.to_json(), "timings": usage.timings()}
        return {**self._head, "object": self.whole_object, "choices": choices, **counts}

    def opening(self, num_choices: int, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Chunks before any text."""
        yield from ()

    def chunks(self, delta: Delta, usage: Usage, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks of one delta."""
        logprobs = self.add(delta)
        if delta.text or logprobs:
            yield self._chunk(self._part(delta.choice, delta.text, logprobs), with_usage)
        if delta.finish is not None:
            ending = {**self._part(delta.choice, "", None), "finish_reason": str(delta.finish)}
            yield {**self._chunk(ending, with_usage), "timings": usage.timings()}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after all choices, if it was asked for."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage.to_json()}

    def _chunk(self, choice: dict[str, Any], with_usage: bool) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": [choice]}
        return {**chunk, "usage": None} if with_usage else chunk

    @abstractmethod
    def _shape(self, delta: Delta, offset: int) -> dict[str, Any] | None: ...

    @abstractmethod
    def _part(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]: ...

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]: ...

    def _merged(self, index: int) -> dict[str, Any] | None:
        """The log-probabilities of all deltas of a choice, list by list."""
        shaped = self._logprobs.get(index)
        if shaped is None:
            return None
        return {key: [entry for part in shaped for entry in part[key]] for key in shaped[0]}


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, num_choices: int, with_usage: bool) -> Iterator[dict[str, Any]]:
        """The role, for each choice."""
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, with_usage)

    def _shape(self, delta: Delta, offset: int) -> dict[str, Any] | None:
        return chat_logprobs(self.text, delta)

    def _part(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        delta = {"content": text} if text or logprobs else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self._texts.get(index, []))},
            "logprobs": self._merged(index),
            "finish_reason": self._finish.get(index),
        }


class CompletionAnswer(Answer):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _shape(self, delta: Delta, offset: int) -> dict[str, Any] | None:
        return completion_logprobs(self.text, delta, offset)

    def _part(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(self._texts.get(index, [])),
            "logprobs": self._merged(index),
            "finish_reason": self._finish.get(index),
        }

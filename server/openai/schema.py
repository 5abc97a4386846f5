"""OpenAI's request bodies, checked once and turned into our own values. Unknown fields are ignored, as OpenAI does;
known ones that change the output and that we cannot honour are refused by name.

Not here: answers (``logic``), HTTP (``router``).
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.shared.errors import ParameterError
from paceline.shared.sampling import MAX_TOP_LOGPROBS, SEED_BITS, SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "suffix": ("",),
    "echo": (False,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "prompt_logprobs": (),
}
"""Fields that we do not support, and the values that mean the same as leaving them out."""


class StreamOptions(BaseModel):
    """include_usage: one more chunk in the end, with usage and no choices."""

    include_usage: bool = False


class _Request(BaseModel):
    """What both endpoints share. Null means not given."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Our own parameters. Raises ``ParameterError``."""
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "ignore_eos",
                "min_tokens",
                "n",
            )
        }
        if given["top_k"] == -1:
            given["top_k"] = 0
        given["temperature"] = 1.0 if self.temperature is None else self.temperature
        given["seed"] = secrets.randbits(SEED_BITS - 1) if self.seed is None else self.seed % (1 << SEED_BITS)
        given["max_tokens"] = max_tokens
        given["logprobs"] = logprobs
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class CompletionRequest(_Request):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt on its own, as text or ids. Raises ``ParameterError`` for none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ParameterError("prompt", "expected a prompt, got an empty list")
        return [prompt] if isinstance(prompt[0], int) else prompt

    def to_sampling(self) -> SamplingParams:
        """Our own parameters. Raises ``ParameterError``."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ParameterError("best_of", f"expected best_of equal to n, got {self.best_of}")
        limit = _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(limit, self.logprobs)


class TextPart(BaseModel):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. Content may be text, text parts, or null for an assistant."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, str]:
        """Role and text as chat templates expect them."""
        parts = self.content if isinstance(self.content, list) else None
        text = "\n".join(part.text for part in parts) if parts is not None else self.content
        if text is None and self.role != "assistant":
            raise ParameterError("messages", f"expected content in a {self.role} message, got null")
        return {"role": "system" if self.role == "developer" else self.role, "content": str(text or "")}


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def to_sampling(self) -> SamplingParams:
        """Our own parameters. Raises ``ParameterError``."""
        if self.top_logprobs is not None and not self.logprobs and self.top_logprobs > 0:
            raise ParameterError("top_logprobs", "expected logprobs true with top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ParameterError("top_logprobs", f"expected top_logprobs in [0, {MAX_TOP_LOGPROBS}]")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)


Body = TypeVar("Body", bound=_Request)


def parse(kind: type[Body], data: bytes) -> Body:
    """A body from its bytes. Raises ``ParameterError`` that names the field."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise ParameterError("body", "expected a JSON object as the body") from None
    if not isinstance(values, dict):
        raise ParameterError("body", f"expected a JSON object as the body, got {type(values).__name__}")
    for name, harmless in _REFUSED.items():
        if values.get(name) is not None and values[name] not in harmless:
            raise ParameterError(name, f"expected no {name}: this server does not support it")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else "body"
        where = ".".join(str(part) for part in first["loc"][:3]) or "body"
        raise ParameterError(param, f"expected a valid {where}: {str(first['msg']).lower()}") from None


def _token_id(key: str) -> int:
    if not key.isdigit():
        raise ParameterError("logit_bias", f"expected token ids as keys of logit_bias, got {key[:20]!r}")
    return int(key[:12])

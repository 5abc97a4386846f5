"""Sampling parameters: what a user may ask of a generation, validated once, at the edge.

The order in which they act on the target's logits (DESIGN.md section 6): logit bias and penalties, temperature, top-k,
top-p, min-p. Temperature 0 means greedy. The arithmetic lives in ``warp`` (numpy) and in the server (torch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from paceline.shared.errors import ParameterError
from paceline.shared.unicode import check_unicode

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 64
MAX_TOKENS_LIMIT = 1_000_000
SEED_BITS = 64
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class Verifier(StrEnum):
    """How the server decides which nodes it accepts (DESIGN.md section 6)."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    MSS = "mss"
    NAIVE = "naive"


def _number(param: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ParameterError(param, f"expected {param} in {bracket}{low:g}, {high:g}], got {value!r}")


def _integer(param: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(param, f"expected an integer {param} in [{low}, {high}], got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One generation's wishes. Frozen; every field is checked; ``ParameterError`` names the one that is wrong.

    temperature: 0 is greedy; the logits are divided by it.
    top_k: keep the k likeliest tokens, ties to the lowest id; 0 keeps all.
    top_p: keep the smallest set of likeliest tokens whose mass reaches it; 1 keeps all.
    min_p: drop tokens less likely than min_p times the likeliest; 0 keeps all.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the output so far.
    repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output; 1 is off.
    logit_bias: token id -> addend to its logit, -100..100.
    seed: unsigned 64-bit; None lets the client draw one.
    max_tokens: tokens of output at most; None up to the context's end.
    min_tokens: no end-of-text, stop token or stop string before this many.
    stop: strings that end the text before their first character.
    stop_token_ids: ids that end the text like the model's own end-of-text ids.
    ignore_eos: go on after the model's end-of-text ids.
    logprobs: None for none, else how many alternatives go with the chosen token's own log-probability (0..20).
    n: number of independent choices; choice i is part of the noise's key.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**SEED_BITS - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"expected min_tokens <= max_tokens, got {self.min_tokens}")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _integer("n", self.n, 1, MAX_CHOICES)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", f"expected ignore_eos true or false, got {self.ignore_eos!r}")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"expected at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LEN:
                got = f"{len(text)} characters" if isinstance(text, str) else repr(text)
                raise ParameterError("stop", f"expected stop strings of 1 to {MAX_STOP_LEN} characters, got {got}")
            check_unicode("stop", text)
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                "stop_token_ids", f"expected at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(ids)}"
            )
        for token in ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            count = len(self.logit_bias)
            raise ParameterError("logit_bias", f"expected at most {MAX_LOGIT_BIAS} entries in logit_bias, got {count}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def is_greedy(self) -> bool:
        """Whether the output is the argmax at every position."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them in this generation."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def default_verifier(self) -> Verifier:
        """Greedy at temperature 0, else coupled."""
        return Verifier.GREEDY if self.is_greedy else Verifier.COUPLED

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ParameterError`` if a token id named here is not below ``vocab_size``."""
        for param, ids in (("logit_bias", tuple(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            wrong = [token for token in ids if token >= vocab_size]
            if wrong:
                raise ParameterError(param, f"expected token ids below {vocab_size} in {param}, got {wrong[0]}")

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain values: what needs to travel."""
        plain: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            default = {} if entry.name == "logit_bias" else entry.default
            value = dict(value) if entry.name == "logit_bias" else value
            if value != default:
                plain[entry.name] = list(value) if isinstance(value, tuple) else value
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SamplingParams:
        """The inverse of ``changed``. Raises ``ParameterError`` for an unknown name or a wrong type."""
        known = {entry.name for entry in fields(cls)}
        for name in plain:
            if name not in known:
                raise ParameterError(str(name), f"expected one of {', '.join(sorted(known))}, got {name!r}")
        values = dict(plain)
        for name, kind in (("stop", list), ("stop_token_ids", list), ("logit_bias", dict)):
            if name in values and not isinstance(values[name], kind):
                raise ParameterError(name, f"expected a {kind.__name__} for {name}, got {type(values[name]).__name__}")
        return cls(**values)

"""The kinds of value that a message's fields hold: how each is packed and, checking all of it, unpacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.shared import packing, quantise
from paceline.shared.errors import ContextError, LimitError, ParameterError, WireError
from paceline.shared.messages import ANCHOR_ID, FinishReason, Limits, Proposal, StepTime, TokenLogprobs
from paceline.shared.sampling import MAX_TOP_LOGPROBS, SamplingParams, Verifier

MAX_COUNT = 2**31 - 1
MAX_DRAFTER = 255
NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
NO_TOKENS.setflags(write=False)
NO_PROPOSALS: dict[tuple[int, int], Proposal] = {}
_REQUIRED = object()


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """pack(value) gives what MessagePack carries; unpack(plain, name, limits) checks it and gives the value back."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any, str, Limits], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of a message's table: its key on the wire, its attribute, its kind, its default if it has one."""

    key: int
    name: str
    kind: Kind
    default: Any = _REQUIRED

    @property
    def is_required(self) -> bool:
        """Whether it must be present."""
        return self.default is _REQUIRED

    def is_default(self, value: Any) -> bool:
        """Whether it may be left out because it says nothing new."""
        if self.is_required:
            return False
        if self.default is None or value is None:
            return value is self.default
        if hasattr(value, "__len__"):
            return len(value) == 0 == len(self.default)
        return bool(value == self.default)


def _wrong(name: str, expected: str, got: Any) -> WireError:
    text = repr(got)
    return WireError(f"expected {expected} for {name}, got {text if len(text) <= 40 else text[:37] + '...'}")


def _count(plain: Any, name: str, limits: Limits) -> int:
    if type(plain) is not int or not 0 <= plain <= MAX_COUNT:
        raise _wrong(name, "an integer in 0..2**31-1", plain)
    return plain


def _flag(plain: Any, name: str, limits: Limits) -> bool:
    if type(plain) is not bool:
        raise _wrong(name, "true or false", plain)
    return plain


def _text(plain: Any, name: str, limits: Limits) -> str:
    if type(plain) is not str:
        raise _wrong(name, "text", plain)
    return plain


def _binary(plain: Any, name: str) -> bytes:
    if type(plain) is not bytes:
        raise _wrong(name, "bytes", plain)
    return plain


def _pack_seconds(value: float) -> int:
    return min(MAX_COUNT, max(0, round(value * 1e6)))


def _seconds(plain: Any, name: str, limits: Limits) -> float:
    return _count(plain, name, limits) / 1e6


def _tokens(plain: Any, name: str, limits: Limits) -> NDArray[np.int32]:
    data = _binary(plain, name)
    if name.startswith("grow."):
        return _bounded(data, limits.max_frame_nodes, name)
    try:
        return _bounded(data, limits.max_context, name)
    except LimitError as error:
        if name == "open.prompt":
            raise ContextError(
                f"expected a prompt of fewer than max_context={limits.max_context} tokens, got more"
            ) from error
        if name == "open.committed":
            raise ParameterError("committed", str(error)) from error
        raise


def _bounded(data: bytes, max_len: int, name: str) -> NDArray[np.int32]:
    """Unpack ids; more of them than the limit is a matter of limits, not of form."""
    if len(data) - 1 > max_len * 4 + max_len:
        raise LimitError(f"expected at most {max_len} elements in {name}, got {len(data)} bytes")
    array = packing.unpack(data, 5 * max_len + 1, name)
    if len(array) > max_len:
        raise LimitError(f"expected at most {max_len} elements in {name}, got {len(array)}")
    return array.astype(np.int32)


def pack_parents(parents: NDArray[np.int32], first_id: int) -> bytes:
    """Parents as distances: a node's id minus its parent's, or 0 for the anchor. int[n] -> bytes."""
    own = first_id + np.arange(len(parents), dtype=np.int64)
    distance = np.where(parents == ANCHOR_ID, 0, own - parents)
    if len(parents) and (distance.min() < 0 or np.any((distance == 0) & (parents != ANCHOR_ID))):
        raise WireError("expected parents that precede their nodes, got a later one")
    return packing.pack(distance)


def parents_from_deltas(distance: NDArray[np.int32], first_id: int, count: int) -> NDArray[np.int32]:
    """The inverse of ``pack_parents``. Raises ``WireError`` for another count or a parent below id 0."""
    if len(distance) != count:
        raise WireError(f"expected {count} parents in grow.parents, got {len(distance)}")
    if first_id + count > MAX_COUNT:
        raise WireError(f"expected node ids below 2**31, got first id {first_id}")
    own = first_id + np.arange(count, dtype=np.int64)
    parents = np.where(distance == 0, ANCHOR_ID, own - distance)
    if count and parents.min() < ANCHOR_ID:
        raise WireError("expected parents that are earlier nodes, got one before id 0")
    return parents.astype(np.int32)


def _drafters(plain: Any, name: str, limits: Limits) -> NDArray[np.uint8]:
    data = _binary(plain, name)
    if len(data) > limits.max_frame_nodes:
        raise LimitError(f"expected at most {limits.max_frame_nodes} elements in {name}, got {len(data)}")
    return np.frombuffer(data, np.uint8)


def _sampling(plain: Any, name: str, limits: Limits) -> SamplingParams:
    if not isinstance(plain, dict):
        raise _wrong(name, "a map", plain)
    return SamplingParams.from_plain(plain)


def _member(values: tuple[Any, ...]) -> Kind:
    def unpack(plain: Any, name: str, limits: Limits) -> Any:
        if type(plain) is not int or not 0 <= plain < len(values):
            raise _wrong(name, f"a number in 0..{len(values) - 1}", plain)
        return values[plain]

    return Kind(values.index, unpack)


def _ids(plain: Any, name: str, limits: Limits) -> tuple[int, ...]:
    if type(plain) is not list or len(plain) > 64:
        raise _wrong(name, "at most 64 integers", plain)
    return tuple(_count(entry, name, limits) for entry in plain)


def _limits(plain: Any, name: str, limits: Limits) -> Limits:
    count = len(dataclass_fields(Limits))
    if type(plain) is not list or len(plain) != count:
        raise _wrong(name, f"{count} integers", plain)
    return Limits(*(_count(entry, name, limits) for entry in plain))


def _step_time(plain: Any, name: str, limits: Limits) -> StepTime:
    if type(plain) is not list or len(plain) != 2:
        raise _wrong(name, "two durations", plain)
    base_ns, per_row_ns = (_count(entry, name, limits) for entry in plain)
    return StepTime(base_ns / 1e9, per_row_ns / 1e9)


def _pack_step_time(value: StepTime) -> list[int]:
    return [min(MAX_COUNT, max(0, round(seconds * 1e9))) for seconds in (value.base_s, value.per_row_s)]


def _real(plain: Any, name: str) -> float:
    if type(plain) is not float or math.isnan(plain):
        raise _wrong(name, "a number", plain)
    return plain


def _logprobs(plain: Any, name: str, limits: Limits) -> tuple[TokenLogprobs, ...]:
    if type(plain) is not list:
        raise _wrong(name, "a list", plain)
    entries = []
    for item in plain:
        if type(item) is not list or len(item) != 3 or type(item[2]) is not list or len(item[2]) > MAX_TOP_LOGPROBS:
            raise _wrong(name, "entries of a number, packed ids and their numbers", item)
        ids = packing.unpack(_binary(item[1], name), MAX_TOP_LOGPROBS, name).tolist()
        values = [_real(value, name) for value in item[2]]
        entries.append(TokenLogprobs(_real(item[0], name), tuple(zip(ids, values, strict=True))))
    return tuple(entries)


def _pack_logprobs(value: tuple[TokenLogprobs, ...]) -> list[list[Any]]:
    def entry(item: TokenLogprobs) -> list[Any]:
        ids = np.array([token for token, _ in item.top], np.int64)
        return [float(item.logprob), packing.pack(ids), [float(logprob) for _, logprob in item.top]]

    return [entry(item) for item in value]


def _pack_proposals(value: Mapping[tuple[int, int], Proposal]) -> list[Any]:
    rows = []
    for (parent, drafter), proposal in value.items():
        ids = proposal.token_ids.astype(np.int64)
        gaps = np.concatenate([ids[:1], ids[1:] - ids[:-1]])
        rows.append([parent - ANCHOR_ID, drafter, packing.pack(gaps), packing.pack(quantise.weights_of(proposal))])
    return rows


def _proposals(plain: Any, name: str, limits: Limits) -> dict[tuple[int, int], Proposal]:
    if type(plain) is not list or len(plain) > 2 * limits.max_frame_nodes:
        raise _wrong(name, f"a list of at most {2 * limits.max_frame_nodes} proposals", plain)
    proposals = {}
    for row in plain:
        if type(row) is not list or len(row) != 4:
            raise _wrong(name, "rows of parent, drafter, tokens and weights", row)
        key = (_count(row[0], name, limits) + ANCHOR_ID, _count(row[1], name, limits))
        if key in proposals or key[1] > MAX_DRAFTER:
            raise _wrong(name, f"one proposal per parent and drafter up to {MAX_DRAFTER}", row[:2])
        ids = np.cumsum(packing.unpack(_binary(row[2], name), quantise.MAX_SUPPORT, name))
        weights = packing.unpack(_binary(row[3], name), quantise.MAX_SUPPORT, name)
        proposals[key] = quantise.from_weights(ids, weights)
    return proposals


COUNT = Kind(int, _count)
FLAG = Kind(bool, _flag)
TEXT = Kind(str, _text)
SECONDS = Kind(_pack_seconds, _seconds)
TOKENS = Kind(packing.pack, _tokens)
PARENTS = Kind(packing.pack, _tokens)
"""Packed by ``pack_parents``; unpacked as distances, which ``parents_from_deltas`` turns back."""
DRAFTERS = Kind(lambda value: value.astype(np.uint8).tobytes(), _drafters)
SAMPLING = Kind(SamplingParams.changed, _sampling)
VERIFIER = _member(tuple(Verifier))
FINISH = _member(tuple(FinishReason))
IDS = Kind(list, _ids)
LIMITS = Kind(lambda value: [getattr(value, entry.name) for entry in dataclass_fields(value)], _limits)
STEP_TIME = Kind(_pack_step_time, _step_time)
LOGPROBS = Kind(_pack_logprobs, _logprobs)
PROPOSALS = Kind(_pack_proposals, _proposals)

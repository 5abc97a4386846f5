"""Messages to bytes and back: one MessagePack map per binary websocket message (DESIGN.md section 5).

A message is ``{0: tag, key: value, ...}`` with the small integer keys of its table below; fields at their default are
left out, and zeros at key 127 may hide a message's length (``padding``). ``decode`` trusts nothing: lengths are bounded
before anything is allocated, every value's type and range is checked, and an unknown tag or field is refused by name.
It never raises anything but ``WireError`` and ``LimitError``; an opening that is a message but asks for too much is the
``WireError`` that names its generation, ``OpeningError``.

Not here: whether a message makes sense now (the sessions), and which sampling values are allowed (``SamplingParams``).
"""

from __future__ import annotations

from typing import Any

import msgpack

from paceline.shared import fields, padding
from paceline.shared.errors import LimitError, OpeningError, UsageError, WireError
from paceline.shared.fields import Field
from paceline.shared.messages import (
    Cancel,
    Closing,
    Commit,
    Fault,
    Grow,
    Hello,
    Limits,
    Message,
    Open,
    Opened,
    Welcome,
)

TAG_KEY = 0
_MAX_MAP_LEN = 1 << 12
_MAX_STR_LEN = 1 << 14

_TABLE: dict[int, tuple[type[Any], tuple[Field, ...]]] = {
    1: (
        Hello,
        (
            Field(1, "protocol", fields.COUNT),
            Field(2, "client", fields.TEXT),
            Field(3, "tokenizer", fields.TEXT, ""),
            Field(4, "model", fields.TEXT, ""),
            Field(5, "padding", fields.COUNT, 0),
        ),
    ),
    2: (
        Open,
        (
            Field(1, "generation", fields.COUNT),
            Field(2, "prompt", fields.TOKENS),
            Field(3, "sampling", fields.SAMPLING),
            Field(4, "verifier", fields.VERIFIER),
            Field(5, "committed", fields.TOKENS, fields.NO_TOKENS),
            Field(6, "choice", fields.COUNT, 0),
            Field(7, "patience_s", fields.SECONDS, None),
            Field(8, "drafting", fields.FLAG, True),
        ),
    ),
    3: (
        Grow,
        (
            Field(1, "generation", fields.COUNT),
            Field(2, "at", fields.COUNT),
            Field(3, "first_id", fields.COUNT),
            Field(4, "tokens", fields.TOKENS),
            Field(5, "parents", fields.PARENTS),
            Field(6, "drafters", fields.DRAFTERS, None),
            Field(7, "proposals", fields.PROPOSALS, fields.NO_PROPOSALS),
        ),
    ),
    4: (Cancel, (Field(1, "generation", fields.COUNT),)),
    16: (
        Welcome,
        (
            Field(1, "protocol", fields.COUNT),
            Field(2, "model", fields.TEXT),
            Field(3, "tokenizer", fields.TEXT),
            Field(4, "vocab_size", fields.COUNT),
            Field(5, "eos_ids", fields.IDS),
            Field(6, "bos_id", fields.COUNT, None),
            Field(7, "limits", fields.LIMITS),
            Field(8, "step_time", fields.STEP_TIME),
            Field(9, "fingerprint", fields.TEXT, ""),
            Field(10, "padding", fields.COUNT, 0),
        ),
    ),
    17: (Opened, (Field(1, "generation", fields.COUNT), Field(2, "cached_tokens", fields.COUNT, 0))),
    18: (
        Commit,
        (
            Field(1, "generation", fields.COUNT),
            Field(2, "at", fields.COUNT),
            Field(3, "tokens", fields.TOKENS),
            Field(4, "num_drafted", fields.COUNT, 0),
            Field(5, "num_scored", fields.COUNT, 0),
            Field(6, "node_budget", fields.COUNT, 0),
            Field(7, "step_s", fields.SECONDS, 0.0),
            Field(8, "finish", fields.FINISH, None),
            Field(9, "logprobs", fields.LOGPROBS, ()),
        ),
    ),
    19: (
        Fault,
        (
            Field(1, "code", fields.TEXT),
            Field(2, "message", fields.TEXT),
            Field(3, "generation", fields.COUNT, None),
            Field(4, "param", fields.TEXT, ""),
        ),
    ),
    20: (Closing, (Field(1, "grace_s", fields.SECONDS),)),
}
_TAGS = {message_type: tag for tag, (message_type, _) in _TABLE.items()}
DEFAULT_LIMITS = Limits()


def encode(message: Message, unit: int = 0) -> bytes:
    """One message as bytes. unit: of the size classes that it is padded to (``padding``), 0 for none.

    Raises ``WireError`` if a field holds what the protocol cannot carry.
    """
    tag = _TAGS[type(message)]
    plain: dict[int, Any] = {TAG_KEY: tag}
    for entry in _TABLE[tag][1]:
        value = getattr(message, entry.name)
        if entry.is_default(value):
            continue
        if entry.kind is fields.PARENTS:
            plain[entry.key] = fields.pack_parents(value, message.first_id)  # type: ignore[union-attr]
        else:
            plain[entry.key] = entry.kind.pack(value)
    return padding.pad(msgpack.packb(plain, use_single_float=False), unit, DEFAULT_LIMITS.max_frame_bytes)


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message that ``data`` holds.

    Raises ``LimitError`` where a size limit is exceeded, ``OpeningError`` for refused values of a generation, other
    ``WireError``s for everything else that is not a message.
    """
    if len(data) > limits.max_frame_bytes:
        raise LimitError(f"expected a frame of at most {limits.max_frame_bytes} bytes, got {len(data)}")
    plain = _unpack(data)
    if not isinstance(plain, dict) or TAG_KEY not in plain:
        raise WireError(f"expected a map with a tag at key {TAG_KEY}, got {type(plain).__name__}")
    tag = plain.pop(TAG_KEY)
    if type(tag) is not int or tag not in _TABLE:
        raise WireError(f"expected one of the tags {sorted(_TABLE)}, got {_short(tag)}")
    message_type, table = _TABLE[tag]
    name = message_type.__name__.lower()
    if padding.KEY in plain:
        padding.check(plain.pop(padding.KEY), name)
    known = {entry.key: entry for entry in table}
    for key in plain:
        if type(key) is not int or key not in known:
            raise WireError(f"expected the fields {sorted(known)} in {name}, got field {_short(key)}")
    values: dict[str, Any] = {}
    for entry in table:
        try:
            values[entry.name] = _field(entry, plain, name, limits)
        except UsageError as error:
            # Only an opening holds such values, and its first field is its generation.
            raise OpeningError(values["generation"], error) from error
    if message_type is Grow:
        _check_grow(values, limits)
    message: Message = message_type(**values)
    return message


def _field(entry: Field, plain: dict[int, Any], name: str, limits: Limits) -> Any:
    if entry.key not in plain:
        if entry.is_required:
            raise WireError(f"expected {name}.{entry.name}, got none")
        return entry.default
    try:
        return entry.kind.unpack(plain[entry.key], f"{name}.{entry.name}", limits)
    except (LimitError, WireError, UsageError):
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"expected a valid {name}.{entry.name}, got {_short(plain[entry.key])}") from error


def _check_grow(values: dict[str, Any], limits: Limits) -> None:
    count = len(values["tokens"])
    if count > limits.max_frame_nodes:
        raise LimitError(f"expected at most {limits.max_frame_nodes} nodes in a frame, got {count}")
    values["parents"] = fields.parents_from_deltas(values["parents"], values["first_id"], count)
    drafters = values["drafters"]
    if drafters is not None and len(drafters) != count:
        raise WireError(f"expected {count} drafters in grow.drafters, got {len(drafters)}")


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=_unique,
            ext_hook=_refuse_extension,
            max_str_len=_MAX_STR_LEN,
            max_bin_len=len(data),
            max_array_len=min(len(data), _MAX_MAP_LEN),
            max_map_len=_MAX_MAP_LEN,
            max_ext_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"expected one MessagePack map, got {len(data)} bytes that are none") from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        plain = dict(pairs)
    except TypeError as error:
        raise WireError("expected map keys that are integers or text, got a container") from error
    if len(plain) != len(pairs):
        raise WireError("expected each field once, got one twice")
    return plain


def _refuse_extension(code: int, data: bytes) -> Any:
    raise WireError(f"expected no extension types, got type {code} with {len(data)} bytes")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

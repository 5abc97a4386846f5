"""What a message weighs on the wire: its MessagePack bytes and the websocket header around them (RFC 6455, 5.2)."""

from __future__ import annotations

from collections.abc import Callable

from paceline.shared.messages import Commit, Grow, Message, Open
from paceline.shared.wire import encode

Weigh = Callable[..., int]
"""``weight``, or something like it."""

_MASK_BYTES = 4
_ROUGH_BYTES = 24
_ROUGH_TOKEN_BYTES = 3


def header_bytes(payload: int, *, is_up: bool) -> int:
    """Bytes of the frame header: 2, 4 or 10 by length, and the mask that clients must send."""
    length = 2 if payload < 126 else 4 if payload < 1 << 16 else 10
    return length + (_MASK_BYTES if is_up else 0)


def weight(message: Message, *, is_up: bool) -> int:
    """Bytes of the whole frame."""
    payload = len(encode(message))
    return payload + header_bytes(payload, is_up=is_up)


def rough_weight(message: Message, *, is_up: bool) -> int:
    """About the same without encoding anything: where thousands of streams share a run and bandwidth is no question."""
    match message:
        case Commit() | Grow():
            count = len(message.tokens)
        case Open():
            count = len(message.prompt) + len(message.committed)
        case _:
            count = 0
    payload = _ROUGH_BYTES + _ROUGH_TOKEN_BYTES * count
    return payload + header_bytes(payload, is_up=is_up)

"""What a message weighs on the wire: its MessagePack bytes and the websocket header around them (RFC 6455, 5.2)."""

from __future__ import annotations

from paceline.shared.messages import Message
from paceline.shared.wire import encode

_MASK_BYTES = 4


def header_bytes(payload: int, *, is_up: bool) -> int:
    """Bytes of the frame header: 2, 4 or 10 by length, and the mask that clients must send."""
    length = 2 if payload < 126 else 4 if payload < 1 << 16 else 10
    return length + (_MASK_BYTES if is_up else 0)


def weight(message: Message, *, is_up: bool) -> int:
    """Bytes of the whole frame."""
    payload = len(encode(message))
    return payload + header_bytes(payload, is_up=is_up)

"""Size classes of frames: zero bytes that hide how long a message is (packet sizes tell words apart).

With a unit of u bytes a message weighs u, 2u, 4u, 8u, ... bytes: at most twice its size (but u), and few classes. The
zeros are a field of the message that every peer takes, whether it pads or not:

    key 127 (0x7f) · binary header (0xc4, 0xc5 or 0xc6 and a length) · zeros

Not here: messages (``wire``), and who asks for it (the handshake: ``Hello.padding``, ``Welcome.padding``).
"""

from __future__ import annotations

from paceline.shared.errors import WireError

KEY = 127
MAX_UNIT = 4096
"""Largest unit that a peer may ask for: a frame of a few bytes is not to become a flood."""
_MAP = 0x80
_MAX_MAP_LEN = 15
_BINARY = ((0xC4, 1), (0xC5, 2), (0xC6, 4))
"""MessagePack's headers of binary values: first byte, and bytes of the length behind it."""
_LEAST = 3


def size_class(num_bytes: int, unit: int) -> int:
    """The smallest class that holds a message of ``num_bytes`` and, unless it fits exactly, the field around zeros."""
    size = unit
    while size < num_bytes or 0 < size - num_bytes < _LEAST:
        size *= 2
    return size


def pad(data: bytes, unit: int, max_bytes: int) -> bytes:
    """The message with zeros up to its class; at ``max_bytes`` or beyond as it is. unit: 0 leaves everything as it is.

    data: one MessagePack map of fewer than 15 entries.
    """
    size = min(size_class(len(data), unit), max_bytes) if unit else 0
    gap = size - len(data)
    if gap < _LEAST:
        return data
    assert data[0] & 0xF0 == _MAP
    assert data[0] & 0x0F < _MAX_MAP_LEN
    first, width = next((first, width) for first, width in _BINARY if gap - 2 - width < 1 << 8 * width)
    count = gap - 2 - width
    header = bytes([KEY, first]) + count.to_bytes(width, "big")
    return bytes([data[0] + 1]) + data[1:] + header + bytes(count)


def check(plain: object, name: str) -> None:
    """Raises ``WireError`` unless the field of message ``name`` is zeros and nothing else."""
    if type(plain) is not bytes:
        raise WireError(f"expected bytes for {name}.padding, got {type(plain).__name__}")
    if plain.count(0) != len(plain):
        raise WireError(f"expected nothing but zeros in {name}.padding, got {len(plain)} bytes with others among them")

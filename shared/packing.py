"""Integer arrays as short byte strings: fixed width or variable length, whichever is smaller.

First byte: 0 for LEB128 variable-length groups of seven bits (little end first, high bit: more follows), or the width
in bytes (1..4) of fixed little-endian unsigned integers. An empty array is the empty string.

Both directions are array operations, and a packed string is never shorter than its array is long, so a limit on bytes
is a limit on elements.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.shared.errors import WireError

VARIABLE = 0
MAX_VALUE = 2**31 - 1
_MAX_GROUPS = 5


def pack(values: NDArray[np.integer]) -> bytes:
    """Pack non-negative integers below 2**31, int[n]."""
    if len(values) == 0:
        return b""
    array = values.astype(np.uint64)
    top = int(array.max())
    width = max(1, (top.bit_length() + 7) // 8)
    groups = np.ones(len(array), np.int64)
    for shift in range(7, 7 * _MAX_GROUPS, 7):
        groups += array >= (1 << shift)
    if int(groups.sum()) < width * len(array):
        return bytes([VARIABLE]) + _pack_variable(array, groups)
    octets = array.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return bytes([width]) + octets.tobytes()


def _pack_variable(array: NDArray[np.uint64], groups: NDArray[np.int64]) -> bytes:
    ends = np.cumsum(groups)
    owner = np.repeat(np.arange(len(array)), groups)
    place = np.arange(ends[-1]) - (ends - groups)[owner]
    octets = (array[owner] >> (7 * place).astype(np.uint64)) & np.uint64(0x7F)
    more = place < groups[owner] - 1
    return bytes((octets | (more.astype(np.uint64) << np.uint64(7))).astype(np.uint8).tobytes())


def unpack(data: bytes, max_len: int, what: str) -> NDArray[np.int64]:
    """The inverse of ``pack``: int64[n] with 0 <= value < 2**31.

    Raises ``WireError`` for an unknown first byte, a cut or over-long group, a value of 2**31 or more, or more than
    ``max_len`` elements (checked before anything of that size is made). ``what`` names the field.
    """
    if not data:
        return np.zeros(0, np.int64)
    width, octets = data[0], np.frombuffer(data, np.uint8, offset=1)
    if width == VARIABLE:
        array = _unpack_variable(octets, max_len, what)
    elif 1 <= width <= 4 and len(octets) and len(octets) % width == 0:
        if len(octets) // width > max_len:
            raise WireError(f"expected at most {max_len} elements in {what}, got {len(octets) // width}")
        padded = np.zeros((len(octets) // width, 8), np.uint8)
        padded[:, :width] = octets.reshape(-1, width)
        array = padded.view("<u8").reshape(-1).astype(np.int64)
    else:
        raise WireError(f"expected packed integers in {what}, got width {width} with {len(octets)} bytes")
    if len(array) and int(array.max()) > MAX_VALUE:
        raise WireError(f"expected values below 2**31 in {what}, got {int(array.max())}")
    return array


def _unpack_variable(octets: NDArray[np.uint8], max_len: int, what: str) -> NDArray[np.int64]:
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) == 0 or ends[-1] != len(octets) - 1:
        raise WireError(f"expected whole variable-length integers in {what}, got a cut one")
    if len(ends) > max_len:
        raise WireError(f"expected at most {max_len} elements in {what}, got {len(ends)}")
    starts = np.concatenate(([0], ends[:-1] + 1))
    groups = ends - starts + 1
    if int(groups.max()) > _MAX_GROUPS:
        raise WireError(f"expected at most {_MAX_GROUPS} bytes per integer in {what}, got {int(groups.max())}")
    place = np.arange(len(octets)) - np.repeat(starts, groups)
    parts = (octets & 0x7F).astype(np.int64) << (7 * place)
    return np.add.reduceat(parts, starts)

"""Gumbel noise that client and server compute bit for bit alike, from a counter instead of a state.

G(seed, choice, position, token) comes from one word of a Philox4x32-10 block (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011; the Random123 family). The key is the seed; the counter is (token // 4, position, choice,
0) and token % 4 picks the word, so any subset of ids in any order gives the same values.

The word x means u = (x + 0.5) / 2^32, and G = -log(-log u). No library's log is called, because libraries differ in the
last bit: G is read from a table that is linear between knots. The table itself is built with + - * / alone, which
IEEE 754 rounds the same everywhere. Its error is about 1e-6, a thousand
times less than 10^6 samples could show.

Not here: the same noise on a torch device (``server.noise``), and what is done with it (``server.verify``, drafting).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORDS_PER_BLOCK = 4
MASK_32 = 0xFFFFFFFF
KNOT_BITS = 9
"""2^9 knots in each octave of u (below 1/2) and of 1 - u (above)."""
FRACTION_BITS = 23 - KNOT_BITS
FIRST_KNOT = 126 << KNOT_BITS
"""Index bits of the float32 0.5, the smallest argument."""
NUM_KNOTS = (32 << KNOT_BITS) + 1
"""Knots on one side: arguments 0.5 to 2^31, both included."""
_CHUNK_BLOCKS = 4096
_LN_2 = 0.6931471805599453
_SQRT_2 = 1.4142135623730951


class GumbelTable(NamedTuple):
    """Piecewise linear G: ``values[i] + fraction * slopes[i]``, first the side u < 1/2, then the side u >= 1/2."""

    values: NDArray[np.float32]
    slopes: NDArray[np.float32]


def gumbel(seed: int, position: int, token_ids: ArrayLike, choice: int = 0) -> NDArray[np.float32]:
    """float32, shaped like token_ids: the noise of these tokens at one position; the same bits everywhere.

    seed: 0..2^64-1. position: absolute, 0..2^32-1. token_ids: integers in 0..2^32-1, any order, repeats allowed.
    choice: index among the n choices of one request, 0..2^32-1.

    Raises ``ValueError`` for a number outside its range or ids that are not integers.
    """
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return np.zeros(ids.shape, np.float32)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expected integer token ids, got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    for name, value, bits in (("seed", seed, 64), ("position", position, 32), ("choice", choice, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"expected {name} in 0..2^{bits}-1, got {value}")
    if low < 0 or high > MASK_32:
        raise ValueError(f"expected token ids in 0..2^32-1, got {low}..{high}")
    first = low // WORDS_PER_BLOCK
    num_blocks = high // WORDS_PER_BLOCK + 1 - first
    if num_blocks <= ids.size:  # dense enough: each block serves four ids
        noise = _range_noise(seed, position, choice, first, num_blocks)
        index = ids.astype(np.intp) - first * WORDS_PER_BLOCK
        return noise.take(index)
    blocks = ids.astype(np.uint64) >> np.uint64(2)
    words = np.stack(philox((blocks, position, choice, 0), seed), axis=-1)
    index = (ids.astype(np.intp) & 3)[..., None]
    return transform(np.take_along_axis(words, index, axis=-1)[..., 0].astype(np.uint32))


def gumbel_row(seed: int, position: int, vocab_size: int, choice: int = 0) -> NDArray[np.float32]:
    """float32[vocab_size]: ``gumbel`` for the ids 0..vocab_size-1, without gathering."""
    num_blocks = -(-vocab_size // WORDS_PER_BLOCK)
    return _range_noise(seed, position, choice, 0, num_blocks)[:vocab_size]


def _range_noise(seed: int, position: int, choice: int, first: int, num_blocks: int) -> NDArray[np.float32]:
    """float32[4 * num_blocks]: the noise of all ids of consecutive blocks, in pieces that stay in the cache."""
    noise = np.empty((num_blocks, WORDS_PER_BLOCK), np.float32)
    for start in range(0, num_blocks, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, num_blocks)
        blocks = np.arange(first + start, first + stop, dtype=np.uint64)
        words = np.empty((stop - start, WORDS_PER_BLOCK), np.uint32)
        for column, word in enumerate(philox((blocks, position, choice, 0), seed)):
            words[:, column] = word
        transform(words, noise[start:stop])
    return noise.reshape(-1)


def philox(counter: tuple[Any, Any, Any, Any], key: int) -> tuple[NDArray[np.uint64], ...]:
    """Philox4x32-10: four uint64 arrays with values below 2^32, one for each word of the blocks.

    counter: four integers or uint64 arrays that broadcast together, values below 2^32. key: 64 bits, low word first.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    m0, m1 = (np.uint64(word) for word in PHILOX_MULTIPLIERS)
    mask, half = np.uint64(MASK_32), np.uint64(32)
    k0, k1 = key & MASK_32, key >> 32
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = np.multiply(c0, m0), np.multiply(c2, m1)
        n0 = (p1 >> half) ^ (c1 ^ np.uint64(k0))
        n2 = (p0 >> half) ^ (c3 ^ np.uint64(k1))
        c0, c1, c2, c3 = n0, p1 & mask, n2, p0 & mask
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK_32, (k1 + PHILOX_WEYL[1]) & MASK_32
    return c0, c1, c2, c3


def transform(words: NDArray[np.uint32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """float32, shaped like words: -log(-log u) for u = (word + 0.5) / 2^32, u below 1/2 folded onto 1 - u above."""
    table = gumbel_table()
    signed = words.view(np.int32)
    side = signed >> 31
    argument = (signed ^ side).astype(np.float32)
    argument += np.float32(0.5)
    bits = argument.view(np.int32)
    side &= NUM_KNOTS
    side += bits >> FRACTION_BITS
    side -= FIRST_KNOT
    index = side.astype(np.intp)
    noise = (bits & ((1 << FRACTION_BITS) - 1)).astype(np.float32)
    noise *= table.slopes.take(index)
    return np.add(noise, table.values.take(index), out=out)


@lru_cache(maxsize=1)
def gumbel_table() -> GumbelTable:
    """The table behind ``transform``, 256 KiB, built at first use in some milliseconds."""
    bits = (np.arange(NUM_KNOTS + 1, dtype=np.int32) + FIRST_KNOT) << FRACTION_BITS
    tail = bits.view(np.float32).astype(np.float64) / 2.0**32
    sides = []
    for negative_log_u in (-_log(tail[:-1]), _negative_log_of_complement(tail[:-1])):
        sides.append(-_log(negative_log_u))
    values = np.stack(sides)
    slopes = np.zeros_like(values)
    slopes[:, :-1] = (values[:, 1:] - values[:, :-1]) / (1 << FRACTION_BITS)
    return GumbelTable(values.astype(np.float32).ravel(), slopes.astype(np.float32).ravel())


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """log x for positive normal numbers: x = m 2^e with m in [1/sqrt 2, sqrt 2), log m = 2 artanh((m-1)/(m+1))."""
    bits = x.view(np.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(np.float64)
    upper = mantissa >= _SQRT_2
    mantissa = np.where(upper, mantissa * 0.5, mantissa)
    return (exponent + upper).astype(np.float64) * _LN_2 + _twice_artanh((mantissa - 1.0) / (mantissa + 1.0))


def _negative_log_of_complement(w: NDArray[np.float64]) -> NDArray[np.float64]:
    """-log(1 - w) for w in (0, 1/2], with full relative precision for tiny w."""
    return _twice_artanh(w / (2.0 - w))


def _twice_artanh(s: NDArray[np.float64]) -> NDArray[np.float64]:
    """2 artanh s for abs(s) <= 1/3 by its series, in Horner's form: 2 s (1 + s^2/3 + s^4/5 + ...)."""
    square = s * s
    total = np.full_like(s, 1.0 / 35.0)
    for denominator in range(33, 0, -2):
        total = total * square + 1.0 / denominator
    return 2.0 * s * total

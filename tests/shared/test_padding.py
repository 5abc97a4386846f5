"""Size classes: what a padded frame gives away, and that zeros are all that padding may hold."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shared.errors import WireError
from paceline.shared.messages import Commit, FinishReason, Grow, Hello, Message, Open, TokenLogprobs
from paceline.shared.padding import KEY, pad, size_class
from paceline.shared.quantise import from_weights
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import DEFAULT_LIMITS, decode, encode

LONGEST = DEFAULT_LIMITS.max_frame_bytes


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 49_152, count).astype(np.int32)


def classes(unit: int) -> set[int]:
    return {unit << power for power in range(24) if unit << power <= LONGEST}


def carriers(count: int, seed: int) -> list[Message]:
    """Every kind of message that carries tokens, with ``count`` of them."""
    support = min(count, 63) + 1
    proposal = from_weights(np.arange(support), np.diff(np.linspace(0, 4096, support + 1).astype(int)))
    logprobs = tuple(TokenLogprobs(-0.5, ((token, -1.0),)) for token in range(count))
    return [
        Open(1, ids(count, seed), SamplingParams(seed=seed), Verifier.MSS, committed=ids(count, seed + 1)),
        Grow(1, 40, 3, ids(count, seed), np.full(count, -1, np.int32)),
        Grow(1, 40, 3, ids(count, seed), np.full(count, -1, np.int32), np.zeros(count, np.uint8), {(-1, 0): proposal}),
        Commit(1, 40, ids(count, seed), 0, 8, 64, 0.03),
        Commit(1, 40, ids(count, seed), 0, 8, 64, 0.03, FinishReason.STOP, logprobs),
    ]


@pytest.mark.parametrize("unit", [16, 64, 100, 1024])
@given(st.integers(1, 200), st.integers(0, 9))
def test_sizes_of_all_messages_that_carry_tokens_fall_in_classes(unit: int, count: int, seed: int) -> None:
    for message in carriers(count, seed):
        data = encode(message, unit)
        assert len(data) in classes(unit)
        assert len(data) <= max(unit, 2 * len(encode(message)) + 4)
        assert encode(decode(data)) == encode(message)


@pytest.mark.parametrize(
    "gap", [*range(3, 12), 255, 256, 257, 258, 259, 260, 261, 65_535, 65_538, 65_539, 65_540, 70_000]
)
def test_every_gap_is_filled_to_the_byte(gap: int) -> None:
    message = encode(Hello(1, "x"))
    data = pad(message, len(message) + gap, LONGEST)
    assert len(data) == len(message) + gap
    assert decode(data) == Hello(1, "x")


def test_a_gap_too_small_for_the_field_takes_the_next_class() -> None:
    message = encode(Hello(1, "x"))
    assert [len(pad(message, len(message) + gap, LONGEST)) - len(message) for gap in (0, 1, 2)] == [
        0,
        len(message) + 2,
        len(message) + 4,
    ]
    assert size_class(60, 64) == 64
    assert size_class(62, 64) == 128


def test_the_longest_frame_stays_within_the_limit() -> None:
    data = encode(Open(1, ids(8_000), SamplingParams(), Verifier.GREEDY), 4096)
    assert len(data) <= LONGEST
    assert len(pad(b"\x81" + bytes(LONGEST - 11), 64, LONGEST)) == LONGEST


def test_without_a_unit_nothing_changes() -> None:
    message = Grow(1, 40, 3, ids(8), np.full(8, -1, np.int32))
    assert encode(message, 0) == encode(message)


@pytest.mark.parametrize("tag", ["hello", "commit"])
@pytest.mark.parametrize(
    ("padding", "said"),
    [
        (b"\x00\x01", "nothing but zeros"),
        (b"secret", "nothing but zeros"),
        ("\x00", "expected bytes for"),
        (0, "expected bytes for"),
        (None, "expected bytes for"),
        ([0], "expected bytes for"),
    ],
)
def test_padding_that_is_not_zeros_is_refused_by_name_both_ways(tag: str, padding: object, said: str) -> None:
    plain = {"hello": {0: 1, 1: 1, 2: "x"}, "commit": {0: 18, 1: 1, 2: 4, 3: b"\x01\x05"}}[tag]
    decode(msgpack.packb({**plain, KEY: bytes(9)}))
    with pytest.raises(WireError, match=said) as caught:
        decode(msgpack.packb({**plain, KEY: padding}))
    assert f"{tag}.padding" in str(caught.value)


def test_a_field_twice_or_a_neighbour_of_the_padding_is_still_refused() -> None:
    with pytest.raises(WireError, match="field 126"):
        decode(msgpack.packb({0: 4, 1: 1, KEY: b"", KEY - 1: b""}))
    padded = encode(Hello(1, "x"), 64)
    twice = bytes([padded[0] + 1]) + padded[1:] + bytes([KEY, 0xC4, 0])
    with pytest.raises(WireError, match="each field once"):
        decode(twice)

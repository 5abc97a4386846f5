"""The codec: round trips, sizes, and that no bytes whatever raise anything but the typed errors."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shared import packing
from paceline.shared.errors import ContextError, LimitError, OpeningError, WireError
from paceline.shared.messages import (
    Cancel,
    Closing,
    Commit,
    Fault,
    FinishReason,
    Grow,
    Hello,
    Limits,
    Message,
    Open,
    Opened,
    StepTime,
    TokenLogprobs,
    Welcome,
)
from paceline.shared.quantise import from_weights
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.tree import TokenTree
from paceline.shared.wire import decode, encode


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)  # type: ignore[arg-type]
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return bool(left == right)


PROPOSAL = from_weights(ids(3, 9, 40000), [7, 4088, 1])
MESSAGES: list[Message] = [
    Hello(1, "paceline/0.1", "ab" * 32, "smollm2"),
    Open(3, ids(1, 2, 49151), SamplingParams(), Verifier.GREEDY),
    Open(
        4,
        ids(5),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2**64 - 1, stop=("END",), logit_bias={7: -1.5}, n=2),
        Verifier.MSS,
        committed=ids(8, 9),
        choice=1,
        patience_s=0.25,
        drafting=False,
    ),
    Grow(1, 17, 0, ids(), ids()),
    Grow(1, 17, 4, ids(9, 300, 70000), ids(-1, 4, 2)),
    Grow(1, 17, 0, ids(9, 3), ids(-1, -1), np.array([0, 1], np.uint8), {(-1, 0): PROPOSAL, (0, 1): PROPOSAL}),
    Cancel(9),
    Welcome(1, "smollm2", "cd" * 32, 49152, (2, 0), 1, Limits(), StepTime(0.041, 0.0025), "ff"),
    Welcome(1, "toy", "", 64, (), None, Limits(max_live_nodes=8), StepTime(0.0, 0.0)),
    Opened(2, 128),
    Commit(2, 40, ids(5, 6, 7), 2, 32, 64, 0.03, FinishReason.STOP, (TokenLogprobs(-0.5, ((5, -0.5), (9, -1.25))),)),
    Commit(2, 40, ids(5), 0, 0, 64, 0.03),
    Fault("limit", "expected less, got more", 2, "tokens"),
    Fault("internal", "no"),
    Closing(30.0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_round_trip(message: Message) -> None:
    assert same(decode(encode(message)), message)


@given(st.lists(st.integers(0, packing.MAX_VALUE), max_size=300))
def test_packed_integers_survive_the_round_trip(values: list[int]) -> None:
    array = np.array(values, np.int64)
    data = packing.pack(array)
    assert packing.unpack(data, 300, "x").tolist() == values
    assert len(data) <= 1 + 4 * len(values)


@given(st.binary(max_size=64))
def test_packed_garbage_is_refused_or_small(data: bytes) -> None:
    try:
        assert len(packing.unpack(data, 64, "x")) <= len(data)
    except WireError:
        pass


def test_a_greedy_frame_of_32_nodes_fits_200_bytes() -> None:
    rng = np.random.default_rng(0)
    tree = TokenTree.from_expansion([4, 2, 2, 1], tokens=rng.integers(16384, 49152, 4 + 8 + 16 + 16))
    first = 100_000
    parents = np.where(tree.parents < 0, -1, tree.parents + first)[:32].astype(np.int32)
    data = encode(Grow(1_000, 8_000, first, tree.tokens[:32], parents))
    assert len(data) <= 200
    assert len(encode(Grow(1, 500, 64, np.full(8, 49151, np.int32), np.arange(63, 71, dtype=np.int32)))) <= 60


def test_an_mss_frame_of_32_nodes_fits_2_kilobytes() -> None:
    rng = np.random.default_rng(0)
    parents = np.array([-1] * 4 + [node // 4 for node in range(28)], np.int32)
    proposals = {}
    for parent in range(-1, 7):
        support = np.sort(rng.choice(49152, 64, replace=False)).astype(np.int32)
        proposals[parent, 0] = from_weights(support, rng.multinomial(4096 - 64, np.full(64, 1 / 64)) + 1)
    frame = Grow(1, 500, 0, rng.integers(0, 49152, 32).astype(np.int32), parents, None, proposals)
    assert len(encode(frame)) <= 2048


def refused(data: bytes, limits: Limits | None = None) -> str:
    with pytest.raises((WireError, LimitError)) as caught:
        decode(data, limits or Limits())
    return str(caught.value)


def test_unknown_tag_and_field_are_named() -> None:
    assert "77" in refused(msgpack.packb({0: 77}))
    assert "field 9 " in refused(msgpack.packb({0: 4, 1: 1, 9: 1})) + " "
    assert "cancel" in refused(msgpack.packb({0: 4, 1: 1, 9: 1}))
    assert "cancel.generation" in refused(msgpack.packb({0: 4}))
    assert "temprature" in refused(msgpack.packb({0: 2, 1: 0, 2: packing.pack(ids(1)), 3: {"temprature": 1}, 4: 0}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        encode(MESSAGES[4])[:-1],
        encode(MESSAGES[4]) + b"\x00",
        msgpack.packb([0, 1]),
        msgpack.packb({0: True, 1: 1}),
        msgpack.packb({0: 4.0, 1: 1}),
        msgpack.packb({0: 4, 1: float("nan")}),
        msgpack.packb({0: 4, 1: -1}),
        msgpack.packb({0: 4, 1: 2**40}),
        msgpack.packb({0: 4, 1: "1"}),
        msgpack.packb({0: 4, 1: msgpack.ExtType(5, b"abc")}),
        msgpack.packb({0: 4, 1: msgpack.Timestamp(1)}),
        b"\x82\x00\x04\x00\x04",
        b"\x91" * 100_000 + b"\xc0",
        b"\xdf\x00\x0f\x42\x40" + b"\x00\x00" * 10,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x91\x00\x00",
        msgpack.packb({0: 3, 1: 0, 2: 5, 3: 0, 4: packing.pack(ids(1, 2)), 5: packing.pack(ids(0))}),
        msgpack.packb({0: 3, 1: 0, 2: 5, 3: 0, 4: packing.pack(ids(1)), 5: packing.pack(ids(9))}),
        msgpack.packb({0: 3, 1: 0, 2: 5, 3: 2**31 - 1, 4: packing.pack(ids(1)), 5: packing.pack(ids(0))}),
        msgpack.packb({0: 3, 1: 0, 2: 5, 3: 0, 4: b"\x00\xff", 5: packing.pack(ids(0))}),
        msgpack.packb({0: 3, 1: 0, 2: 5, 3: 0, 4: b"\x09abc", 5: packing.pack(ids(0))}),
    ],
)
def test_malformed_bytes_raise_the_typed_error(data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    try:
        decode(data)
    except (WireError, LimitError):
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_never_raise_anything_else(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(raw))
    except (WireError, LimitError):
        pass


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from([1, 2, 3, 4, 16, 17, 18, 19, 20]), st.dictionaries(st.integers(1, 9), plain_values, max_size=9))
def test_any_structure_is_a_message_or_the_typed_error(tag: int, entries: dict[int, object]) -> None:
    try:
        decode(msgpack.packb({0: tag, **entries}))
    except (WireError, LimitError):
        pass


def test_limits_are_enforced_by_name() -> None:
    small = Limits(max_frame_bytes=4096, max_frame_nodes=8, max_context=16)
    nine = np.arange(9, dtype=np.int32)
    with pytest.raises(LimitError):
        decode(encode(Grow(0, 1, 0, nine, nine - 1)), small)
    with pytest.raises(OpeningError, match="max_context=16") as caught:
        decode(encode(Open(7, np.arange(17, dtype=np.int32), SamplingParams(), Verifier.GREEDY)), small)
    assert caught.value.generation == 7
    assert isinstance(caught.value.cause, ContextError)
    with pytest.raises(LimitError):
        decode(bytes(4097), small)


def test_forward_and_self_parents_cannot_be_encoded() -> None:
    for parents in ((0, -1), (-1, 5)):
        with pytest.raises(WireError):
            encode(Grow(0, 1, 0, ids(1, 2), ids(*parents)))

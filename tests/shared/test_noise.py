"""The shared noise: published vectors, the same bits for any subset and order, and the right distribution."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.shared.noise import gumbel, gumbel_row, gumbel_table, philox, transform

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_agrees_with_the_published_vectors_of_random123(counter, key, expected):
    words = philox(counter, key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == expected


def test_philox_of_arrays_is_philox_of_each_element():
    blocks = np.array([0, 7, ALL_ONES], np.uint64)
    together = philox((blocks, 5, 1, 0), 99)
    for index, block in enumerate(blocks.tolist()):
        assert [int(word[index]) for word in together] == [int(word) for word in philox((block, 5, 1, 0), 99)]


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    choice=st.integers(0, 63),
    ids=st.lists(st.integers(0, 2000) | st.integers(0, 2**32 - 1), max_size=40),
)
def test_any_subset_in_any_order_has_the_same_bits(seed, position, choice, ids):
    together = gumbel(seed, position, np.array(ids, np.int64), choice)
    assert together.dtype == np.float32
    assert [value.tobytes() for value in together] == [
        gumbel(seed, position, np.array([token]), choice)[0].tobytes() for token in ids
    ]


def test_dense_ids_sparse_ids_and_whole_rows_agree():
    row = gumbel_row(3, 11, 50_001, choice=2)
    order = np.random.default_rng(0).permutation(50_001)
    assert row.shape == (50_001,)
    assert np.array_equal(gumbel(3, 11, np.arange(50_001), 2), row)
    assert np.array_equal(gumbel(3, 11, order, 2), row[order])
    assert np.array_equal(gumbel(3, 11, order[:100], 2), row[order[:100]])
    assert np.array_equal(gumbel(3, 11, order[:100].reshape(4, 25), 2), row[order[:100]].reshape(4, 25))


def test_every_part_of_the_key_changes_the_noise():
    ids = np.arange(100)
    rows = [
        gumbel(1, 2, ids, 3),
        gumbel(2, 2, ids, 3),
        gumbel(1 + (1 << 32), 2, ids, 3),
        gumbel(1, 3, ids, 3),
        gumbel(1, 2, ids, 4),
    ]
    for index, row in enumerate(rows):
        assert len(set(row.tolist())) == 100
        assert all(not np.intersect1d(row, other).size for other in rows[:index])


def test_noise_is_pinned_so_that_another_machine_would_notice():
    digest = hashlib.sha256(gumbel_row(2024, 7, 10_000).astype("<f4").tobytes())
    digest.update(gumbel_table().values.astype("<f4").tobytes() + gumbel_table().slopes.astype("<f4").tobytes())
    assert digest.hexdigest() == "03d9fe997015b056af0716d7b8506839545da60b6d462dd737320d884f70c150"


def test_transform_is_within_two_millionths_of_the_logarithms():
    edges = [0, 1, 2, 3, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words = np.concatenate([np.random.default_rng(1).integers(0, 2**32, 200_000), edges]).astype(np.uint32)
    exact = [
        -math.log(-math.log1p(-(2**32 - 0.5 - x) / 2**32) if x >= 2**31 else -math.log((x + 0.5) / 2**32))
        for x in words.tolist()
    ]
    assert np.abs(transform(words) - np.array(exact)).max() < 2e-6


def test_transform_never_falls_as_words_rise():
    words = np.unique(np.random.default_rng(2).integers(0, 2**32, 500_000).astype(np.uint32))
    assert (np.diff(transform(words)) >= 0).all()


def test_noise_is_gumbel_distributed_and_positions_are_independent():
    rows = np.stack([gumbel_row(5, position, 20_000) for position in range(20)])
    assert stats.kstest(rows.ravel(), stats.gumbel_r.cdf).pvalue > 0.01
    assert np.abs(np.corrcoef(rows) - np.eye(20)).max() < 0.05


@pytest.mark.parametrize(
    ("seed", "position", "ids", "choice"),
    [
        (-1, 0, [1], 0),
        (1 << 64, 0, [1], 0),
        (0, -1, [1], 0),
        (0, 1 << 32, [1], 0),
        (0, 0, [-1], 0),
        (0, 0, [1.5], 0),
        (0, 0, [1], -1),
    ],
)
def test_numbers_outside_their_range_are_refused(seed, position, ids, choice):
    with pytest.raises(ValueError, match="expected"):
        gumbel(seed, position, np.array(ids), choice)


def test_no_ids_give_no_noise():
    assert gumbel(0, 0, np.array([], np.int64)).shape == (0,)

"""The KV pool against a plain model of it: every generation's tokens, in order, whatever the blocks do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.server.kv.pool import KVPool

BLOCK = 4


def make_pool(num_blocks: int = 8) -> KVPool:
    return KVPool(num_blocks, BLOCK, num_layers=2, num_kv_heads=1, head_dim=1, dtype=torch.float64, device="cpu")


def write(pool: KVPool, handle: int, start: int, values: list[float]) -> None:
    """What a step does: KV at the slots behind the cached ones. The value stands for the token and all before it."""
    slots = torch.from_numpy(pool.slots(handle, start, start + len(values)))
    pool.data[:, :, 0, slots, 0] = torch.tensor(values, dtype=torch.float64)


def read(pool: KVPool, handle: int) -> list[float]:
    length = pool.length(handle)
    slots = torch.from_numpy(pool.slots(handle, 0, length))
    rows = pool.data[:, :, 0, slots, 0].reshape(4, length)
    assert (rows == rows[0]).all()
    return rows[0].tolist()


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def fill(pool: KVPool, handle: int, tokens: np.ndarray) -> int:
    """Opens a generation and computes what the cache lacks; returns how many tokens it had."""
    found = pool.open(handle, tokens)
    assert pool.reserve(handle, len(tokens))
    write(pool, handle, found, [float(token) for token in tokens[found:]])
    pool.commit(handle, found, range(len(tokens) - found))
    return found


def test_commit_in_place_moves_nothing() -> None:
    pool = make_pool()
    fill(pool, 1, ids(1, 2, 3))
    pool.reserve(1, 8)
    write(pool, 1, 3, [4, 5, 6, 7, 8])
    assert pool.commit(1, 3, [0, 1, 2]) == 0
    assert read(pool, 1) == [1, 2, 3, 4, 5, 6]


def test_commit_moves_only_what_is_out_of_place() -> None:
    pool = make_pool()
    fill(pool, 1, ids(1, 2, 3))
    pool.reserve(1, 9)
    write(pool, 1, 3, [4, 50, 60, 5, 70, 6])
    assert pool.commit(1, 3, [0, 3, 5]) == 2 * pool.slot_bytes
    assert read(pool, 1) == [1, 2, 3, 4, 5, 6]


def test_growth_stays_contiguous_beside_other_generations() -> None:
    pool = make_pool(64)
    for handle in range(4):
        fill(pool, handle, ids(handle))
    for length in range(2, 5 * BLOCK):
        for handle in range(4):
            assert pool.reserve(handle, length)
    assert all(pool.first_slot(handle) is not None for handle in range(4))


def test_reserve_without_room_changes_nothing() -> None:
    pool = make_pool(2)
    fill(pool, 1, ids(1, 2, 3, 4, 5))
    fill_state = (pool.block_table(1), pool.num_free_blocks, read(pool, 1))
    assert not pool.reserve(1, 9)
    assert (pool.block_table(1), pool.num_free_blocks, read(pool, 1)) == fill_state


def test_reserve_gives_back_blocks_beyond_the_need() -> None:
    pool = make_pool()
    fill(pool, 1, ids(1, 2))
    assert pool.reserve(1, 6 * BLOCK)
    assert pool.reserve(1, 3)
    assert pool.num_used_blocks == 1


def test_open_finds_published_prefix_but_never_the_whole_text() -> None:
    pool = make_pool()
    text = ids(*range(1, 2 * BLOCK + 1))
    assert fill(pool, 1, text) == 0
    pool.publish(1, text)
    pool.free(1)
    assert (pool.num_used_blocks, pool.num_cached_blocks) == (0, 2)
    assert fill(pool, 2, text) == len(text) - 1
    assert read(pool, 2) == text.tolist()
    assert fill(pool, 3, ids(*text, 99)) == len(text)
    assert fill(pool, 4, ids(*text[:BLOCK], 77, 78, 79, 80)) == BLOCK
    assert read(pool, 4) == [*text[:BLOCK], 77, 78, 79, 80]


def test_undelivered_tokens_are_never_found() -> None:
    pool = make_pool()
    text = ids(*range(1, 3 * BLOCK + 1))
    fill(pool, 1, text)
    pool.publish(1, text[: 2 * BLOCK - 1])
    pool.free(1)
    assert pool.open(2, text) == BLOCK


def test_rewriting_the_last_token_of_a_shared_block_copies_it() -> None:
    pool = make_pool()
    text = ids(1, 2, 3, 4)
    fill(pool, 1, text)
    pool.publish(1, text)
    assert pool.open(2, text) == 3
    assert pool.block_table(2) == pool.block_table(1)
    assert pool.reserve(2, 5)
    assert not set(pool.block_table(2)) & set(pool.block_table(1))
    write(pool, 2, 3, [-4.0])
    pool.commit(2, 3, [0])
    assert read(pool, 1) == [1, 2, 3, 4]
    assert read(pool, 2) == [1, 2, 3, -4]


def test_eviction_takes_the_least_recently_used_end_first() -> None:
    pool = make_pool(4)
    old, new = ids(1, 2, 3, 4, 5, 6, 7, 8), ids(11, 12, 13, 14)
    for handle, text in ((1, old), (2, new)):
        fill(pool, handle, text)
        pool.publish(handle, text)
    pool.free(1)
    pool.free(2)
    fill(pool, 3, ids(*range(20, 20 + 2 * BLOCK)))
    pool.free(3)
    assert pool.open(4, ids(*old, 9)) == BLOCK
    pool.free(4)
    assert pool.open(5, ids(*new, 9)) == BLOCK


def test_scattered_generation_moves_together_when_there_is_room() -> None:
    pool = make_pool(16)
    for handle in range(16):
        fill(pool, handle, ids(handle, 1, 2, 3))
    for handle in (3, 9):
        pool.free(handle)
    assert pool.reserve(0, 3 * BLOCK)
    write(pool, 0, 4, [4, 5, 6, 7, 8])
    pool.commit(0, 4, range(5))
    assert pool.first_slot(0) is None
    for handle in range(1, 16):
        pool.free(handle)
    assert pool.reserve(0, 3 * BLOCK + 1)
    assert pool.first_slot(0) is not None
    assert read(pool, 0) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_full_cache_makes_way_in_runs_not_in_gaps() -> None:
    pool = make_pool(64)
    rng = np.random.default_rng(1)
    for handle in range(60):
        text = rng.integers(1, 1000, 40).astype(np.int32)
        fill(pool, handle, text)
        assert pool.first_slot(handle) is not None
        pool.publish(handle, text)
        pool.free(handle)
    assert pool.num_cached_blocks > 40


def test_poison_spares_what_counts() -> None:
    pool = make_pool()
    fill(pool, 1, ids(1, 2, 3, 4, 5))
    pool.publish(1, ids(1, 2, 3, 4))
    fill(pool, 2, ids(9))
    pool.free(2)
    pool.poison_free_blocks()
    assert read(pool, 1) == [1, 2, 3, 4, 5]
    assert int(torch.isnan(pool.data[0, 0, 0, :, 0]).sum()) == 8 * BLOCK - 5


def test_open_twice_is_refused() -> None:
    pool = make_pool()
    pool.open(1, ids(1))
    with pytest.raises(ValueError, match="in use"):
        pool.open(1, ids(1))


class PoolMachine(RuleBasedStateMachine):
    """Random generations over a few short texts that share prefixes; the model is each generation's list of tokens."""

    @initialize()
    def start(self) -> None:
        self.pool = make_pool(10)
        self.texts: dict[int, list[int]] = {}
        self.next_handle = 0

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=14))
    def open_and_prefill(self, tokens: list[int]) -> None:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        # The value written stands for the token and everything before it, as real KV does.
        found = self.pool.open(handle, np.array(tokens, np.int32))
        assert 0 <= found < len(tokens)
        if not self.pool.reserve(handle, len(tokens)):
            self.pool.free(handle)
            return
        write(self.pool, handle, found, [self._value(tokens[: i + 1]) for i in range(found, len(tokens))])
        self.pool.commit(handle, found, range(len(tokens) - found))
        self.texts[handle] = tokens

    @rule(data=st.data())
    def verify_step(self, data: st.DataObject) -> None:
        if not self.texts:
            return
        handle = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[handle]
        kept = sorted(data.draw(st.sets(st.integers(0, 7), max_size=5)))
        if not self.pool.reserve(handle, len(text) + 8):
            return
        new = [data.draw(st.integers(1, 2)) for _ in kept]
        values = [-1.0] * 8
        for i, row in enumerate(kept):
            values[row] = self._value([*text, *new[: i + 1]])
        write(self.pool, handle, len(text), values)
        moved = self.pool.commit(handle, len(text), kept)
        assert moved <= len(kept) * self.pool.slot_bytes
        self.texts[handle] = text + new

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if self.texts:
            handle = data.draw(st.sampled_from(sorted(self.texts)))
            delivered = data.draw(st.integers(0, len(self.texts[handle])))
            self.pool.publish(handle, np.array(self.texts[handle][:delivered], np.int32))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.texts:
            handle = data.draw(st.sampled_from(sorted(self.texts)))
            del self.texts[handle]
            self.pool.free(handle)

    @rule()
    def poison(self) -> None:
        self.pool.poison_free_blocks()

    @invariant()
    def every_generation_reads_its_own_text(self) -> None:
        if not hasattr(self, "pool"):
            return
        for handle, text in self.texts.items():
            assert read(self.pool, handle) == [self._value(text[: i + 1]) for i in range(len(text))]
        blocks = {block for handle in self.texts for block in self.pool.block_table(handle)}
        assert self.pool.num_used_blocks == len(blocks)
        assert self.pool.num_free_blocks + self.pool.num_used_blocks + self.pool.num_cached_blocks == 10

    @staticmethod
    def _value(tokens: list[int]) -> float:
        return float(int("".join(map(str, tokens)), 3))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_blocks_in_use_return_to_zero_after_ten_thousand_generations() -> None:
    rng = np.random.default_rng(3)
    pool = make_pool(48)
    live: dict[int, np.ndarray] = {}
    for handle in range(10_000):
        tokens = rng.integers(1, 3, rng.integers(1, 20)).astype(np.int32)
        found = pool.open(handle, tokens)
        while not pool.reserve(handle, len(tokens) + 8):  # preempt somebody
            victim = next(iter(live), None)
            if victim is None:
                break
            pool.free(victim)
            del live[victim]
        kept = np.flatnonzero(rng.random(8) < 0.3)
        pool.commit(handle, found, [*range(len(tokens) - found), *(len(tokens) - found + kept)])
        if rng.random() < 0.5:
            pool.publish(handle, tokens)
        live[handle] = tokens
        for ended in [other for other in live if rng.random() < 0.3]:
            pool.free(ended)
            del live[ended]
    for handle in live:
        pool.free(handle)
    assert pool.num_used_blocks == 0
    assert pool.num_free_blocks + pool.num_cached_blocks == 48
    pool.clear_cache()
    assert pool.num_free_blocks == 48

"""The draft model's runtime on a laptop: threads, memory, long contexts, buffers that are used again."""

from __future__ import annotations

import gc
import os
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from paceline.client.drafting import onnx_ssm
from paceline.client.drafting.drafter import ANCHOR_KEY, DraftRequest
from paceline.client.drafting.kv_buffer import KVBuffer
from paceline.client.drafting.onnx_ssm import OnnxDrafter, available_cpus, thread_count
from paceline.models.graph import GraphBuilder
from paceline.models.tiny import tiny_draft_weights

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 8, 32


def build(vocab=32, layers=2):
    """A random draft in float32, as bytes."""
    return GraphBuilder(tiny_draft_weights(vocab, layers), bits=32, head_bits=32).build().SerializeToString()


@pytest.fixture(scope="module")
def model():
    return build()


def request(start, token_ids, nodes=(), alive=(), wants_anchor=True):
    """nodes: (key, token, parent key, depth)."""
    keys, tokens, parents, depths = (list(column) for column in zip(*nodes, strict=True)) if nodes else ([], [], [], [])
    return DraftRequest(
        0,
        start,
        np.array(token_ids, np.int32),
        np.full(len(token_ids), ANCHOR_KEY, np.int64),
        np.array(alive, np.int64),
        np.array(keys, np.int64),
        np.array(tokens, np.int32),
        np.array(parents, np.int64),
        np.array(depths, np.int32),
        wants_anchor,
        16,
    )


def generate(drafter, length, chunk=128, steps=4):
    """One generation: a prompt of that length, then a few steps of a tree of five nodes and a commit of one token.

    Returns the log-probabilities of all trees.
    """
    sequence = drafter.start()
    text = (np.arange(length) * 7 % 31).tolist()
    for at in range(0, length, chunk):
        sequence.expand(request(at, text[at : at + chunk], wants_anchor=False))
    answers, key = [], 0
    for step in range(steps):
        nodes = [(key, 1, ANCHOR_KEY, 1), (key + 1, 2, ANCHOR_KEY, 1), (key + 2, 3, key, 2), (key + 3, 4, key + 2, 3)]
        answers.append(sequence.expand(request(length + step, [5], nodes)).logprobs)
        key += len(nodes)
    sequence.close()
    return np.concatenate(answers)


# Threads (U085)


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (4, 2), (8, 4), (64, 4)])
def test_default_leaves_half_of_the_cpus_alone(monkeypatch, tmp_path, cpus, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.setattr(onnx_ssm, "_CGROUP_QUOTA", str(tmp_path / "none"))
    assert available_cpus() == cpus
    assert thread_count(None) == threads
    assert thread_count(1) == 1
    assert thread_count(1000) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 32), ("?", 32)])
def test_quota_of_a_container_counts(monkeypatch, tmp_path, quota, cpus):
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    monkeypatch.setattr(onnx_ssm, "_CGROUP_QUOTA", str(path))
    assert available_cpus() == cpus


@pytest.mark.parametrize("wanted", [1, None])
def test_runtime_gets_the_chosen_threads_and_none_that_spins(model, wanted):
    drafter = OnnxDrafter(model, threads=wanted)
    options = drafter._session.get_session_options()
    assert options.intra_op_num_threads == thread_count(wanted)
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_draft_of_one_thread_starts_no_other(model):
    before = len(list(Path("/proc/self/task").iterdir()))
    drafter = OnnxDrafter(model, threads=1)
    generate(drafter, 40)
    assert len(list(Path("/proc/self/task").iterdir())) == before


# Long contexts


def test_draft_at_eight_thousand_tokens_does_not_depend_on_how_they_came(model):
    drafter = OnnxDrafter(model, threads=1, max_context=8192)
    answers = [generate(drafter, 8100, chunk) for chunk in (128, 90)]
    assert np.isfinite(answers[0]).all()
    np.testing.assert_allclose(answers[0], answers[1], atol=2e-3)
    (buffer,) = drafter._spare
    assert buffer.num_bytes == 2 * 2 * KV_HEADS * 8192 * HEAD_DIM * 4


# Buffers that are used again


def test_short_text_after_a_long_one_is_small_again_and_allocates_nothing(model):
    drafter = OnnxDrafter(model, threads=1)
    first = generate(drafter, 60)
    generate(drafter, 3000)
    (buffer,) = drafter._spare
    block, size = buffer._block, buffer.num_bytes
    assert buffer.capacity == 128, "a call would pay for every slot of a larger one"
    np.testing.assert_array_equal(generate(drafter, 60), first)
    generate(drafter, 3000)
    assert drafter._spare == [buffer]
    assert buffer._block is block and buffer.num_bytes == size


def test_buffer_keeps_what_it_holds_while_its_layout_grows_in_place():
    rng = np.random.default_rng(0)
    buffer = KVBuffer(3, 2, 4)
    buffer.reserve(5000, 0)
    buffer.empty()
    held = rng.normal(size=(3, 2, 2, 100, 4)).astype(np.float32)
    buffer.write(np.arange(100), held)
    for size in (129, 257, 1000, 4000):
        buffer.reserve(size, 100)
        assert buffer.capacity >= size
        np.testing.assert_array_equal(buffer.array[:, :, :, :100], held)
        assert np.shares_memory(buffer.feeds["past_key_1"].numpy(), buffer.array)


def test_generations_side_by_side_have_buffers_of_their_own_and_few_are_kept(model):
    drafter = OnnxDrafter(model, threads=1)
    sequences = [drafter.start() for _ in range(9)]
    assert len({id(sequence._buffer) for sequence in sequences}) == 9
    for sequence in sequences:
        sequence.close()
    assert len(drafter._spare) == 4


# Memory (U086)

LENGTHS = (40, 700, 130, 1500, 260, 90)


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_heap_stays_flat_over_generations_of_mixed_length(model):
    drafter = OnnxDrafter(model, threads=1)
    for length in LENGTHS:
        generate(drafter, length)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(30):
            generate(drafter, LENGTHS[number % len(LENGTHS)])
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 64 << 10, "what the generations leave behind, in bytes"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads /proc")
def test_memory_stays_flat_over_two_hundred_generations(model):
    drafter = OnnxDrafter(model, threads=1)
    early = 0
    for number in range(200):
        generate(drafter, LENGTHS[number % len(LENGTHS)])
        if number == 20:
            gc.collect()
            early = rss_bytes()
    gc.collect()
    assert rss_bytes() < 1.05 * early


def bytes_while_open_and_closed():
    """What a drafter adds to the process while it is open, and after it was closed."""
    small = OnnxDrafter(build(), threads=1)  # the runtime's own memory stays
    generate(small, 10)
    small.close()
    model = build(vocab=500_000)  # 64 MB of embedding
    gc.collect()
    before = rss_bytes()
    drafter = OnnxDrafter(model, threads=1)
    generate(drafter, 300)
    loaded = rss_bytes()
    drafter.close()
    gc.collect()
    return loaded - before, rss_bytes() - before


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads /proc")
def test_closing_a_drafter_gives_its_memory_back():
    # A process of its own: one that freed as much before gives it again without growing.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        added, kept = pool.submit(bytes_while_open_and_closed).result()
    assert added > 40 << 20
    assert kept < 0.2 * added

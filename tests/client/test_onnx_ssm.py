"""The ONNX drafter: what its tree KV answers must be what a fresh prefill of each path answers (U084)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.client.drafting.drafter import ANCHOR_KEY, NO_LOGPROB, Candidates, DraftRequest
from paceline.client.drafting.kv_buffer import KVBuffer, bucket_for
from paceline.client.drafting.onnx_ssm import OnnxDrafter, available_cpus, thread_count
from paceline.models.graph import GraphBuilder
from paceline.models.tiny import tiny_draft_weights
from paceline.shared.errors import BundleError

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 4, 2, 8


@pytest.fixture(scope="module")
def model():
    """The same as a graph in float32, as bytes."""
    return make_graph(tiny_draft_weights())


def make_graph(weights):
    return GraphBuilder(weights, bits=32, head_bits=32).build().SerializeToString()


def request(start, token_ids, *, path_keys=None, alive=(), nodes=(), wants_anchor=True, width=16):
    """nodes: (key, token, parent key, depth)."""
    keys, tokens, parents, depths = (list(column) for column in zip(*nodes, strict=True)) if nodes else ([], [], [], [])
    path_keys = [ANCHOR_KEY] * len(token_ids) if path_keys is None else path_keys
    return DraftRequest(
        0,
        start,
        np.array(token_ids, np.int32),
        np.array(path_keys, np.int64),
        np.array(alive, np.int64),
        np.array(keys, np.int64),
        np.array(tokens, np.int32),
        np.array(parents, np.int64),
        np.array(depths, np.int32),
        wants_anchor,
        width,
    )


def prefill(drafter, text):
    sequence = drafter.start()
    answer = sequence.expand(request(0, text))
    sequence.close()
    return answer


class CheckedSequence:
    """An ONNX sequence that compares every answer with a fresh prefill of the row's whole path."""

    def __init__(self, drafter):
        self.drafter, self.inner = drafter, drafter.start()
        self.text, self.paths, self.num_checked = [], {}, 0

    def expand(self, one):
        self.text = [*self.text[: one.start], *one.token_ids.tolist()]
        rows = [list(self.text)] if one.wants_anchor else []
        columns = zip(one.keys.tolist(), one.tokens.tolist(), one.parent_keys.tolist(), strict=True)
        for key, token, parent in columns:
            self.paths[key] = [*(self.text if parent == ANCHOR_KEY else self.paths[parent]), token]
            rows.append(self.paths[key])
        answer = self.inner.expand(one)
        assert answer.token_ids.shape[0] == len(rows)
        for place, path in enumerate(rows):
            expected = prefill(self.drafter, path)
            np.testing.assert_allclose(answer.logprobs[place], expected.logprobs[0], atol=2e-4)
            self.num_checked += 1
        return answer

    def close(self):
        self.inner.close()


class CheckedDrafter:
    name, is_instant, max_context, chunk_len = "checked", False, 200, 16

    def __init__(self, model):
        self.onnx = OnnxDrafter(model, threads=1)
        self.sequences = []

    def start(self):
        self.sequences.append(CheckedSequence(self.onnx))
        return self.sequences[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tree_kv_answers_like_a_fresh_prefill_through_commits_and_misses(lab, model, temperature):
    drafter = CheckedDrafter(model)

    def self_logits(context):
        # The target is the draft itself up to noise, so that some nodes are accepted and some are not.
        answer = prefill(drafter.onnx, context.tolist())
        logits = np.full(VOCAB, -8.0, np.float32)
        logits[answer.token_ids[0]] = answer.logprobs[0]
        rng = np.random.default_rng(context[-3:].tolist())
        return logits + rng.normal(0, 0.5, VOCAB).astype(np.float32)

    world = lab.World(lab.scripted(self_logits, VOCAB))
    peer = world.client(list(range(1, 21)), [drafter], max_tokens=30, temperature=temperature, seed=3)
    world.at(0.3, peer.drop)
    world.run()
    assert drafter.sequences[0].num_checked > 30
    assert peer.session.stats.accepted > 3
    if not temperature:
        assert peer.token_ids == world.target.greedy(list(range(1, 21)), 30)


@pytest.mark.parametrize("past", [0, 1, 17])
def test_chunked_prefill_equals_one_prefill(model, past):
    drafter = OnnxDrafter(model, threads=1)
    text = [(7 * place + 3) % VOCAB for place in range(past + 5)]
    expected = prefill(drafter, text)
    sequence = drafter.start()
    if past:
        partial = sequence.expand(request(0, text[:past], wants_anchor=False))
        assert partial.token_ids.shape[0] == 0
    answer = sequence.expand(request(past, text[past:]))
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
    again = sequence.expand(request(past + 4, text[-1:]))
    np.testing.assert_allclose(again.logprobs, expected.logprobs, atol=1e-4)


def test_second_generation_reuses_the_buffer_and_is_not_disturbed_by_the_first(model):
    drafter = OnnxDrafter(model, threads=1)
    fresh = prefill(OnnxDrafter(model, threads=1), [5, 6, 7])
    first = drafter.start()
    first.expand(request(0, list(range(30)) * 8))
    buffer = first._buffer
    first.close()
    second = drafter.start()
    assert second._buffer is buffer
    np.testing.assert_allclose(second.expand(request(0, [5, 6, 7])).logprobs, fresh.logprobs, atol=1e-4)


def test_buffer_grows_in_buckets_and_keeps_what_it_holds():
    buffer = KVBuffer(1, 1, 2)
    assert buffer.capacity == 128
    slots = np.arange(3)
    buffer.write(slots, np.arange(12, dtype=np.float32).reshape(1, 2, 1, 3, 2))
    before = buffer.array[:, :, :, :3].copy()
    buffer.reserve(300, 3)
    assert buffer.capacity == bucket_for(300) == 320
    np.testing.assert_array_equal(buffer.array[:, :, :, :3], before)
    buffer.move(np.array([0, 1]), np.array([1, 2]))
    np.testing.assert_array_equal(buffer.array[:, :, :, 1:3], before[:, :, :, :2])
    assert bucket_for(9000) == 12288


def test_graph_that_is_none_is_refused():
    with pytest.raises(BundleError, match="expected a draft graph"):
        OnnxDrafter(b"not a graph", threads=1)


def test_threads_never_exceed_what_the_process_may_use():
    assert 1 <= thread_count(None) <= available_cpus()
    assert thread_count(64) == available_cpus()
    assert thread_count(1) == 1


def test_empty_candidates_have_rows_and_no_columns():
    assert Candidates.empty(3).token_ids.shape == (3, 0)


def test_extra_tokens_stand_beside_the_best_and_none_twice():
    weights = replace(tiny_draft_weights(), bridge=np.eye(WIDTH, dtype=np.float32))
    drafter = OnnxDrafter(make_graph(weights), threads=1)
    asked = np.array([0, 5, 9, 31], np.int32)
    one = replace(request(0, [3, 1, 4], width=8), extra_ids=asked)
    sequence = drafter.start()
    answer = sequence.expand(one)
    sequence.close()
    best, extra = answer.token_ids[0, :8], answer.token_ids[0, 8:]
    assert extra.tolist() == asked.tolist()
    possible = answer.token_ids[0][answer.logprobs[0] > NO_LOGPROB]
    assert sorted(possible.tolist()) == sorted(set(best.tolist()) | set(asked.tolist()))
    assert prefill(drafter, [3, 1, 4]).logprobs[0, :8] == pytest.approx(answer.logprobs[0, :8], abs=1e-5)


def test_graphs_that_score_no_extra_tokens_ignore_them(model):
    drafter = OnnxDrafter(model, threads=1)
    one = replace(request(0, [3, 1, 4], width=8), extra_ids=np.array([5], np.int32))
    assert drafter.start().expand(one).token_ids.shape == (1, 8)


def test_a_graph_that_is_asked_for_few_candidates_finds_the_best_of_all(model):
    drafter = OnnxDrafter(model, threads=1)
    assert drafter.takes_width
    every = drafter.start().expand(request(0, [3, 1, 4], width=1000))
    few = drafter.start().expand(request(0, [3, 1, 4], width=3))
    assert every.token_ids.shape == (1, tiny_draft_weights().shape.num_candidates), "more than it has is all it has"
    assert few.token_ids.tolist() == every.token_ids[:, :3].tolist()
    assert few.logprobs == pytest.approx(every.logprobs[:, :3])

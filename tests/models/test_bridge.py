"""The map from a target's embedding to a draft's head: found where there is one, left out where there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.models.bridge import fit_bridge
from paceline.models.draft import Draft
from paceline.models.graph import EXTRA_OFFSET, GraphBuilder
from paceline.models.runtime import GraphRunner
from paceline.models.smooth import measure_peaks, smooth
from paceline.models.tiny import VOCAB_SIZE, tiny_model

VOCABULARY = np.arange(0, 400, 2, dtype=np.int32)


def test_bridge_continues_a_head_that_is_a_linear_map_of_the_embedding() -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(400, 24)).astype(np.float32)
    mapping = rng.normal(size=(24, 24)).astype(np.float32)
    bridge = fit_bridge(embedding, (embedding @ mapping)[VOCABULARY], VOCABULARY)
    assert bridge is not None
    wanted, got = embedding[1::2] @ mapping, embedding[1::2] @ bridge
    assert np.square(wanted - got).sum() < 1e-3 * np.square(wanted).sum()


def test_no_bridge_for_a_head_that_has_nothing_to_do_with_the_embedding() -> None:
    rng = np.random.default_rng(0)
    embedding, head = rng.normal(size=(400, 24)).astype(np.float32), rng.normal(size=(200, 24)).astype(np.float32)
    assert fit_bridge(embedding, head, VOCABULARY) is None


def test_no_bridge_for_a_head_that_holds_every_token() -> None:
    embedding = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    assert fit_bridge(embedding, embedding, np.arange(40, dtype=np.int32)) is None


def test_graph_scores_extra_tokens_as_its_own_also_after_smoothing() -> None:
    """The head is the embedding's own rows, so the bridge is the identity and every token has a known answer."""
    draft = Draft.from_target(tiny_model("llama"), (0, 1), np.arange(0, VOCAB_SIZE, 2)).eval()
    draft.head.weight.data.copy_(draft.decoder.embed_tokens.weight[draft.vocabulary])
    weights = draft.weights(VOCAB_SIZE // 2)
    weights = replace(weights, bridge=np.eye(weights.shape.hidden_size, dtype=np.float32))
    texts = np.random.default_rng(1).integers(0, VOCAB_SIZE, (2, 16))
    for each in (weights, smooth(weights, *measure_peaks(draft, texts))):
        runner = GraphRunner(GraphBuilder(each, 32, 32).build().SerializeToString(), 32)
        assert runner.takes_extra
        runner.append(texts[0])
        candidates, _ = runner.forward(
            np.array([3, 8]), np.array([16, 17]), np.ones((2, 34), np.bool_), np.arange(2), np.array([4, 10, 4, 3])
        )
        assert candidates.extra.shape == (2, 4)
        for row in range(2):
            known = dict(zip(candidates.ids[row].tolist(), candidates.logprobs[row].tolist(), strict=True))
            expected = np.array([known[token] + EXTRA_OFFSET for token in (4, 10, 4)])
            np.testing.assert_allclose(candidates.extra[row, :3], expected, atol=1e-4)
        assert np.isfinite(candidates.extra[:, 3]).all()


def test_graph_answers_no_extra_tokens_when_none_are_asked_for() -> None:
    draft = Draft.from_target(tiny_model("llama"), (0, 1), np.arange(0, VOCAB_SIZE, 2)).eval()
    weights = replace(draft.weights(8), bridge=np.eye(draft.config.hidden_size, dtype=np.float32))
    runner = GraphRunner(GraphBuilder(weights, 8, 8).build().SerializeToString(), 32)
    assert runner.append(np.arange(5)).extra.shape == (5, 0)

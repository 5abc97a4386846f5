"""The ONNX graph against torch: every family, tree masks, every length of the past."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.models.draft import FAMILIES, Draft, check_family, evenly_outer_layers
from paceline.models.graph import GraphBuilder
from paceline.models.runtime import GraphRunner
from paceline.models.tiny import VOCAB_SIZE, tiny_config, tiny_model
from paceline.shared.errors import ModelError

TREE_PARENTS = (-1, 0, 0, 1, 2, -1)
CAPACITY = 48


def make_draft(family: str, layer_ids: tuple[int, ...] = (0, 1, 3)) -> Draft:
    return Draft.from_target(tiny_model(family), layer_ids, np.arange(0, VOCAB_SIZE, 2)).eval()


def tree_ancestors(parents: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def torch_logprobs(draft: Draft, text: np.ndarray, tree: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
    """The slow obvious way: text and tree in one pass under a full mask."""
    past, num = len(text), len(tree)
    visible = np.zeros((past + num, past + num), bool)
    visible[:past, :past] = np.tril(np.ones((past, past), bool))
    visible[past:, :past] = True
    visible[past:, past:] = ancestors
    positions = np.concatenate([np.arange(past), past + ancestors.sum(1) - 1])
    mask = torch.zeros(visible.shape).masked_fill_(~torch.from_numpy(visible), -1e9)[None, None]
    ids = torch.from_numpy(np.concatenate([text, tree]))[None]
    with torch.inference_mode():
        logits = draft(ids, torch.from_numpy(positions)[None], mask)[0, past:]
    return torch.log_softmax(logits, dim=-1).numpy()


def run_tree(runner: GraphRunner, tree: np.ndarray, ancestors: np.ndarray):
    visible = np.zeros((len(tree), CAPACITY + len(tree)), bool)
    visible[:, : runner.len] = True
    visible[:, CAPACITY:] = ancestors
    positions = runner.len + ancestors.sum(1) - 1
    return runner.forward(tree, positions, visible, np.arange(len(tree)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("past", [0, 1, 17])
def test_graph_scores_a_tree_as_torch_does(family: str, past: int) -> None:
    draft = make_draft(family)
    rng = np.random.default_rng(past)
    text, tree = rng.integers(0, VOCAB_SIZE, past), rng.integers(0, VOCAB_SIZE, len(TREE_PARENTS))
    ancestors = tree_ancestors(TREE_PARENTS)
    runner = GraphRunner(GraphBuilder(draft.weights(), 32, 32).build().SerializeToString(), CAPACITY)
    if past:
        runner.append(text)
    candidates, _ = run_tree(runner, tree, ancestors)
    expected = torch_logprobs(draft, text, tree, ancestors)
    rows = candidates.ids // 2
    np.testing.assert_allclose(candidates.logprobs, np.take_along_axis(expected, rows, axis=1), atol=1e-4)
    assert (rows[:, 0] == expected.argmax(axis=1)).all()
    assert (np.diff(candidates.logprobs, axis=1) <= 0).all()
    assert candidates.ids.dtype == np.int32


def test_graph_takes_a_past_buffer_without_slots() -> None:
    draft = make_draft("llama")
    runner = GraphRunner(GraphBuilder(draft.weights(), 32, 32).build().SerializeToString(), capacity=0)
    tree, ancestors = np.arange(len(TREE_PARENTS)), tree_ancestors(TREE_PARENTS)
    candidates, _ = runner.forward(tree, ancestors.sum(1) - 1, ancestors, np.arange(len(tree)))
    expected = torch_logprobs(draft, np.zeros(0, np.int64), tree, ancestors)
    np.testing.assert_allclose(candidates.logprobs[:, 0], expected.max(axis=1), atol=1e-4)


def test_cropped_text_equals_a_fresh_prefill() -> None:
    model = GraphBuilder(make_draft("qwen3").weights(), 32, 32).build().SerializeToString()
    text = np.random.default_rng(1).integers(0, VOCAB_SIZE, 20)
    kept, fresh = GraphRunner(model, CAPACITY), GraphRunner(model, CAPACITY)
    kept.append(text)
    kept.crop(7)
    fresh.append(text[:7])
    after, expected = kept.append(text[7:9]), fresh.append(text[7:9])
    np.testing.assert_allclose(after.logprobs, expected.logprobs, atol=1e-4)
    assert (after.ids == expected.ids).all()


def test_accepted_path_can_be_moved_into_the_text() -> None:
    draft = make_draft("llama")
    runner = GraphRunner(GraphBuilder(draft.weights(), 32, 32).build().SerializeToString(), CAPACITY)
    rng = np.random.default_rng(5)
    text, tree = rng.integers(0, VOCAB_SIZE, 9), rng.integers(0, VOCAB_SIZE, len(TREE_PARENTS))
    runner.append(text)
    _, new_kv = run_tree(runner, tree, tree_ancestors(TREE_PARENTS))
    path = [0, 2, 4]
    runner.kv[:, :, :, 9:12] = new_kv[:, :, :, path]
    runner.len = 12
    moved = runner.append(np.array([3]))
    runner.crop(0)
    whole = runner.append(np.array([*text, *tree[path], 3]))
    np.testing.assert_allclose(moved.logprobs[0], whole.logprobs[-1], atol=1e-4)


def test_rows_pick_which_nodes_get_candidates() -> None:
    model = GraphBuilder(make_draft("mistral").weights(), 32, 32).build().SerializeToString()
    every, last = GraphRunner(model, CAPACITY), GraphRunner(model, CAPACITY)
    text = np.arange(12)
    np.testing.assert_allclose(every.append(text).logprobs[-1:], last.append(text, want_all=False).logprobs, atol=1e-5)


def test_an_outlier_row_leaves_other_rows_of_an_int8_call_alone() -> None:
    draft = make_draft("llama")
    with torch.no_grad():
        draft.decoder.embed_tokens.weight[5] *= 200
    model = GraphBuilder(draft.weights(), 8, 8).build().SerializeToString()
    together, apart = GraphRunner(model, CAPACITY), GraphRunner(model, CAPACITY)
    text = np.array([5, 9, 14, 20, 3])
    one_call = together.append(text).logprobs
    calls = np.concatenate([apart.append(text[at : at + 1]).logprobs for at in range(len(text))])
    np.testing.assert_allclose(one_call, calls, atol=0.05)


def test_outermost_layers_are_kept_by_default() -> None:
    assert evenly_outer_layers(30, 6) == (0, 1, 2, 27, 28, 29)
    assert evenly_outer_layers(4, 9) == (0, 1, 2, 3)


def test_unknown_family_and_layers_are_refused_by_name() -> None:
    from transformers import GPT2Config

    with pytest.raises(ModelError, match="gpt2"):
        check_family(GPT2Config())
    with pytest.raises(ModelError, match="gelu"):
        check_family(tiny_config("llama", hidden_act="gelu"))
    with pytest.raises(ModelError, match="0 to 3"):
        make_draft("llama", (0, 4))

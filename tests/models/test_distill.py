"""Packing, the loss, training that resumes, storing what training added, and replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.conversation import KIND_SAMPLED, CorpusSettings
from paceline.models.corpus import RoundWriter, write_corpus
from paceline.models.delta import load_delta, save_delta
from paceline.models.distill import Distiller, DistillSettings, distillation_losses, learning_rate, measure
from paceline.models.draft import Draft
from paceline.models.pipeline import load_target
from paceline.models.samples import Corpus, Packer, rank_vocabulary
from paceline.shared.errors import ModelError

TEXT = CorpusSettings(
    seed=1, num_rows=8, num_slots=100, top_k=96, max_user_len=12, max_long_user_len=16, max_answer_len=20, min_room=40
)
TRAINING = DistillSettings(
    seed=2, num_steps=8, batch_rows=2, micro_rows=1, row_len=128, learning_rate=3e-3, warmup_steps=2, checkpoint_s=1e9
)


@pytest.fixture(scope="module")
def target(make_target: Callable[[str], Path]):
    return load_target(make_target("llama"), torch.device("cpu"))


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    list(write_corpus(folder, RoundWriter(*target, TEXT), 1200))
    target[0].set_attn_implementation("sdpa")
    return Corpus.load(folder)


@pytest.fixture
def draft_and_packer(target, corpus: Corpus) -> tuple[Draft, Packer]:
    rows = target[0].get_input_embeddings().weight.shape[0]
    vocabulary = rank_vocabulary(corpus, rows, 120)
    return Draft.from_target(target[0], (0, 3), vocabulary), Packer(corpus, vocabulary, rows, 128, user_weight=0.3)


def test_vocabulary_keeps_what_the_target_writes_most(corpus: Corpus) -> None:
    kept = rank_vocabulary(corpus, 264, 50, special_ids=[257])
    mass = np.bincount(corpus.top_ids.ravel(), np.exp(corpus.top_logprobs.astype(np.float32)).ravel(), 264)
    assert 257 in kept and (np.diff(kept) > 0).all()
    assert mass[kept].sum() > 50 / 264 * mass.sum()
    assert rank_vocabulary(corpus, 264, 1000).tolist() == list(range(264))


def test_packed_documents_score_as_when_they_stand_alone(draft_and_packer: tuple[Draft, Packer]) -> None:
    draft, packer = draft_and_packer
    corpus = packer.corpus
    row = max(packer.rows(list(range(corpus.num_documents))), key=len)
    assert len(row) >= 2
    batch = packer.batch([row])
    with torch.inference_mode():
        packed = draft(batch.ids, batch.positions, batch.mask)[0]
        at = len(corpus.prefix)
        for document in row:
            tokens = corpus.tokens[corpus.span(document)].tolist()[: packer.row_len - at]
            alone = draft(torch.tensor([[*corpus.prefix, *tokens]]))[0, len(corpus.prefix) :]
            torch.testing.assert_close(packed[at : at + len(tokens)], alone, atol=1e-4, rtol=1e-4)
            at += len(tokens)


def test_epochs_hold_every_training_document_once(draft_and_packer: tuple[Draft, Packer]) -> None:
    packer = draft_and_packer[1]
    for epoch in (0, 1):
        documents = [document for row in packer.epoch(7, epoch) for document in row]
        assert sorted(documents) == packer.corpus.documents(held_out=False)
    assert packer.epoch(7, 0) != packer.epoch(7, 1)
    assert packer.epoch(7, 0) == packer.epoch(7, 0)


def test_loss_is_least_at_the_targets_own_distribution(draft_and_packer: tuple[Draft, Packer]) -> None:
    batch = draft_and_packer[1].batch([[0]])
    batch = replace(batch, tails=torch.full_like(batch.tails, -1))
    num = len(batch.at)
    probs = torch.zeros(num, 120).scatter_add_(1, batch.labels, batch.masses)
    unlabelled = probs == 0
    probs += unlabelled * batch.rest.clamp_min(1e-6)[:, None] / unlabelled.sum(1, keepdim=True)
    probs /= probs.sum(1, keepdim=True)
    best = distillation_losses(probs.log(), batch).mean()
    worse = distillation_losses((probs.log() * 0.7), batch).mean()
    flat = distillation_losses(torch.zeros(num, 120), batch).mean()
    assert best < worse < flat


def test_loss_over_the_targets_draws_averages_to_the_whole_cross_entropy(
    draft_and_packer: tuple[Draft, Packer],
) -> None:
    vocab, num_labels = 12, 4
    rng = np.random.default_rng(5)
    p = torch.from_numpy(rng.dirichlet(np.full(vocab, 0.5)).astype(np.float32))
    logits = torch.from_numpy(rng.normal(size=vocab).astype(np.float32))
    order = p.argsort(descending=True)
    labels, tail = order[:num_labels], order[num_labels:]
    template = draft_and_packer[1].batch([[0]])
    draws = torch.cat([torch.tensor([-1]), tail])
    batch = replace(
        template,
        labels=labels.expand(len(draws), -1),
        masses=p[labels].expand(len(draws), -1),
        rest=(1 - p[labels].sum()).expand(len(draws)),
        tails=draws,
    )
    losses = distillation_losses(logits.expand(len(draws), -1), batch)
    chances = torch.cat([p[labels].sum()[None], p[tail]])
    torch.testing.assert_close((chances * losses).sum(), -(p * torch.log_softmax(logits, -1)).sum())


def test_tails_are_the_sampled_tokens_that_no_label_holds(draft_and_packer: tuple[Draft, Packer]) -> None:
    packer = draft_and_packer[1]
    corpus = packer.corpus
    batch = packer.batch(packer.rows(list(range(corpus.num_documents))))
    source = batch.sources.numpy()
    held = (corpus.top_ids[source] == corpus.tokens[source][:, None]).any(axis=1)
    has_tail = batch.tails.numpy() >= 0
    assert has_tail.any() and not (has_tail & (held | (corpus.kinds[source] != KIND_SAMPLED))).any()
    vocabulary = draft_and_packer[0].vocabulary.numpy()
    assert (vocabulary[batch.tails.numpy()[has_tail]] == corpus.tokens[source][has_tail]).all()


def test_draft_goes_on_from_one_with_a_smaller_vocabulary(target, draft_and_packer: tuple[Draft, Packer]) -> None:
    earlier, packer = draft_and_packer
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.add_(0.01)
    larger = Draft.from_target(target[0], (0, 3), rank_vocabulary(packer.corpus, 264, 200))
    fresh = larger.head.weight.clone()
    larger.go_on_from(earlier)
    ids = packer.batch([[0]]).ids
    known = torch.isin(larger.vocabulary, earlier.vocabulary)
    assert known.sum() == 120 and torch.equal(larger.head.weight[~known], fresh[~known])
    with torch.no_grad():
        larger.decoder.embed_tokens.load_state_dict(earlier.decoder.embed_tokens.state_dict())
        torch.testing.assert_close(larger(ids)[..., known], earlier(ids))
    with pytest.raises(ModelError, match=r"draft of 1 layers .* got one of 2"):
        Draft.from_target(target[0], (0,), earlier.vocabulary.numpy()).go_on_from(earlier)


def test_training_lowers_the_loss(draft_and_packer: tuple[Draft, Packer], tmp_path: Path) -> None:
    draft, packer = draft_and_packer
    before, embedding = measure(draft, packer).loss, draft.decoder.embed_tokens.weight.clone()
    Distiller(draft, packer, replace(TRAINING, num_steps=20), tmp_path).run()
    assert measure(draft, packer).loss < before - 0.02
    assert torch.equal(draft.decoder.embed_tokens.weight, embedding)


def test_killed_training_ends_where_an_undisturbed_one_does(
    target, draft_and_packer: tuple[Draft, Packer], tmp_path: Path
) -> None:
    whole, packer = draft_and_packer
    vocabulary = whole.vocabulary.numpy()
    Distiller(whole, packer, TRAINING, tmp_path / "whole").run()
    for steps in (3, None):
        parts = Draft.from_target(target[0], (0, 3), vocabulary)
        Distiller(parts, packer, TRAINING, tmp_path / "parts").run(max_steps=steps)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, atol=1e-6, rtol=1e-5)


def test_rate_before_the_decay_does_not_depend_on_the_number_of_steps() -> None:
    short, long = replace(TRAINING, num_steps=100), replace(TRAINING, num_steps=200)
    rates = [learning_rate(short, step) for step in range(100)]
    assert rates[:70] == [learning_rate(long, step) for step in range(70)]
    assert rates[0] < rates[2] == TRAINING.learning_rate and rates[-1] < 0.1 * TRAINING.learning_rate


def test_stored_difference_rebuilds_the_trained_draft(
    target, draft_and_packer: tuple[Draft, Packer], tmp_path: Path
) -> None:
    trained, packer = draft_and_packer
    base = Draft.from_target(target[0], (0, 3), trained.vocabulary.numpy())
    Distiller(trained, packer, TRAINING, tmp_path / "train").run()
    files = save_delta(tmp_path / "weights", trained, base, 0.25, {"layer_ids": [0, 3]})
    rebuilt = load_delta(tmp_path / "weights", target[0])
    assert sum(path.stat().st_size for path in files) < 60_000
    assert torch.equal(rebuilt.vocabulary, trained.vocabulary)
    for name, value in trained.state_dict().items():
        if value.ndim != 2 or name.endswith("embed_tokens.weight"):
            continue
        added, error = value - base.state_dict()[name], rebuilt.state_dict()[name] - value
        assert error.norm() < 0.12 * added.norm()
    assert abs(measure(rebuilt, packer).loss - measure(trained, packer).loss) < 0.05


def test_recipe_without_difference_is_the_targets_own_layers(target, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"layer_ids": [0, 1], "vocab_size": 50}')
    draft = load_delta(tmp_path, target[0])
    assert draft.vocabulary.tolist() == list(range(50))
    with pytest.raises(ModelError, match=r"recipe\.json"):
        load_delta(tmp_path / "nowhere", target[0])

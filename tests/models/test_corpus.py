"""The target's own text: labels equal a teacher-forced pass, rounds repeat, killed runs go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.conversation import KIND_FORCED, KIND_GREEDY, KIND_SAMPLED, KIND_USER, CorpusSettings
from paceline.models.corpus import RoundWriter, choose, write_corpus
from paceline.models.pipeline import load_target
from paceline.models.samples import Corpus
from paceline.shared.errors import ModelError

SETTINGS = CorpusSettings(
    seed=5, num_rows=10, num_slots=120, top_k=16, max_user_len=12, max_long_user_len=16, max_answer_len=20, min_room=40
)


@pytest.fixture(scope="module")
def writer(make_target: Callable[[str], Path]) -> RoundWriter:
    return RoundWriter(*load_target(make_target("llama"), torch.device("cpu")), SETTINGS)


def test_labels_equal_a_teacher_forced_pass(writer: RoundWriter) -> None:
    arrays = writer.write(0)
    prefix, offsets = list(writer.frame.prefix), arrays["offsets"]
    assert len(offsets) - 1 > SETTINGS.num_rows
    for start, end in itertools.pairwise(offsets):
        tokens = arrays["tokens"][start:end].tolist()
        writer.model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = writer.model(torch.tensor([prefix + tokens])).logits[0, len(prefix) - 1 : -1]
        writer.model.set_attn_implementation("paceline_corpus")
        expected = torch.log_softmax(logits, dim=-1).numpy()
        got = arrays["top_logprobs"][start:end].astype(np.float32)
        np.testing.assert_allclose(got, np.take_along_axis(expected, arrays["top_ids"][start:end], axis=1), atol=2e-2)
        greedy = arrays["kinds"][start:end] == KIND_GREEDY
        assert (arrays["tokens"][start:end] == arrays["top_ids"][start:end, 0])[greedy].all()


def test_documents_alternate_between_user_and_answer(writer: RoundWriter) -> None:
    arrays = writer.write(1)
    assert set(np.unique(arrays["kinds"])) == {KIND_FORCED, KIND_USER, KIND_GREEDY, KIND_SAMPLED}
    head = list(writer.frame.answer_head)
    for start, end in itertools.pairwise(arrays["offsets"]):
        answers = np.flatnonzero(arrays["kinds"][start:end] >= KIND_GREEDY)
        if len(answers):
            at = start + answers[0]
            assert arrays["tokens"][at - len(head) : at].tolist() == head


def test_rounds_repeat_and_differ(writer: RoundWriter) -> None:
    first, again, other = writer.write(2), writer.write(2), writer.write(3)
    assert all((first[name] == again[name]).all() for name in first)
    assert first["tokens"].tolist() != other["tokens"].tolist()


def test_killed_run_goes_on_with_the_missing_round(writer: RoundWriter, tmp_path: Path) -> None:
    paths = list(write_corpus(tmp_path, writer, 2000))
    assert len(paths) == 2
    kept, lost = paths[0].stat().st_mtime_ns, paths[1].read_bytes()
    paths[1].unlink()
    assert list(write_corpus(tmp_path, writer, 2000)) == paths
    assert paths[0].stat().st_mtime_ns == kept
    with np.load(paths[1]) as arrays:
        again = {name: arrays[name] for name in arrays.files}
    paths[1].write_bytes(lost)
    corpus = Corpus.load(tmp_path)
    assert corpus.num_documents == sum(len(np.load(path)["offsets"]) - 1 for path in paths)
    assert corpus.tokens[-len(again["tokens"]) :].tolist() == again["tokens"].tolist()


def test_other_settings_in_one_folder_are_refused(writer: RoundWriter, tmp_path: Path) -> None:
    next(write_corpus(tmp_path, writer, 10))
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(ModelError, match="other settings"):
        next(write_corpus(tmp_path, writer, 10))


def test_choices_follow_the_distribution() -> None:
    """Chi-square at a fixed seed: sampled rows over the whole vocabulary, user rows over the nucleus only."""
    logprobs = torch.log_softmax(torch.linspace(0, 3, 12), dim=0)
    num = 6000
    rng = np.random.default_rng(0)
    rows = logprobs.expand(num, -1)
    values, ids = rows.topk(6)
    for kind, support in ((KIND_SAMPLED, 12), (KIND_USER, 5), (KIND_GREEDY, 1)):
        picked = choose(rows, values, ids, np.full(num, kind), rng.random(num), nucleus=0.7)
        counts = np.bincount(picked, minlength=12)
        probs = logprobs.exp().numpy().astype(np.float64)
        probs[: 12 - support] = 0
        probs /= probs.sum()
        inside = probs > 0
        assert counts[~inside].sum() == 0
        statistic = ((counts[inside] - num * probs[inside]) ** 2 / (num * probs[inside])).sum()
        assert statistic < 35

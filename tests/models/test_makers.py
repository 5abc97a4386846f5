"""The commands around a finished run, on a tiny Llama: pack, boost, export, eval; and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models.adopt import adopt_draft
from paceline.models.boost import BoostSettings, emphasis_of, find_covered, run_boost, share_covered
from paceline.models.build import makers_hash, weights_hash
from paceline.models.conversation import CorpusSettings
from paceline.models.delta import load_delta
from paceline.models.distill import DistillSettings, measure
from paceline.models.draft import Draft
from paceline.models.manifest import verify_bundle
from paceline.models.pack import MAX_LOSS_ADDED, PackSettings, pack
from paceline.models.pipeline import PipelineSettings, load_target, run_pipeline
from paceline.models.runtime import GraphRunner
from paceline.models.samples import Corpus, Packer
from paceline.models.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from paceline.shared.cli import main
from paceline.shared.errors import ModelError

CPU = torch.device("cpu")
SETTINGS = PipelineSettings(
    num_tokens=800,
    layer_ids=(0, 3),
    vocab_size=128,
    corpus=CorpusSettings(seed=3, num_rows=8, num_slots=100, top_k=8),
    training=DistillSettings(seed=3, num_steps=6, batch_rows=2, micro_rows=2, row_len=128),
)


@pytest.fixture(scope="module")
def llama(make_target: Callable[[str], Path]) -> Path:
    return make_target("llama")


@pytest.fixture(scope="module")
def work(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished `distill`. Tests that write into it take a copy."""
    folder = tmp_path_factory.mktemp("work")
    run_pipeline(llama, folder, SETTINGS, CPU)
    return folder


def packer_of(work: Path, draft: Draft) -> Packer:
    rows = draft.decoder.embed_tokens.weight.shape[0]
    return Packer(Corpus.load(work / "corpus"), draft.vocabulary.numpy(), rows, 128, 0.3)


def test_packed_draft_is_the_trained_one_but_for_rounding(llama: Path, work: Path, tmp_path: Path) -> None:
    made = pack(llama, work, tmp_path / "weights", PackSettings(step=0.3))
    assert made.num_bytes == sum(path.stat().st_size for path in (tmp_path / "weights").iterdir())
    assert abs(made.after.loss - made.before.loss) <= MAX_LOSS_ADDED
    target, _ = load_target(llama, CPU)
    rebuilt, trained = load_delta(tmp_path / "weights", target), Draft.load(work / "draft")
    added = trained.head.weight - Draft.from_target(target, (0, 3), trained.vocabulary.numpy()).head.weight
    assert (rebuilt.head.weight - trained.head.weight).norm() < 0.15 * added.norm()
    recipe = json.loads((tmp_path / "weights" / "recipe.json").read_text())
    assert recipe["trained_tokens"] > 0 and recipe["settings"]["training"]["seed"] == 3 and recipe["history"]


def test_rounding_that_costs_too_much_is_refused(llama: Path, work: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pack with a smaller --step"):
        pack(llama, work, tmp_path / "weights", PackSettings(step=1.0, max_loss_added=-10.0))


def test_unfinished_run_is_packed_only_on_request(
    llama: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "work"
    shutil.copytree(work, copy)
    shutil.rmtree(copy / "draft")
    command = ["models", "pack", str(llama), "--work-dir", str(copy), "--out", str(tmp_path / "out"), "--threads", "1"]
    assert main(command) == 2
    assert "--from-checkpoint" in capsys.readouterr().err
    assert main([*command, "--from-checkpoint"]) == 0
    out = capsys.readouterr().out
    assert "bits a weight" in out and "before" in out


def test_hashes_notice_changed_weights(llama: Path, work: Path, tmp_path: Path) -> None:
    pack(llama, work, tmp_path / "weights", PackSettings(step=0.5))
    first = weights_hash(tmp_path / "weights")
    pack(llama, work, tmp_path / "weights", PackSettings(step=0.4))
    assert weights_hash(tmp_path / "weights") != first
    assert len(makers_hash()) == 64


def test_boosted_draft_is_weighted_towards_failures_and_covers_more(llama: Path, work: Path, tmp_path: Path) -> None:
    copy = tmp_path / "work"
    shutil.copytree(work, copy)
    steps: list[int] = []
    drafts = run_boost(
        llama, copy, BoostSettings(num_drafts=2, num_steps=4), CPU, on_step=lambda done, loss: steps.append(done)
    )
    assert list(drafts) == ["ssm-0", "ssm-1"] and steps == [1, 2, 3, 4]
    alone, both = drafts["ssm-1"].provenance["coverage"]
    assert 0 <= alone <= both <= 1
    first, second = drafts["ssm-0"].draft, drafts["ssm-1"].draft
    assert torch.equal(first.head.weight, Draft.load(copy / "draft").head.weight)
    assert not torch.equal(first.head.weight, second.head.weight)
    again = run_boost(llama, copy, BoostSettings(num_drafts=2, num_steps=4), CPU)
    assert torch.equal(again["ssm-1"].draft.head.weight, second.head.weight)


def test_emphasis_falls_where_a_draft_is_right_and_spares_what_is_held_out(work: Path) -> None:
    draft = Draft.load(work / "draft")
    packer = packer_of(work, draft)
    covered = find_covered(draft, packer, top=3)
    corpus = packer.corpus
    weights = emphasis_of(covered, corpus, keep=0.25)
    for document in range(corpus.num_documents):
        span = corpus.span(document)
        expected = 1.0 if corpus.is_held_out(document) else np.where(covered[span], 0.25, 1.0)
        assert (weights[span] == expected).all()
    assert covered.any() and not covered.all()
    narrow = share_covered(find_covered(draft, packer, top=1), packer)
    assert narrow == pytest.approx(measure(draft, packer, max_rows=1 << 20).top1)
    assert narrow <= share_covered(covered, packer)


def test_whole_model_is_exported_as_a_draft_of_its_target(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    tiny_model("qwen3", 5, num_hidden_layers=1).save_pretrained(small)
    tiny_tokenizer().save_pretrained(small)
    command = ["models", "export", str(small), "--target", str(llama), "--out", str(tmp_path / "bundle")]
    assert main([*command, "--min-agreement", "0.3", "--threads", "1"]) == 0
    manifest = verify_bundle(tmp_path / "bundle")
    assert manifest.drafters[0].vocab_size == VOCAB_SIZE, "padded rows of the head are no candidates"
    runner = GraphRunner(tmp_path / "bundle" / "ssm-0.onnx", 32)
    assert runner.append(np.arange(20)).ids.max() < VOCAB_SIZE
    assert "agrees with fp32" in capsys.readouterr().out


def test_padding_of_an_embedding_does_not_matter(llama: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    tiny_model("llama", 6, vocab_size=VOCAB_SIZE + 62).save_pretrained(wide)
    tiny_tokenizer().save_pretrained(wide)
    assert adopt_draft(wide, llama).draft.vocabulary.tolist() == list(range(VOCAB_SIZE))


def test_other_tokenizer_is_refused_with_both_names(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model("llama", 7).save_pretrained(other)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=f"{llama.name}.*other"):
        adopt_draft(other, llama)


def test_folder_without_a_model_is_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "export", str(tmp_path), "--target", str(llama)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_ensemble_of_what_is_none_is_refused(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    for words, said in (
        ([str(bundle), "--work-dir", str(work)], "manifest.json"),
        ([str(bundle), "--work-dir", str(work), "--nodes", "0"], "--nodes"),
    ):
        assert main(["models", "ensemble", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1
    with pytest.raises(ModelError, match="holds no text"):
        Corpus.load(tmp_path / "corpus")


@pytest.mark.parametrize(
    "words", [("--layers", "0,1,77"), ("--layers", "0"), ("--bits", "5"), ("--learning-rate", "-1"), ("--seed", "-1")]
)
def test_mistake_of_distill_is_found_before_any_text_is_written(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    assert main(["models", "distill", str(llama), "--work-dir", str(tmp_path / "work"), *words]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_mistake_stands_alone_without_bars(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, nowhere = str(tmp_path / "work"), str(tmp_path / "nowhere")
    for words, code, said in (
        (["distill", str(llama), "--work-dir", work, "--start-from", nowhere], 2, "holds no finished draft"),
        (["boost", str(llama), "--work-dir", nowhere], 2, "holds no finished draft"),
        (["eval", str(llama), "--prompts", nowhere], 2, "unknown draft bundle"),
        (["eval", str(llama), "--plot", "picture.nosuch"], 2, ".png"),
        (["eval", str(llama), "--json", str(tmp_path)], 2, "expected a writable file"),
        (["pull", "not a url"], 2, "expected a server URL"),
        (["pull", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ):
        assert main(["models", *words]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["build", "list", "distill", "boost", "export", "pack", "pull", "eval", "ensemble"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", command, "--help"]) == 0
    assert f"paceline models {command}" in capsys.readouterr().out.split("Example")[-1]


def test_pair_is_evaluated_greedily_and_sampled(
    llama: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, figures = tmp_path / "bundle", tmp_path / "figures.json"
    command = ["models", "export", str(work / "draft"), "--target", str(llama), "--out", str(bundle)]
    assert main([*command, "--min-agreement", "0", "--threads", "1"]) == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"category": "a", "turns": ["hello there", "and then"]}\n{"category": "b", "prompt": "one two one two"}\n'
        '{"category": "a", "turns": ["' + "x" * 200 + '"]}\n'
    )
    command = ["models", "eval", str(llama), "--draft", str(bundle), "--prompts", str(prompts), "--nodes", "8"]
    assert main([*command, "--max-tokens", "12", "--max-prompt", "100", "--alone", "--json", str(figures)]) == 0
    made = json.loads(figures.read_text())
    for mode in ("greedy", "sampled"):
        assert set(made[mode]["by_category"]) == {"a", "b"}
        assert 1 <= made[mode]["tokens_per_step"] <= 9
        assert 0 <= made[mode]["top1"] <= made[mode]["top5"] <= 1
        mean = np.mean([category["tokens_per_step"] for category in made[mode]["by_category"].values()])
        assert made[mode]["tokens_per_step"] == pytest.approx(mean, abs=1e-3)
    assert made["draft_ms"]["nodes"] == 8 and made["draft_ms"]["median"] > 0
    assert set(made["drafters"]) == {"ngram", "ssm-0"}
    assert sum(share["share_of_accepted"] for share in made["drafters"].values()) == pytest.approx(1, abs=0.01)
    assert made["drafters"]["ngram"]["alone"]["greedy"] >= 1
    assert "tokens" in capsys.readouterr().out
    assert main([*command, "--max-prompt", "2"]) == 2
    assert "--max-prompt" in capsys.readouterr().err

"""A target and a draft whose embeddings are padded, differently, beyond their one tokenizer (U032)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.bench.lockstep import LockstepSettings, run_lockstep, welcome_of
from paceline.client.drafting.choice import model_drafters, named_bundle
from paceline.client.drafting.drafter import Candidates, DraftRequest, DraftSequence
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.session import Task
from paceline.models.adopt import adopt_draft
from paceline.models.export import ExportSettings, export_bundle
from paceline.models.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from paceline.server.engine import Engine, EngineSettings
from paceline.server.loading import load_target
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams

PROMPTS = [np.array([5, 6, 7, 8] * 5, np.int32), np.array([40, 7, 9, 200], np.int32)]


def save_padded(folder: Path, num_rows: int) -> Path:
    """A tiny model with that many rows, whose padded ones would win every argmax."""
    model = tiny_model("llama", vocab_size=num_rows, tie_word_embeddings=False)
    real = model.lm_head.weight[:VOCAB_SIZE].detach()
    with torch.no_grad():
        model.lm_head.weight[VOCAB_SIZE:] = 20 * torch.cat([real, -real])[: num_rows - VOCAB_SIZE]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class WatchedSequence:
    def __init__(self, drafter: WatchedDrafter) -> None:
        self.drafter, self.inner = drafter, drafter.onnx.start()

    def expand(self, request: DraftRequest) -> Candidates:
        answer = self.inner.expand(request)
        self.drafter.proposed.update(answer.token_ids.ravel().tolist())
        return answer

    def close(self) -> None:
        self.inner.close()


class WatchedDrafter:
    """Keeps every id that the draft proposed."""

    is_instant = False

    def __init__(self, onnx: OnnxDrafter) -> None:
        self.onnx, self.proposed = onnx, set[int]()
        self.name, self.max_context, self.chunk_len = onnx.name, onnx.max_context, onnx.chunk_len

    def start(self) -> DraftSequence:
        return WatchedSequence(self)

    def close(self) -> None:
        self.onnx.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_padded(tmp_path_factory.mktemp("models") / "target", 264)
    return load_target(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def bundle(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of more rows than the target, exported like any model of the same tokenizer."""
    folder = tmp_path_factory.mktemp("drafts")
    draft = save_padded(folder / "draft", 320)
    models = Path(target.info.name) if Path(target.info.name).is_dir() else save_padded(folder / "target", 264)
    made = adopt_draft(draft, models)
    settings = ExportSettings(bits=8, head_bits=8, min_agreement=0.0)
    export_bundle(
        {"ssm-0": made.draft},
        models,
        folder / "bundle",
        name="target",
        settings=settings,
        provenance={"ssm-0": dict(made.provenance)},
        licence="none",
        texts=None,
    )
    return folder / "bundle"


def write(target: Target, drafters: Sequence[WatchedDrafter], sampling: SamplingParams) -> list[list[int]]:
    target.pool.clear_cache()
    engine = Engine(target, EngineSettings())
    tasks = [Task(prompt, sampling, sampling.default_verifier(), patience_s=0.0) for prompt in PROMPTS]
    answers = run_lockstep(engine, welcome_of(engine), tasks, list(drafters), LockstepSettings(2, 1))
    if drafters:
        assert sum(answer.stats.drafted for answer in answers) > 0
    return [answer.token_ids.tolist() for answer in answers]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_neither_drafted_nor_sampled(target: Target, bundle: Path, temperature: float) -> None:
    engine = Engine(target, EngineSettings())
    found = model_drafters(named_bundle(str(bundle)), welcome_of(engine), 1)
    drafters = [WatchedDrafter(drafter) for drafter in found if isinstance(drafter, OnnxDrafter)]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, seed=3)
    plain = write(target, [], sampling)
    assert write(target, drafters, sampling) == plain
    assert target.info.vocab_size == VOCAB_SIZE
    assert min(map(min, plain)) >= 0 and max(map(max, plain)) < VOCAB_SIZE
    assert drafters[0].proposed and max(drafters[0].proposed) < VOCAB_SIZE

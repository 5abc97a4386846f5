"""Walking recorded text must count what the real target and sessions count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.bench.budget_policy import BudgetPolicy, TreeBudget
from paceline.bench.lockstep import LockstepSettings, run_lockstep, welcome_of
from paceline.bench.walk import MERGED, Shape, Written, compare, shapes, walk_texts
from paceline.bench.walk_plot import save
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.session import Task
from paceline.models.draft import Draft
from paceline.models.graph import GraphBuilder
from paceline.models.tiny import tiny_model
from paceline.server.engine import Engine, EngineSettings
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams

BUDGET = TreeBudget(num_nodes=12, num_levels=3, width=3)
PROMPT = np.array([40, 7, 9, 200], np.int32)
MODES = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5),
}


@pytest.fixture(scope="module")
def engine(target: Target) -> Engine:
    return Engine(target, EngineSettings(max_running=1))


@pytest.fixture(scope="module")
def drafters() -> list[NGramDrafter | OnnxDrafter]:
    """Prompt lookup, and half of the target's layers over half of its vocabulary."""
    torch.manual_seed(0)
    draft = Draft.from_target(tiny_model("llama"), (0, 3), np.arange(0, 250, 2)).eval()
    model = GraphBuilder(draft.weights(64), 32, 32).build().SerializeToString()
    return [NGramDrafter(), OnnxDrafter(model, threads=1)]


@pytest.mark.parametrize("mode", list(MODES))
def test_walk_takes_the_steps_that_the_target_takes(engine: Engine, drafters: list, mode: str) -> None:
    sampling, acceptance = MODES[mode], Acceptance()
    task = Task(PROMPT, sampling, sampling.default_verifier(), patience_s=0.0)
    lockstep = LockstepSettings(1, 0, 64, lambda: BudgetPolicy(BUDGET, 1), can_switch=False, acceptance=acceptance)
    (answer,) = run_lockstep(engine, welcome_of(engine), [task], drafters, lockstep)
    shape = Shape("dynamic 12", lambda main: BudgetPolicy(BUDGET, main))
    walk = walk_texts(welcome_of(engine), [Written(PROMPT, answer.token_ids, sampling)], drafters, shape)
    assert walk.tokens_per_step == pytest.approx(len(answer.token_ids) / answer.stats.verify_steps)
    assert walk.draft_ms > 0


def test_every_shape_is_compared_for_each_drafter_and_all_merged(
    engine: Engine, drafters: list, tmp_path: Path
) -> None:
    text = np.array([5, 6, 5, 6, 5, 6, 5, 6, 5, 6], np.int32)
    modes = {name: [Written(PROMPT, text, sampling)] for name, sampling in MODES.items()}
    done: list[tuple[int, int]] = []
    rows = compare(welcome_of(engine), modes, drafters, lambda at, of: done.append((at, of)))
    expected = [(name, shape.name) for name in ("ngram", "ssm", MERGED) for shape in shapes()]
    assert [(row["drafters"], row["tree"]) for row in rows] == expected
    assert done[-1] == (len(expected), len(expected))
    assert all(row["greedy"] >= 1 and row["sampled"] >= 1 for row in rows)
    save(rows, list(modes), tmp_path / "trees.png")
    assert (tmp_path / "trees.png").stat().st_size > 1000


def test_no_text_is_refused(engine: Engine, drafters: list) -> None:
    with pytest.raises(ValueError, match="at least one text"):
        walk_texts(welcome_of(engine), [], drafters, shapes()[0])

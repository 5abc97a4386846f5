"""Evaluation of a pair against what must come out: a draft that is the target itself, and the target alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.bench.budget_policy import BudgetPolicy, TreeBudget
from paceline.bench.coverage import Coverage, CoverageMeter
from paceline.bench.draft_time import time_drafts
from paceline.bench.evaluate_report import as_lines
from paceline.bench.lockstep import NO_DRAFTER, LockstepSettings, run_lockstep, welcome_of
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.drafting.wrong import WrongDrafter
from paceline.client.session import Task
from paceline.models.draft import Draft
from paceline.models.graph import GraphBuilder
from paceline.models.tiny import VOCAB_SIZE, tiny_model
from paceline.server.engine import Engine, EngineSettings
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams

NUM_TOKENS = 20
PROMPTS = [np.array(ids, np.int32) for ids in ([1, 2, 3], [40, 7, 9, 200])]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def graph() -> bytes:
    """The target itself as a draft, with every token a candidate."""
    torch.manual_seed(0)
    draft = Draft.from_target(tiny_model("llama"), (0, 1, 2, 3), np.arange(VOCAB_SIZE)).eval()
    return GraphBuilder(draft.weights(VOCAB_SIZE), 32, 32).build().SerializeToString()


def complete(target: Target, drafters: list[Drafter], sampling: SamplingParams, budget: TreeBudget):
    engine = Engine(target, EngineSettings(max_running=2))
    tasks = [Task(prompt, sampling, sampling.default_verifier(), patience_s=0.0) for prompt in PROMPTS]
    settings = LockstepSettings(2, 0, 64, lambda: BudgetPolicy(budget, len(drafters) - 1), can_switch=False)
    return run_lockstep(engine, welcome_of(engine), tasks, drafters, settings)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_budget_holds_and_the_text_is_the_targets_own(target: Target, graph: bytes, sampling: SamplingParams) -> None:
    alone = complete(target, [], sampling, TreeBudget())
    ssm = OnnxDrafter(graph, threads=1)
    for drafters in ([WrongDrafter(VOCAB_SIZE)], [NGramDrafter(), ssm]):
        answers = complete(target, drafters, sampling, TreeBudget(num_nodes=6, num_levels=3, width=2))
        for answer, plain in zip(answers, alone, strict=True):
            np.testing.assert_array_equal(answer.token_ids, plain.token_ids)
            assert answer.stats.scored <= 6 * answer.stats.verify_steps
            np.testing.assert_array_equal(answer.proposers != NO_DRAFTER, answer.drafted)
            assert set(answer.proposers.tolist()) <= {NO_DRAFTER, *range(len(drafters))}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_guesses_of_the_target_itself_are_always_right(target: Target, graph: bytes, sampling: SamplingParams) -> None:
    # Flat random distributions: calibration may reorder siblings, so all sixteen go.
    single = TreeBudget(num_nodes=16, num_levels=1, width=1)
    for answer in complete(target, [OnnxDrafter(graph, threads=1)], GREEDY, single):
        assert answer.stats.verify_steps == answer.stats.accepted == NUM_TOKENS // 2


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_draft_that_is_the_target_covers_every_position(target: Target, graph: bytes, sampling: SamplingParams) -> None:
    meter = CoverageMeter(graph, VOCAB_SIZE)
    answers = complete(target, [], sampling, TreeBudget())
    total = sum(
        (meter.measure(prompt, answer.token_ids, sampling) for prompt, answer in zip(PROMPTS, answers, strict=True)),
        Coverage(),
    )
    assert total.num_positions == 2 * NUM_TOKENS
    assert total.top1 == total.top5 == 1
    shifted = meter.measure(PROMPTS[0], (answers[0].token_ids + 1) % VOCAB_SIZE, sampling)
    assert shifted.top1 < 0.5


def test_trees_are_timed_whole(target: Target, graph: bytes) -> None:
    welcome = welcome_of(Engine(target, EngineSettings()))
    text = np.random.default_rng(0).integers(0, VOCAB_SIZE, 540).astype(np.int32)
    budget = TreeBudget(num_nodes=7, num_levels=2, width=3)
    ssm = OnnxDrafter(graph, threads=1, max_context=1024)
    timing = time_drafts(welcome, [ssm], lambda: BudgetPolicy(budget, 0), text, num_trees=4)
    assert timing.mean_nodes == 7 and timing.median_ms > 0 and timing.cpu_median_ms > 0
    with pytest.raises(ValueError, match="532"):
        time_drafts(welcome, [ssm], lambda: BudgetPolicy(budget, 0), text[:510])


def test_report_names_categories_and_drafters() -> None:
    figures = {"tokens_per_step": 2.5, "top1": 0.4, "top5": 0.7}
    lines = as_lines(
        {
            "greedy": {**figures, "by_category": {"qa": figures}},
            "sampled": {**figures, "by_category": {}},
            "draft_ms": {"nodes": 32, "median": 20.0, "cpu_median": 19.0, "context": 500},
            "drafters": {"ssm-0": {"share_of_accepted": 0.8, "alone": {"greedy": 2.0, "sampled": 1.5}}},
        }
    )
    assert any(line.startswith("qa ") and "2.50" in line for line in lines)
    assert lines[-1] == "ssm-0: proposed 80.0% of the accepted nodes first, alone greedy 2.00, sampled 1.50"

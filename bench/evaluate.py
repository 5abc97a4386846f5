"""What a pair is worth per step: tokens per step, coverage and draft time, greedy and at temperature 1.

Real target, real sessions, real drafters, in lockstep: every step scores one tree of at most N nodes, drafted behind
all that is committed. So the figures say how good the drafts are; what they gain on a link is the simulator's to say.
Overall figures are means over categories, so that no category counts more because it has more prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.budget_policy import BudgetPolicy, TreeBudget
from paceline.bench.coverage import Coverage, CoverageMeter
from paceline.bench.draft_time import CONTEXT_LEN, NUM_TREES, time_drafts
from paceline.bench.lockstep import NO_DRAFTER, ROUND_S, Answer, LockstepSettings, run_lockstep, welcome_of
from paceline.bench.prompts import SHIPPED, Prompt, load_prompts
from paceline.bench.recorder import prompt_ids
from paceline.bench.walk import STANDARD_NODES, Written, compare
from paceline.bench.whole_trees import WholeTreeEngine
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.session import Task
from paceline.models.catalogue import find_bundle, find_target
from paceline.models.manifest import Manifest, load_manifest
from paceline.server.engine import Engine, EngineSettings
from paceline.server.target import Target
from paceline.shared.errors import UsageError
from paceline.shared.messages import StepTime
from paceline.shared.sampling import SamplingParams

GREEDY, SAMPLED = "greedy", "sampled"
NO_CATEGORY = "all"
_FREE_ROWS = StepTime(ROUND_S, 0.0)
"""Steps of one length: generations that share them must not cut each other's trees."""
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """num_nodes, num_levels, width: the tree of every step, see ``TreeBudget``. every: take each k-th prompt.

    max_prompt_len: leave longer prompts out, in tokens. compares: measure other shapes of trees, and every drafter
    alone, along the same texts as well.
    """

    max_tokens: int = 64
    num_nodes: int = 32
    num_levels: int = 4
    width: int = 5
    every: int = 1
    max_prompt_len: int = 4096
    seed: int = 0
    compares: bool = False
    num_parallel: int = 4

    @property
    def budget(self) -> TreeBudget:
        """The tree of every step."""
        return TreeBudget(self.num_nodes, self.num_levels, self.width)


@dataclass(slots=True)
class _Tally:
    """Counts of one category."""

    tokens: int = 0
    steps: int = 0
    coverage: Coverage = field(default_factory=Coverage)

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_step": round(self.tokens / max(1, self.steps), 4),
            "top1": round(self.coverage.top1, 4),
            "top5": round(self.coverage.top5, 4),
            "tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One prompt."""

    ids: NDArray[np.int32]
    category: str


class Evaluation:
    """One pair under evaluation: the target is loaded once, every run goes through ``run``."""

    def __init__(self, target: Target, models: Sequence[Drafter], graph: bytes, settings: EvalSettings) -> None:
        """models: the bundle's draft models. graph: the first one's, for coverage."""
        self.target = target
        self.models = tuple(models)
        self.settings = settings
        self.meter = CoverageMeter(graph, target.info.vocab_size)
        self.texts: list[NDArray[np.int32]] = []

    def drafters(self) -> tuple[Drafter, ...]:
        """The n-gram drafter stands first: instant ones answer before the draft model's last call."""
        return (NGramDrafter(), *self.models)

    def run(
        self,
        items: Sequence[_Item],
        drafters: Sequence[Drafter],
        sampling: SamplingParams,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        """Answers in the items' order."""
        settings = self.settings
        acceptance = Acceptance()
        main = len(drafters) - 1
        lockstep = LockstepSettings(
            num_parallel=settings.num_parallel,
            delay=0,
            calls=64,
            make_policy=lambda: BudgetPolicy(settings.budget, main),
            can_switch=False,
            acceptance=acceptance,
        )
        answers: list[Answer] = []
        for at in range(0, len(items), settings.num_parallel):
            engine = WholeTreeEngine(
                self.target, EngineSettings(max_running=settings.num_parallel, step_time=_FREE_ROWS)
            )
            tasks = [
                Task(item.ids, sampling, sampling.default_verifier(), patience_s=0.0)
                for item in items[at : at + settings.num_parallel]
            ]
            answers += run_lockstep(engine, welcome_of(engine), tasks, drafters, lockstep)
            on_done(len(answers))
        return answers

    def mode(
        self, items: Sequence[_Item], sampling: SamplingParams, on_done: Callable[[int], None]
    ) -> tuple[dict[str, Any], list[Answer]]:
        """The figures of greedy or sampled output."""
        answers = self.run(items, self.drafters(), sampling, on_done)
        tallies: dict[str, _Tally] = {}
        for item, answer in zip(items, answers, strict=True):
            tally = tallies.setdefault(item.category, _Tally())
            tally.tokens += len(answer.token_ids)
            tally.steps += answer.stats.verify_steps
            if len(answer.token_ids):
                tally.coverage += self.meter.measure(item.ids, answer.token_ids, sampling)
            self.texts.append(np.concatenate([item.ids, answer.token_ids]))
        by_category = {category: tallies[category].figures() for category in sorted(tallies)}
        overall = {
            key: round(float(np.mean([figures[key] for figures in by_category.values()])), 4)
            for key in ("tokens_per_step", "top1", "top5")
        }
        return {**overall, "by_category": by_category}, answers


def evaluate_pair(
    model: str,
    bundle: str | None,
    prompts: Path | None,
    settings: EvalSettings,
    on_progress: OnProgress = lambda what, done, of: None,
) -> dict[str, Any]:
    """Everything that ``paceline models eval`` reports, see DESIGN.md section 9.

    bundle: a draft bundle's name or folder, the pair's own if None. Raises ``ModelError`` if either is not built,
    ``UsageError`` when no prompt is short enough.
    """
    from paceline.server.loading import load_target

    target_folder, folder = find_target(model), find_bundle(bundle or model)
    manifest = load_manifest(folder)
    items = _items(target_folder, load_prompts(prompts or SHIPPED), settings)
    on_progress("loading the target", 0, 1)
    target = load_target(model)
    models = _models(folder, manifest)
    evaluation = Evaluation(target, models, (folder / manifest.drafters[0].file).read_bytes(), settings)
    figures: dict[str, Any] = {}
    shares: list[Answer] = []
    samplings = {
        GREEDY: SamplingParams(max_tokens=settings.max_tokens),
        SAMPLED: SamplingParams(temperature=1.0, seed=settings.seed, max_tokens=settings.max_tokens),
    }
    total = 2 * len(items)
    done = 0
    written: dict[str, list[Written]] = {}
    for name, sampling in samplings.items():
        before = done

        def on_done(count: int, name: str = name, before: int = before) -> None:
            on_progress(f"{name} prompts", before + count, total)

        figures[name], answers = evaluation.mode(items, sampling, on_done)
        shares += answers
        written[name] = _written(items, answers, sampling)
        done += len(items)
    figures["draft_ms"] = _draft_ms(evaluation)
    figures["drafters"] = _shares(evaluation.drafters(), shares)
    if settings.compares:
        welcome = welcome_of(Engine(target, EngineSettings()))
        rows = compare(welcome, written, evaluation.drafters(), lambda at, of: on_progress("kinds of trees", at, of))
        figures["trees"] = rows
        for row in rows:
            if row["drafters"] in figures["drafters"] and row["tree"] == f"dynamic {STANDARD_NODES}":
                figures["drafters"][row["drafters"]]["alone"] = {name: row[name] for name in samplings}
    figures["meta"] = _meta(manifest, settings, items)
    return figures


def _items(target: Path, prompts: Sequence[Prompt], settings: EvalSettings) -> list[_Item]:
    chosen = list(prompts)[:: settings.every]
    items = [
        _Item(ids, prompt.category or NO_CATEGORY)
        for prompt, ids in zip(chosen, prompt_ids(target, chosen), strict=True)
        if len(ids) <= settings.max_prompt_len
    ]
    if not items:
        raise UsageError(f"expected a prompt of at most {settings.max_prompt_len} tokens, got none: raise --max-prompt")
    return items


def _written(items: Sequence[_Item], answers: Sequence[Answer], sampling: SamplingParams) -> list[Written]:
    pairs = zip(items, answers, strict=True)
    return [Written(item.ids, answer.token_ids, sampling) for item, answer in pairs if len(answer.token_ids)]


def _models(folder: Path, manifest: Manifest) -> list[Drafter]:
    return [
        OnnxDrafter(folder / entry.file, name=entry.name, max_context=entry.context_len, threads=1)
        for entry in manifest.drafters
    ]


def _draft_ms(evaluation: Evaluation) -> dict[str, Any]:
    """Time to draft a tree at 500 tokens of context, on the texts of the evaluation end to end."""
    text = np.concatenate(evaluation.texts)
    text = np.tile(text, 1 + (CONTEXT_LEN + 8 * NUM_TREES) // len(text))
    engine = Engine(evaluation.target, EngineSettings())
    drafters, budget = evaluation.drafters(), evaluation.settings.budget
    timing = time_drafts(welcome_of(engine), drafters, lambda: BudgetPolicy(budget, len(drafters) - 1), text)
    return {
        "nodes": budget.num_nodes,
        "median": round(timing.median_ms, 3),
        "cpu_median": round(timing.cpu_median_ms, 3),
        "mean_nodes": round(timing.mean_nodes, 2),
        "context": CONTEXT_LEN,
    }


def _shares(drafters: Sequence[Drafter], answers: Sequence[Answer]) -> dict[str, Any]:
    """Of the accepted nodes, how many each drafter proposed first, and accepted nodes per step."""
    proposers = np.concatenate([answer.proposers for answer in answers])
    accepted = max(1, int((proposers != NO_DRAFTER).sum()))
    steps = max(1, sum(answer.stats.verify_steps for answer in answers))
    made = {}
    for index, drafter in enumerate(drafters):
        count = int((proposers == index).sum())
        made[drafter.name] = {
            "share_of_accepted": round(count / accepted, 4),
            "accepted_per_step": round(count / steps, 4),
        }
    return made


def _meta(manifest: Manifest, settings: EvalSettings, items: Sequence[_Item]) -> dict[str, Any]:
    return {
        "bundle": manifest.name,
        "target": manifest.target.name,
        "prompts": len(items),
        "max_tokens": settings.max_tokens,
        "levels": settings.num_levels,
        "width": settings.width,
        "seed": settings.seed,
    }

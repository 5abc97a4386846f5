"""Tokens per verification step of naive, mss and coupled, on the same texts, the same pair and trees of equal size.

At evenly spaced positions of the target's own text (sampled at the temperature in question) trees are drafted, the
target scores them all in one pass, and the shipped chooser decides. Two comparisons matter:

    mss / naive on the same sampled trees       SpecInfer's Table 3 (1.26 to 1.28 there)
    coupled / naive with naive's best trees     deterministic, the likeliest children: what others ship

Trees: the expansion <1,1,k,1,1,1,1,1> of SpecInfer for k = 1..5 (at most 32 nodes), and dynamic trees of 32 nodes.
Positions are spread evenly, not where a run of steps would happen to stop, so that all verifiers see the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bench import prompts as shipped_prompts
from paceline.bench.forest import MAX_CHILDREN, Drafted, DraftedText, ScoredText, grow
from paceline.bench.prompts import load_prompts
from paceline.bench.recorder import complete_all, prompt_ids
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.drafting.ranking import make_ranking
from paceline.models.catalogue import find_bundle, find_target
from paceline.models.manifest import load_manifest
from paceline.server.choose import Choice, Request, choose
from paceline.server.loading import load_target
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams, Verifier

Progress = Callable[[str], None]
WIDTHS = (1, 2, 3, 4, 5)
DEPTH = 8
BRANCH_DEPTH = 3
NUM_NODES = 32
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
DYNAMIC = "dynamic-32"
METHODS = {
    "naive, sampled trees": (Verifier.MSS, Verifier.NAIVE),
    "mss": (Verifier.MSS, Verifier.MSS),
    "naive, best trees": (Verifier.NAIVE, Verifier.NAIVE),
    "coupled": (Verifier.COUPLED, Verifier.COUPLED),
}
"""Name -> how the tree is drafted, how it is verified."""
SPECINFER = {
    "top_1": 0.54,
    "top_5": 0.97,
    "mss_over_naive": (1.26, 1.28),
    "source": "SpecInfer (arXiv 2305.09781), Tables 1 and 3, stochastic decoding with its own pairs",
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure. num_throws: draws of each sampled tree and throws of the dice on each tree."""

    max_tokens: int = 64
    stride: int = 4
    num_throws: int = 2
    max_prompts: int = 16


def shape_names() -> list[str]:
    """The trees of the table, in its order."""
    return [*(f"width-{width}" for width in WIDTHS), DYNAMIC]


def run_verifier_bench(
    pair: str = "smollm2",
    prompts: Path | None = None,
    effort: Effort | None = None,
    progress: Progress = lambda _line: None,
) -> dict[str, Any]:
    """Mean tokens per step by temperature, tree and method, with standard errors and the two ratios.

    Raises ``ModelError`` if the pair is not built.
    """
    effort = effort or Effort()
    target_folder, bundle = find_target(pair), find_bundle(pair)
    entry = load_manifest(bundle).drafters[0]
    drafter = OnnxDrafter(bundle / entry.file, name=entry.name, max_context=entry.context_len)
    target = load_target(pair)
    wanted = load_prompts(prompts or shipped_prompts.SHIPPED)[: effort.max_prompts]
    ids = prompt_ids(target_folder, wanted)
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=effort.max_tokens)
        outputs = complete_all(target, ids, sampling, progress)
        lengths: dict[tuple[str, str], list[float]] = {}
        for number, (prompt, output) in enumerate(zip(ids, outputs, strict=True)):
            measure_text(target, drafter, prompt, output, temperature, effort, lengths)
            progress(f"temperature {temperature:g}: {number + 1} of {len(ids)} texts")
        rows += summarise(temperature, lengths)
    drafter.close()
    return {"pair": pair, "rows": rows, "specinfer": SPECINFER, "markdown": markdown(rows)}


def measure_text(
    target: Target,
    drafter: Drafter,
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
    temperature: float,
    effort: Effort,
    lengths: dict[tuple[str, str], list[float]],
) -> None:
    """Add the tokens per step at every ``stride``-th position of one text; one entry for each position."""
    sequence = drafter.start()
    drafts, scores = DraftedText(sequence, drafter.chunk_len), ScoredText(target)
    try:
        for place in range(0, len(output), effort.stride):
            known = np.concatenate([prompt, output[:place]]).astype(np.int32)
            drafts.move_to(known)
            forest = draft_forest(drafts, len(known), temperature, effort.num_throws)
            logits_of = scores.score(known, [tree for trees in forest.values() for tree in trees])
            for (shape, kind), trees in forest.items():
                for name, (drafted_for, verifier) in METHODS.items():
                    if drafted_for is kind:
                        found = [
                            throw(tree, logits_of(tree), verifier, temperature, known, place * 1000 + number, effort)
                            for number, tree in enumerate(trees)
                        ]
                        lengths.setdefault((shape, name), []).append(float(np.mean(found)))
    finally:
        sequence.close()
        scores.close()


def draft_forest(
    drafts: DraftedText, position: int, temperature: float, num_throws: int
) -> dict[tuple[str, Verifier], list[Drafted]]:
    """(shape, how it is drafted) -> the trees of that kind: one where nothing is random, else ``num_throws``."""
    forest: dict[tuple[str, Verifier], list[Drafted]] = {}
    for kind in (Verifier.NAIVE, Verifier.MSS, Verifier.COUPLED):
        is_fixed = kind is Verifier.NAIVE or temperature == 0.0
        for seed in range(1 if is_fixed else num_throws):
            ranking = make_ranking(kind, SamplingParams(temperature=temperature, seed=seed_of(position, seed)))
            widest = [WIDTHS[-1] if depth == BRANCH_DEPTH else 1 for depth in range(1, DEPTH + 1)]
            wide = grow(drafts, ranking, position, widest)
            for width in WIDTHS:
                forest.setdefault((f"width-{width}", kind), []).append(wide.narrowed(BRANCH_DEPTH, width))
            dynamic = grow(drafts, ranking, position, [MAX_CHILDREN] * DEPTH, NUM_NODES)
            forest.setdefault((DYNAMIC, kind), []).append(dynamic)
    return forest


def seed_of(position: int, number: int) -> int:
    """The seed of one drafted tree: coupled needs the same one to verify it."""
    return position * 64 + number


def throw(
    drafted: Drafted,
    logits: torch.Tensor,
    verifier: Verifier,
    temperature: float,
    known: NDArray[np.int32],
    salt: int,
    effort: Effort,
) -> float:
    """Mean tokens of a step on one tree: coupled has one outcome, naive and mss get several throws."""
    sampling = SamplingParams(temperature=temperature)
    first = salt % 1000
    is_fixed = verifier is Verifier.COUPLED or temperature == 0.0
    seeds = (
        [seed_of(len(known), first)]
        if is_fixed
        else [salt * 64 + 32 + number for number in range(2 * effort.num_throws)]
    )
    total = 0
    for seed in seeds:
        request = Request(drafted.tree, sampling, verifier, seed, known, known[:0], proposals=drafted.proposals)
        (outcome,) = choose(logits, [request])
        assert isinstance(outcome, Choice), outcome
        total += len(outcome.nodes) + 1
    return total / len(seeds)


def summarise(temperature: float, lengths: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    """One row for each tree shape; ratios are of means, over the same positions."""
    rows = []
    for shape in shape_names():
        means = {name: np.array(lengths[shape, name]) for name in METHODS}
        row: dict[str, Any] = {"temperature": temperature, "tree": shape, "positions": len(means["mss"])}
        row["tokens_per_step"] = {name: round(float(values.mean()), 3) for name, values in means.items()}
        errors = {name: values.std() / np.sqrt(len(values)) for name, values in means.items()}
        row["standard_error"] = {name: round(float(error), 3) for name, error in errors.items()}
        row["mss_over_naive_same_trees"] = ratio(means["mss"], means["naive, sampled trees"])
        row["coupled_over_naive_best_trees"] = ratio(means["coupled"], means["naive, best trees"])
        row["coupled_over_mss"] = ratio(means["coupled"], means["mss"])
        rows.append(row)
    return rows


def ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """Ratio of two means."""
    return round(float(above.mean() / below.mean()), 3)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the docs. Higher is better."""
    names = list(METHODS)
    head = ["T", "tree", *names, "mss / naive, same trees", "coupled / naive, best trees", "coupled / mss"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        figures = [f"{row['tokens_per_step'][name]:.2f} ± {row['standard_error'][name]:.2f}" for name in names]
        ratios = [
            row[key] for key in ("mss_over_naive_same_trees", "coupled_over_naive_best_trees", "coupled_over_mss")
        ]
        cells = [f"{row['temperature']:g}", row["tree"], *figures, *(f"{value:.2f}" for value in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

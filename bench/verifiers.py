"""Tokens per verification step of naive, mss and coupled, on the same texts, the same pair and trees of equal size.

At evenly spaced positions of the target's own text (sampled at the temperature in question) trees are drafted and the
target scores them all in one pass. Naive and mss are evaluated in expectation over their dice, exactly; coupled has one
outcome, which the shipped chooser gives. Two comparisons matter:

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
from paceline.bench.expectation import mss_tokens, naive_tokens
from paceline.bench.forest import MAX_CHILDREN, Drafted, DraftedText, Plan, Scored, ScoredText, grow
from paceline.bench.prompts import Prompt, load_prompts
from paceline.bench.recorder import complete_all, prompt_ids
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.drafting.ranking import Ranking, make_ranking
from paceline.models.catalogue import find_bundle, find_target
from paceline.models.manifest import load_manifest
from paceline.server.choose import Choice, Request, choose
from paceline.server.loading import load_target
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams, Verifier

Progress = Callable[[str], None]
Lengths = dict[tuple[str, str], list[float]]
"""(tree, method) -> tokens per step at each position."""
WIDTHS = (1, 2, 3, 4, 5)
DEPTH = 8
BRANCH_DEPTH = 3
NUM_NODES = 32
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
DYNAMIC = "dynamic-32"
METHODS = {
    "naive, sampled trees": Verifier.MSS,
    "mss": Verifier.MSS,
    "naive, best trees": Verifier.NAIVE,
    "coupled": Verifier.COUPLED,
}
"""Name -> the verifier that the tree is drafted for."""
ANCHOR_SHAPE = "anchor"
SPECINFER = {
    "top_1": 0.54,
    "top_5": 0.97,
    "mss_over_naive": (1.26, 1.28),
    "source": "SpecInfer (arXiv 2305.09781), Tables 1 and 3, stochastic decoding with its own pairs",
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure. num_positions: where trees are grown, at temperature 1; a quarter of it at the others.

    max_tokens: of each text. stride: tokens between positions. num_trees: drawn trees of each kind at each position.
    """

    num_positions: int = 400
    max_tokens: int = 64
    stride: int = 4
    num_trees: int = 1

    def num_texts(self, temperature: float) -> int:
        """How many texts hold that many positions."""
        positions = self.num_positions if temperature == 1.0 else self.num_positions // 4
        return max(1, -(-positions * self.stride // self.max_tokens))


QUICK = Effort(num_positions=96)


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
    wanted = load_prompts(prompts or shipped_prompts.SHIPPED)
    rows: list[dict[str, Any]] = []
    choices: list[dict[str, float]] = []
    for temperature in TEMPERATURES:
        ids = prompt_ids(target_folder, spread(wanted, effort.num_texts(temperature)))
        sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=effort.max_tokens)
        outputs = complete_all(target, ids, sampling, progress)
        lengths: Lengths = {}
        for number, (prompt, output) in enumerate(zip(ids, outputs, strict=True)):
            measure_text(target, drafter, prompt, output, temperature, effort, lengths)
            progress(f"temperature {temperature:g}: {number + 1} of {len(ids)} texts")
        rows += summarise(temperature, lengths)
        shares = {name: round(float(np.mean(lengths[ANCHOR_SHAPE, name])), 3) for name in ("top_1", "top_5")}
        choices.append({"temperature": temperature, **shares})
    drafter.close()
    return {
        "pair": pair,
        "rows": rows,
        "first_choices": choices,
        "specinfer": SPECINFER,
        "markdown": markdown(rows),
    }


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts at even distances, so that every category has its share; all if there are fewer."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[number * len(prompts) // count] for number in range(count)]


def measure_text(
    target: Target,
    drafter: Drafter,
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
    temperature: float,
    effort: Effort,
    lengths: Lengths,
) -> None:
    """Add the tokens per step at every ``stride``-th position of one text; one entry for each position."""
    sequence = drafter.start()
    drafts, scores = DraftedText(sequence, drafter.chunk_len), ScoredText(target)
    try:
        for place in range(0, len(output), effort.stride):
            known = np.concatenate([prompt, output[:place]]).astype(np.int32)
            forest = draft_forest(drafts, known, temperature, effort.num_trees, target.info.vocab_size)
            scored = scores.score(known, [tree for trees in forest.values() for tree in trees])
            probs = probabilities(scored.logits, temperature)
            for (shape, kind), trees in forest.items():
                for name in (name for name, drafted_for in METHODS.items() if drafted_for is kind):
                    found = [
                        tokens_of(name, tree, scored, probs, temperature, known, number)
                        for number, tree in enumerate(trees)
                    ]
                    lengths.setdefault((shape, name), []).append(float(np.mean(found)))
            likeliest = drafts.candidates([()]).token_ids[0, :5]
            for name, count in (("top_1", 1), ("top_5", 5)):
                lengths.setdefault((ANCHOR_SHAPE, name), []).append(float(probs[0, likeliest[:count]].sum()))
    finally:
        sequence.close()
        scores.close()


def probabilities(logits: torch.Tensor, temperature: float) -> NDArray[np.float32]:
    """float32[R, V]: p at every row."""
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[1]).float().numpy()
    probs: NDArray[np.float32] = (logits.float() / temperature).softmax(dim=-1).numpy()
    return probs


def tokens_of(
    name: str,
    drafted: Drafted,
    scored: Scored,
    probs: NDArray[np.float32],
    temperature: float,
    known: NDArray[np.int32],
    number: int,
) -> float:
    """Tokens of a step on one tree: for naive and mss what the dice yield on average, for coupled the one outcome."""
    rows = scored.rows(drafted)
    if name == "mss":
        return mss_tokens(drafted, probs[rows])
    if name != "coupled":
        return naive_tokens(drafted, probs[rows])
    sampling, seed = SamplingParams(temperature=temperature), seed_of(len(known), number)
    request = Request(drafted.tree, sampling, Verifier.COUPLED, seed, known, known[:0])
    (outcome,) = choose(scored.logits[torch.from_numpy(rows)], [request])
    assert isinstance(outcome, Choice), outcome
    return float(len(outcome.nodes) + 1)


def draft_forest(
    drafts: DraftedText, known: NDArray[np.int32], temperature: float, num_trees: int, vocab_size: int
) -> dict[tuple[str, Verifier], list[Drafted]]:
    """(shape, how it is drafted) -> the trees of that kind behind ``known``: one where nothing is random, else
    ``num_trees``. All are drafted from the same candidates, those that coupled asks for included."""
    position = len(known)
    widest = [WIDTHS[-1] if depth == BRANCH_DEPTH else 1 for depth in range(1, DEPTH + 1)]
    kinds: list[Verifier] = []
    rankings: list[Ranking] = []
    for kind in (Verifier.NAIVE, Verifier.MSS, Verifier.COUPLED):
        is_fixed = kind is Verifier.NAIVE or temperature == 0.0
        for number in range(1 if is_fixed else num_trees):
            sampling = SamplingParams(temperature=temperature, seed=seed_of(position, number))
            kinds.append(kind)
            rankings.append(make_ranking(kind, sampling, vocab_size=vocab_size))
    plans = [
        plan
        for ranking in rankings
        for plan in (Plan(ranking, widest), Plan(ranking, [MAX_CHILDREN] * DEPTH, NUM_NODES))
    ]
    drafts.move_to(known, lambda at: np.concatenate([ranking.extra_ids(np.array([at])) for ranking in rankings]))
    trees = grow(drafts, plans, position)
    forest: dict[tuple[str, Verifier], list[Drafted]] = {}
    for kind, wide, dynamic in zip(kinds, trees[0::2], trees[1::2], strict=True):
        for width in WIDTHS:
            forest.setdefault((f"width-{width}", kind), []).append(wide.narrowed(BRANCH_DEPTH, width))
        forest.setdefault((DYNAMIC, kind), []).append(dynamic)
    return forest


def seed_of(position: int, number: int) -> int:
    """The seed of one drafted tree: coupled needs the same one to verify it."""
    return position * 64 + number


def summarise(temperature: float, lengths: Lengths) -> list[dict[str, Any]]:
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

"""Sampling parameters acting on the target's logits, for rows of many generations at once.

Order (DESIGN.md section 6): logit bias, penalties, the bar before ``min_tokens``, temperature, top-k, top-p, min-p.
Everything is vectorised over rows, no logits are copied to the host, and a parameter that nobody uses costs nothing.
Penalties count a node's own ancestors and the committed output, read afresh in every step: there is no counter that a
rejected node could leave a mark on.

Exactness: probabilities are those of the float32 logits; sums that decide a cut run in float64. Not here: noise and
choice (``choose``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.shared.sampling import SamplingParams

_NUM_CANDIDATES = 256
"""Likeliest tokens looked at before a whole row is sorted: enough for nearly every top-k and top-p."""
TOLERANCE = 1e-6
"""A cut that misses its bound by rounding alone counts as reaching it (float32 log-probabilities near 0.1 to 1)."""
COLD = 1e-2
"""Below this temperature logits are shifted first, so that dividing by it cannot overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Consecutive rows of logits of one generation.

    count: number of rows. path_rows, path_tokens: int[m], one pair for each ancestor-or-self of each row's node: the
    tokens that come after ``output`` before that row's choice. prompt, output: int32 ids committed so far.
    barred: ids that may not come before ``sampling.min_tokens`` tokens of output.
    """

    count: int
    sampling: SamplingParams
    path_rows: NDArray[np.int64]
    path_tokens: NDArray[np.int64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    barred: tuple[int, ...] = ()


class _Cells(NamedTuple):
    """Distinct (row, token) cells of the logits, each with a number."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    values: NDArray[np.float64]


def warp(scores: torch.Tensor, groups: Sequence[Rows]) -> torch.Tensor:
    """Turn logits into log p up to a constant for each row, in place; ruled-out tokens become -inf, and so does NaN.

    scores: float32[r, V], r the sum of the groups' counts, owned by the caller. Temperature 0 leaves the row as it is
    after the penalties: its argmax is the choice whatever the filters say.
    """
    edit(scores, groups)
    return finish(scores, groups)


def finish(scores: torch.Tensor, groups: Sequence[Rows]) -> torch.Tensor:
    """Temperature and filters on edited rows, in place."""
    _heat(scores, [(group.sampling.temperature, group.count) for group in groups])
    cuts = [cuts_of(group.sampling) for group in groups]
    if any(cuts):
        counts = [group.count for group in groups]
        rows = np.flatnonzero(np.repeat([cut is not None for cut in cuts], counts))
        limits = np.repeat(np.array([cut or (0.0, 1.0, 0.0) for cut in cuts]), counts, axis=0)[rows]
        _filter(scores, rows, limits)
    return scores


def edit(scores: torch.Tensor, groups: Sequence[Rows]) -> None:
    """Everything before temperature, in place: NaN, bias, penalties, the bar before ``min_tokens``."""
    _drop_nan(scores)
    _edit(scores, groups, _bias, lambda logits, bias: logits + bias)
    # Multiplicative before additive, as in vLLM and in the paper that defined it (CTRL, arXiv 1909.05858, section 4.1).
    _edit(scores, groups, _repeated, lambda logits, factor: torch.where(logits > 0, logits / factor, logits * factor))
    _edit(scores, groups, _penalties, lambda logits, penalty: logits - penalty)
    _edit(scores, groups, _barred, lambda logits, bar: torch.full_like(logits, -torch.inf))


def cuts_of(sampling: SamplingParams) -> tuple[float, float, float] | None:
    """(top_k, top_p, min_p), or None where no filter acts."""
    cut = (float(sampling.top_k), sampling.top_p, sampling.min_p)
    return None if sampling.is_greedy or cut == (0.0, 1.0, 0.0) else cut


def _drop_nan(scores: torch.Tensor) -> None:
    if bool(scores.amax(dim=-1).isnan().any()):
        scores.masked_fill_(scores.isnan(), -torch.inf)


def _edit(
    scores: torch.Tensor,
    groups: Sequence[Rows],
    cells_of: Callable[[Rows], _Cells | None],
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Apply one sparse edit of all groups with one gather and one scatter. Cells are distinct: their order is free."""
    found: list[tuple[int, _Cells]] = []
    first = 0
    for group in groups:
        cells = cells_of(group)
        if cells is not None and len(cells.rows):
            found.append((first, cells))
        first += group.count
    if not found:
        return
    index = np.stack(
        [
            np.concatenate([start + cells.rows for start, cells in found]),
            np.concatenate([cells.tokens for _, cells in found]),
        ]
    )
    rows_and_tokens = torch.from_numpy(index).to(scores.device)
    values = np.concatenate([cells.values for _, cells in found]).astype(np.float32)
    rows, tokens = rows_and_tokens
    scores[rows, tokens] = change(scores[rows, tokens], torch.from_numpy(values).to(scores.device))


def _everywhere(count: int, tokens: Iterable[int], values: Iterable[float] | float) -> _Cells:
    """The same tokens and values in each of ``count`` rows."""
    ids = np.fromiter(tokens, np.int64)
    numbers = np.full(len(ids), values) if isinstance(values, float) else np.fromiter(values, np.float64)
    return _Cells(np.repeat(np.arange(count), len(ids)), np.tile(ids, count), np.tile(numbers, count))


def _bias(group: Rows) -> _Cells | None:
    bias = group.sampling.logit_bias
    return _everywhere(group.count, bias.keys(), bias.values()) if bias else None


def _barred(group: Rows) -> _Cells | None:
    missing = group.sampling.min_tokens - len(group.output)
    if missing <= 0 or not group.barred:
        return None
    depths = np.bincount(group.path_rows, minlength=group.count)
    cells = _everywhere(group.count, sorted(set(group.barred)), 0.0)
    early = depths[cells.rows] < missing
    return _Cells(cells.rows[early], cells.tokens[early], cells.values[early])


def _occurrences(group: Rows, committed: NDArray[np.int32]) -> _Cells:
    """How often each token occurs in ``committed`` and on each row's own path, for those that occur."""
    if group.count == 1:
        committed = np.concatenate([committed, group.path_tokens])
    tokens, counts = np.unique(committed.astype(np.int64), return_counts=True)
    if group.count == 1:
        return _Cells(np.zeros(len(tokens), np.int64), tokens, counts.astype(np.float64))
    shared = _everywhere(group.count, tokens.tolist(), counts.astype(np.float64).tolist())
    if not len(group.path_rows):
        return shared
    rows = np.concatenate([shared.rows, group.path_rows])
    stride = 1 << 32
    keys, inverse = np.unique(rows * stride + np.concatenate([shared.tokens, group.path_tokens]), return_inverse=True)
    times = np.concatenate([shared.values, np.ones(len(group.path_rows))])
    return _Cells(keys // stride, keys % stride, np.bincount(inverse, times, len(keys)).astype(np.float64))


def _repeated(group: Rows) -> _Cells | None:
    factor = group.sampling.repetition_penalty
    if factor == 1.0:
        return None
    cells = _occurrences(group, np.concatenate([group.prompt, group.output]))
    return _Cells(cells.rows, cells.tokens, np.full(len(cells.rows), factor))


def _penalties(group: Rows) -> _Cells | None:
    presence, frequency = group.sampling.presence_penalty, group.sampling.frequency_penalty
    if presence == 0.0 and frequency == 0.0:
        return None
    cells = _occurrences(group, group.output)
    return _Cells(cells.rows, cells.tokens, presence + frequency * cells.values)


def _heat(scores: torch.Tensor, temperatures: Sequence[tuple[float, int]]) -> None:
    divisors = np.concatenate([np.full(count, value or 1.0, np.float64) for value, count in temperatures])
    if (divisors == 1.0).all():
        return
    cold = np.flatnonzero(divisors < COLD)
    for row in cold:
        shifted = scores[row] - scores[row].amax()
        scores[row] = (shifted.double() / divisors[row]).to(torch.float32)
    divisors[cold] = 1.0
    scores /= torch.from_numpy(divisors.astype(np.float32)[:, None]).to(scores.device)


def _filter(scores: torch.Tensor, rows: NDArray[np.int64], cuts: NDArray[np.float64]) -> None:
    """Keep what top-k, then top-p of what is left, then min-p leave; ties to the lowest id.

    rows: which rows of scores; cuts: float64[len(rows), 3], (top_k, top_p, min_p) with 0, 1, 0 for none.
    """
    everything = len(rows) == scores.shape[0]
    index = torch.from_numpy(rows).to(scores.device)
    part = scores if everything else scores[index]
    limits = torch.from_numpy(cuts).to(scores.device)
    num_candidates = min(_NUM_CANDIDATES, part.shape[1])
    values = part.topk(num_candidates).values
    whole = probability_mass(part, values[:, :1])
    kept, sure = num_kept(values, whole, limits, part.shape[1])
    unsure = torch.nonzero(~sure)[:, 0]
    if len(unsure):
        hard = part[unsure]
        ordered = hard.sort(dim=-1, descending=True).values
        kept[unsure], _ = num_kept(ordered, whole[unsure], limits[unsure], part.shape[1])
        threshold = values.gather(1, (kept - 1).clamp(max=num_candidates - 1)[:, None])
        threshold[unsure] = ordered.gather(1, (kept[unsure] - 1)[:, None])
    else:
        threshold = values.gather(1, (kept - 1)[:, None])
    keep_first(part, threshold, kept)
    if not everything:
        scores[index] = part


def probability_mass(part: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """float64[r]: the summed exp(part - top) of each row. part: float32[r, V]; top: float32[r, 1].

    Far below the top a subnormal exp would be slow on a CPU, and adds nothing.
    """
    return (part - top).clamp_(min=-80.0).exp_().sum(dim=-1, dtype=torch.float64)


def num_kept(
    values: torch.Tensor, whole: torch.Tensor, limits: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[r] how many of the likeliest tokens stay, and bool[r] whether ``values`` reached far enough to know.

    values: float32[r, m], the m largest of each row, descending. whole: float64[r], ``probability_mass`` of the rows.
    limits: float64[r, 3], see ``cuts_of``.
    """
    num_known = values.shape[1]
    top_k, top_p, min_p = limits.T
    by_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).to(torch.int64)
    top = values[:, :1]
    mass = (values - top).to(torch.float64).exp()
    mass = torch.where(torch.arange(num_known, device=values.device) < by_k[:, None], mass, 0.0)
    wanted = (top_p - TOLERANCE) * torch.where(by_k >= vocab_size, whole, mass.sum(dim=-1))
    by_p = torch.where(top_p < 1.0, (mass.cumsum(dim=-1) < wanted[:, None]).sum(dim=-1) + 1, vocab_size)
    floor = top.to(torch.float64) + torch.log(min_p)[:, None] - TOLERANCE
    by_min = torch.where(min_p > 0.0, (values.to(torch.float64) >= floor).sum(dim=-1), vocab_size)
    within_k = (by_k <= num_known) | (by_k >= vocab_size)
    kept = torch.minimum(torch.minimum(by_k, by_p), by_min).clamp(min=1)
    sure = (within_k & (kept <= num_known) & ((by_min < num_known) | (min_p == 0.0) | (kept < by_min))) | (
        num_known >= vocab_size
    )
    return kept.clamp(max=vocab_size), sure


def keep_first(part: torch.Tensor, threshold: torch.Tensor, kept: torch.Tensor) -> None:
    """Set all but the ``kept`` largest of each row to -inf, in place; ties at the threshold stay by lowest id.

    part: float32[r, V]; threshold: float32[r, 1], the kept-th largest; kept: int64[r].
    """
    outside = part < threshold
    too_many = part.shape[1] - outside.sum(dim=-1) > kept
    if bool(too_many.any()):
        equal = part == threshold
        room = kept - (part > threshold).sum(dim=-1)
        outside |= equal & (equal.cumsum(dim=-1) > room[:, None])
    part.masked_fill_(outside, -torch.inf)

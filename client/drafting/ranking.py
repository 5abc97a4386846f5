"""From a drafter's candidates to children: which, in which order, and how likely each is to come true a priori.

One rule for each verifier (DESIGN.md section 6):

    greedy    the likeliest under q, best first
    naive     the likeliest under q after the sampling parameters, best first
    coupled   the highest log q + G(seed, position, token), best first: the same noise picks the server's token; tokens
              that the noise favours are asked for by name, because q's best ones may miss them
    mss       draws without replacement from the quantised q; every drawn child is sent, with that q

Guesses without a distribution (n-gram) are point masses under every verifier; coupled weighs them by their noise.

Not here: what the prior is really worth (``acceptance``), and the penalties: they change q too little to pay here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import Candidates
from paceline.shared.messages import Proposal
from paceline.shared.noise import gumbel, gumbel_row
from paceline.shared.quantise import draw, quantised
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.warp import warp as warp_row

Floats = NDArray[np.float64]
CANDIDATE_WIDTH = 128
"""Candidates of a row that a session has use for, where noise or parameters may prefer any of them."""
_LEAST_PRIOR = 2e-3
_COVERAGE = 0.95
"""Share of p's mass that a drafter's top candidates are expected to hold."""
_SHARPNESS = 1.2
_EXTRA_NOISE = 5.0
"""A token outside a model's 128 best rarely has q above 1e-3: with less noise than this it hardly ever wins. About 330
of 49,152 tokens have more at any position."""
_LEAST_TAIL_TEMPERATURE = 0.6
"""Below it the tail of p is too light to be worth asking about."""
_MAX_NOISE_ROWS = 16
_MSS_SUPPORT = 32
_SIBLING_DECAY = 0.45
_RNG_STREAM = 0x70616365
"""Keeps the client's draws independent of the server's, which may start from the same seed."""
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """Where the rows of a request stand.

    positions: int64[r], position of the tokens that a row's candidates propose. odds: float64[r], the row's own.
    limits: int32[r], most children per row. least_odds: odds below which a child is not worth sending.
    """

    positions: NDArray[np.int64]
    odds: Floats
    limits: NDArray[np.int32]
    least_odds: float


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Children of the rows of a request.

    rows: int64[m], index of the parent's row, ascending. tokens: int32[m], siblings best (or drawn) first.
    priors: float64[m], how likely each comes true if its parent did. proposals: row index -> q, in mss.
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int32]
    priors: Floats
    proposals: Mapping[int, Proposal] = field(default_factory=dict)


class Ranking(Protocol):
    """A verifier-specific rule."""

    def rank(self, candidates: Candidates, situation: Situation) -> Ranked:
        """The children that ``candidates`` suggest."""
        ...

    def extra_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens that a model should be asked about at these positions, however unlikely they are."""
        ...

    def width(self, num_children: int) -> int:
        """How many candidates are of use for ``num_children`` children a row."""
        ...


def make_ranking(verifier: Verifier, sampling: SamplingParams, choice: int = 0, vocab_size: int = 0) -> Ranking:
    """The rule that fits a generation. Coupled and mss need ``sampling.seed``.

    vocab_size: of the target; 0 if it is not known, then no extra tokens are asked for.
    """
    if verifier is Verifier.GREEDY or sampling.is_greedy:
        return TopRanking(sampling, is_warped=False)
    if verifier is Verifier.NAIVE:
        return TopRanking(sampling, is_warped=True)
    if sampling.seed is None:
        raise ValueError(f"expected a seed for verifier {verifier.value}, got none")
    if verifier is Verifier.COUPLED:
        return CoupledRanking(sampling, sampling.seed, choice, vocab_size)
    return MssRanking(sampling, np.random.default_rng([sampling.seed, choice, _RNG_STREAM]))


def warp(candidates: Candidates, sampling: SamplingParams) -> Floats:
    """float64[r, K]: log q after all parameters but the penalties, normalised over the candidates.

    Places without a candidate hold -inf.
    """
    unpenalised = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    rows = zip(candidates.token_ids, candidates.logprobs, strict=True)
    warped = [warp_row(ids, logprobs, unpenalised) for ids, logprobs in rows]
    return np.stack(warped) if warped else np.zeros(candidates.token_ids.shape)


def _biased(candidates: Candidates, sampling: SamplingParams) -> Floats:
    logprobs = candidates.logprobs.astype(np.float64)
    if sampling.logit_bias:
        for token, bias in sampling.logit_bias.items():
            logprobs[candidates.token_ids == token] += bias
    return logprobs


def _normalised(logits: Floats) -> Floats:
    if not logits.shape[1]:
        return logits
    peak = logits.max(axis=1, keepdims=True)
    mass = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
    total = mass.sum(axis=1, keepdims=True)
    normalised: Floats = mass / np.where(total > 0.0, total, 1.0)
    return normalised


def _best(candidates: Candidates, scores: Floats, priors: Floats, situation: Situation) -> Ranked:
    """The candidates with the highest scores, at most ``limits`` per row, without those of negligible prior."""
    count = scores.shape[1]
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(count), order.shape), axis=1)
    priors = np.where(np.isfinite(scores), priors, 0.0)
    keep = (ranks < situation.limits[:, None]) & (priors >= _LEAST_PRIOR)
    rows, columns = np.nonzero(np.take_along_axis(keep, order, axis=1))
    columns = order[rows, columns]
    return Ranked(rows, candidates.token_ids[rows, columns], priors[rows, columns])


class TopRanking:
    """Greedy and naive: the prior is q itself."""

    def __init__(self, sampling: SamplingParams, *, is_warped: bool) -> None:
        self._sampling = sampling
        self._is_warped = is_warped

    def rank(self, candidates: Candidates, situation: Situation) -> Ranked:
        if candidates.is_point_mass or not self._is_warped:
            scores = _biased(candidates, self._sampling)
        else:
            scores = warp(candidates, self._sampling)
        return _best(candidates, scores, np.exp(np.minimum(scores, 0.0)), situation)

    def extra_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        return _NO_TOKENS

    def width(self, num_children: int) -> int:
        is_in_order = not self._is_warped and not self._sampling.logit_bias
        return min(num_children, CANDIDATE_WIDTH) if is_in_order else CANDIDATE_WIDTH


class CoupledRanking:
    """Perturb q as the server perturbs p. If log p = log q + an error about as large as the noise of one more Gumbel
    draw, the chance of each candidate is the softmax of the perturbed scores; ``acceptance`` corrects the rest."""

    def __init__(
        self, sampling: SamplingParams, seed: int, choice: int, vocab_size: int = 0, sharpness: float = _SHARPNESS
    ) -> None:
        """vocab_size: see ``make_ranking``. sharpness: inverse scale of the error between log p and log q."""
        self._sampling = sampling
        self._seed = seed
        self._choice = choice
        self._vocab_size = vocab_size
        self._sharpness = sharpness
        self._cuts_nothing = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0
        self._asks = vocab_size > 0 and self._cuts_nothing and sampling.temperature >= _LEAST_TAIL_TEMPERATURE
        self._rows: dict[int, NDArray[np.float32]] = {}

    def rank(self, candidates: Candidates, situation: Situation) -> Ranked:
        noise = self._noise(candidates.token_ids, situation.positions)
        if candidates.is_point_mass:
            logprobs = np.minimum(_biased(candidates, self._sampling), 0.0)
            # Against one Gumbel race of all other tokens: P(log c + G > log(1 - c) + G') = exp(-e^-G (1 - c) / c).
            with np.errstate(divide="ignore", over="ignore"):
                priors = np.exp(-np.exp(-noise) * np.expm1(-logprobs))
            return _best(candidates, logprobs + noise, priors, situation)
        if self._cuts_nothing:
            scores = _biased(candidates, self._sampling) / self._sampling.temperature
        else:
            scores = warp(candidates, self._sampling)
        scores += noise
        priors = _COVERAGE * _normalised(self._sharpness * scores)
        return _best(candidates, scores, priors, situation)

    def extra_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Those with so much noise that they may win from far below the candidates."""
        if not self._asks:
            return _NO_TOKENS
        rows = [self._row(position) for position in np.unique(positions).tolist()]
        found = np.flatnonzero(np.logical_or.reduce([row > _EXTRA_NOISE for row in rows])) if rows else _NO_TOKENS
        return found.astype(np.int32)

    def width(self, num_children: int) -> int:
        return CANDIDATE_WIDTH

    def _noise(self, token_ids: NDArray[np.int32], positions: NDArray[np.int64]) -> Floats:
        """float64[r, K]: the noise of each row's tokens."""
        noise = np.empty(token_ids.shape)
        for position in np.unique(positions).tolist():
            rows = np.flatnonzero(positions == position)
            ids = token_ids[rows]
            known = self._rows.get(position)
            if known is None or ids.max(initial=0) >= len(known):
                noise[rows] = gumbel(self._seed, position, ids, self._choice)
            else:
                noise[rows] = known.take(ids)
        return noise

    def _row(self, position: int) -> NDArray[np.float32]:
        """float32[V]: the noise of all tokens at a position. The latest rows are kept: steps share positions."""
        if position not in self._rows:
            for old in sorted(self._rows)[: max(0, len(self._rows) - _MAX_NOISE_ROWS + 1)]:
                del self._rows[old]
            self._rows[position] = gumbel_row(self._seed, position, self._vocab_size, self._choice)
        return self._rows[position]


class MssRanking:
    """Multi-step speculative sampling. How many children a row gets depends on q and its odds, never on the draws."""

    def __init__(self, sampling: SamplingParams, rng: np.random.Generator, support: int = _MSS_SUPPORT) -> None:
        self._sampling = sampling
        self._rng = rng
        self._support = support

    def rank(self, candidates: Candidates, situation: Situation) -> Ranked:
        if candidates.is_point_mass:
            scores = _biased(candidates, self._sampling)
            return _best(candidates, scores, np.exp(np.minimum(scores, 0.0)), situation)
        warped = warp(candidates, self._sampling)
        rows: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int32]] = []
        priors: list[Floats] = []
        proposals: dict[int, Proposal] = {}
        for row in np.flatnonzero(np.isfinite(warped).any(axis=1)).tolist():
            proposal = quantised(candidates.token_ids[row], warped[row], self._support)
            by_rank = draw_priors(proposal, int(situation.limits[row]))
            count = int(np.count_nonzero(by_rank * situation.odds[row] >= situation.least_odds))
            if not count:
                continue
            drawn = draw(proposal, count, self._rng)
            rows.append(np.full(len(drawn), row, np.int64))
            tokens.append(drawn)
            priors.append(by_rank[: len(drawn)])
            proposals[row] = proposal
        if not rows:
            return Ranked(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
        return Ranked(np.concatenate(rows), np.concatenate(tokens), np.concatenate(priors), proposals)

    def extra_ids(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        return _NO_TOKENS

    def width(self, num_children: int) -> int:
        return CANDIDATE_WIDTH


def draw_priors(proposal: Proposal, limit: int) -> Floats:
    """float64[limit]: how likely the j-th draw is to be the accepted one, before anything is calibrated.

    The first draw is accepted more often the more of q sits on few tokens; later ones share what it leaves.
    """
    first = 0.35 + 0.6 * float(np.square(proposal.probs).sum())
    count = min(limit, len(proposal.token_ids))
    return (1.0 - first) ** (np.arange(count) > 0) * first * _SIBLING_DECAY ** np.arange(count)

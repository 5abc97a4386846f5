"""From the target's logits of one step to each generation's accepted nodes, bonus token and log-probabilities.

The one place where sampling parameters (``warp``), noise and verifiers (``verify``) meet, for drafted and undrafted
steps alike: a step without nodes is a tree of size 0.

Not here: cutting the accepted run at end-of-text, stop strings or ``max_tokens`` (the generation does that); which
nodes take part (the scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.server import noise
from paceline.server.shortlist import shortlist
from paceline.server.verify import RandomDice, Verdict, argmax, distribution, first_argmax, match, multi_step, walk
from paceline.server.warp import Rows, edit, finish, warp
from paceline.shared.errors import NumericsError, PacelineError, TreeError
from paceline.shared.messages import Proposal, TokenLogprobs
from paceline.shared.noise import gumbel
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.tree import TokenTree

_DICE = 1
"""Marks the server's own random stream: independent of what a client draws from the same seed."""
_MAX_CELLS = 1 << 27
"""Logits held as float32 at one time on a device: 512 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One generation's part of a step: n+1 consecutive rows of logits (the anchor's first), and what rules them.

    tree: the n nodes that were scored, in the order of their rows.
    sampling, verifier, seed, choice: of the generation; ``seed`` is the one in force (``sampling.seed`` may be None).
    prompt, output: int32 ids of everything committed; their lengths sum to the position of the anchor's next token.
    eos_ids: the model's end-of-text ids; barred, like stop_token_ids, before ``min_tokens`` tokens of output.
    proposals: (row -> drafter -> sparse q), row 0 for the anchor, i+1 for node i; in mss only.
    """

    tree: TokenTree
    sampling: SamplingParams
    verifier: Verifier
    seed: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    choice: int = 0
    eos_ids: tuple[int, ...] = ()
    proposals: Mapping[int, Mapping[int, Proposal]] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Absolute position of the token that the anchor's children propose."""
        return len(self.prompt) + len(self.output)

    @property
    def num_rows(self) -> int:
        """Rows of logits: the anchor's and one for each node."""
        return len(self.tree) + 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What one generation gains from a step: accepted node indices root-down, then the bonus token.

    logprobs: one entry for each accepted node and one for the bonus token if ``sampling.logprobs`` asks for them, else
    empty. They are log-softmax of the target's raw logits (before bias, penalties, temperature and filters).
    """

    nodes: tuple[int, ...]
    bonus: int
    logprobs: tuple[TokenLogprobs, ...] = ()


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> list[Choice | PacelineError]:
    """Decide a whole step. logits: float[R, V] on the target's device, R the sum of ``num_rows``, in request order.

    One entry for each request, in order. An error stands where the target gave no possible token (``NumericsError``) or
    a client's proposals cannot be what its nodes were drawn from (``TreeError``): it ends that generation only.

    On a CPU rows are evaluated along the walk, since most are never reached. On other devices greedy and coupled
    choices of all rows of all generations are made there and come back in one transfer; mss and naive fetch p row by
    row.
    """
    views = _views(logits, requests)
    choices = {} if logits.device.type == "cpu" else choices_on_device(logits, requests)
    outcomes: list[Verdict | PacelineError] = []
    for index, view in enumerate(views):
        known = choices.get(index)
        try:
            outcomes.append(_decide(view, view.token if known is None else known.__getitem__))
        except (NumericsError, TreeError) as error:
            outcomes.append(error)
    logprobs = _logprobs(logits, views, outcomes)
    return [
        outcome if isinstance(outcome, PacelineError) else Choice(outcome.nodes, outcome.bonus, logprobs.get(index, ()))
        for index, outcome in enumerate(outcomes)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """One request's rows within the logits of the step, from ``first`` on, and how to read a single one of them."""

    request: Request
    first: int
    logits: torch.Tensor

    @property
    def is_noisy(self) -> bool:
        """Whether choices are argmax of log p plus noise."""
        return self.request.verifier is Verifier.COUPLED and not self.request.sampling.is_greedy

    @property
    def is_choice(self) -> bool:
        """Whether each row has one choice without random state: greedy, coupled, and all at temperature 0."""
        return self.request.sampling.is_greedy or self.request.verifier in (Verifier.GREEDY, Verifier.COUPLED)

    def key(self, row: int) -> noise.Key:
        """Of the noise at a row: it depends on the position of the row's choice, not on the node."""
        request = self.request
        depth = int(request.tree.depths[row - 1]) if row else 0
        return noise.Key(request.seed, request.choice, request.position + depth)

    def scores(self, row: int) -> tuple[NDArray[np.int64] | None, torch.Tensor]:
        """log p at one row, up to a constant: (None, float32[V]), or (ids, float32[k]) where filters leave few."""
        raw = self.logits[self.first + row]
        if _is_plain(self.request):
            return None, raw.to(torch.float32)
        rows = _rows(self.request, row)
        scores = raw.to(torch.float32, copy=True)
        edit(scores[None], [rows])
        few = shortlist(scores.numpy(), rows.sampling) if scores.device.type == "cpu" else None
        if few is not None:
            return few[0], torch.from_numpy(few[1])
        return None, finish(scores[None], [rows])[0]

    def token(self, row: int) -> int:
        """The greedy or coupled choice at one row."""
        ids, scores = self.scores(row)
        if ids is not None:
            request, key = self.request, self.key(row)
            extra = gumbel(request.seed, key.position, ids, request.choice) if self.is_noisy else np.float32(0.0)
            return int(ids[first_argmax(scores.numpy() + extra)])
        if self.is_noisy:
            scores = noise.gumbel([self.key(row)], len(scores), scores.device)[0].add_(scores)
        return first_argmax(scores.cpu().numpy())

    def probs(self, row: int) -> NDArray[np.float64]:
        """float64[V]: p at one row."""
        ids, scores = self.scores(row)
        if ids is None:
            return distribution(torch.where(scores.isnan(), -torch.inf, scores).softmax(dim=-1).cpu().numpy())
        dense = np.zeros(self.logits.shape[1])
        dense[ids] = distribution(scores.softmax(dim=-1).numpy())
        return dense


def _views(logits: torch.Tensor, requests: Sequence[Request]) -> list[_View]:
    views = []
    first = 0
    for request in requests:
        views.append(_View(request, first, logits))
        first += request.num_rows
    if logits.ndim != 2 or logits.shape[0] != first:
        raise ValueError(f"expected {first} rows of logits for {len(requests)} requests, got {tuple(logits.shape)}")
    return views


def _decide(view: _View, token: Callable[[int], int]) -> Verdict:
    """One walk; the verifier only sets the chooser."""
    request = view.request
    if view.is_choice:
        return walk(request.tree, match(request.tree, token))
    dice = RandomDice(np.random.default_rng([request.seed, request.choice, request.position, _DICE]))
    if request.verifier is Verifier.NAIVE:
        return walk(request.tree, match(request.tree, lambda row: dice.draws(view.probs(row))))
    return walk(request.tree, multi_step(request.tree, view.probs, request.proposals, dice))


def choices_on_device(
    logits: torch.Tensor, requests: Sequence[Request], max_cells: int = _MAX_CELLS
) -> dict[int, NDArray[np.int64]]:
    """Index of a request -> int64[n+1], its greedy or coupled choice at every row (-1: none), decided on the device.

    Requests whose verifier needs p itself are left out. max_cells bounds the float32 logits that exist at one time.
    """
    views = {index: view for index, view in enumerate(_views(logits, requests)) if view.is_choice}
    if not views:
        return {}
    chosen: list[torch.Tensor] = []
    chunk: list[_View] = []
    num_rows = 0
    for view in views.values():
        num_rows += view.request.num_rows
        if chunk and num_rows * logits.shape[1] > max_cells:
            chosen += _argmax_of(chunk)
            chunk, num_rows = [], view.request.num_rows
        chunk.append(view)
    chosen += _argmax_of(chunk)
    flat = torch.cat(chosen).cpu().numpy()
    ends = np.cumsum([len(best) for best in chosen])[:-1]
    return dict(zip(views, np.split(flat, ends), strict=True))


def _argmax_of(views: Sequence[_View]) -> list[torch.Tensor]:
    """Choices of all rows of each request, as tensors that have not left the device yet."""
    spans = [slice(view.first, view.first + view.request.num_rows) for view in views]
    if all(_is_plain(view.request) and not view.is_noisy for view in views):
        return [argmax(view.logits[span]) for view, span in zip(views, spans, strict=True)]
    scores = torch.cat([view.logits[span] for view, span in zip(views, spans, strict=True)]).to(torch.float32)
    warp(scores, [_rows(view.request) for view in views])
    counts = [view.request.num_rows for view in views]
    keys = [view.key(row) for view in views if view.is_noisy for row in range(view.request.num_rows)]
    if keys:
        values = noise.gumbel(keys, scores.shape[1], scores.device)
        noisy = np.flatnonzero(np.repeat([view.is_noisy for view in views], counts))
        scores.index_add_(0, torch.from_numpy(noisy).to(scores.device), values)
    return list(argmax(scores).split(counts))


def _is_plain(request: Request) -> bool:
    """Whether the raw logits already are log p up to a constant."""
    sampling = request.sampling
    edited = sampling.has_penalties or bool(sampling.logit_bias) or sampling.min_tokens > len(request.output)
    filtered = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return not edited and (sampling.is_greedy or (sampling.temperature == 1.0 and not filtered))


def _rows(request: Request, row: int | None = None) -> Rows:
    """What ``warp`` needs for one row of a request, or for all of them."""
    tree = request.tree
    if row is None:
        nodes, ancestors = np.nonzero(tree.ancestor_mask())
        path_rows, path = nodes.astype(np.int64) + 1, ancestors
    else:
        path = np.array(tree.path(row - 1) if row else [], np.int64)
        path_rows = np.zeros(len(path), np.int64)
    return Rows(
        count=request.num_rows if row is None else 1,
        sampling=request.sampling,
        path_rows=path_rows,
        path_tokens=tree.tokens[path].astype(np.int64),
        prompt=request.prompt,
        output=request.output,
        barred=(*request.eos_ids, *request.sampling.stop_token_ids),
    )


def _logprobs(
    logits: torch.Tensor, views: Sequence[_View], outcomes: Sequence[Verdict | PacelineError]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Request index -> one entry for each token that it emits, for requests that asked; one gather for all of them."""
    wanted: dict[int, list[int]] = {}
    rows: list[int] = []
    for index, (view, outcome) in enumerate(zip(views, outcomes, strict=True)):
        if isinstance(outcome, Verdict) and view.request.sampling.logprobs is not None:
            wanted[index] = [*(int(view.request.tree.tokens[node]) for node in outcome.nodes), outcome.bonus]
            rows += [view.first, *(view.first + node + 1 for node in outcome.nodes)]
    if not rows:
        return {}
    table = logits[torch.tensor(rows, device=logits.device)].to(torch.float32)
    if bool(table.amax(dim=-1).isnan().any()):
        table.masked_fill_(table.isnan(), -torch.inf)
    table = table.log_softmax(dim=-1)
    num_top = max(views[index].request.sampling.logprobs or 0 for index in wanted)
    tops = likeliest(table, num_top)
    tokens = torch.tensor([token for ids in wanted.values() for token in ids], device=logits.device)
    own = table.gather(1, tokens[:, None])[:, 0].tolist()
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    start = 0
    for index, ids in wanted.items():
        count = views[index].request.sampling.logprobs or 0
        places = range(start, start + len(ids))
        found[index] = tuple(TokenLogprobs(own[place], tuple(tops[place][:count])) for place in places)
        start += len(ids)
    return found


def likeliest(table: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row of float[r, V] its ``count`` largest entries as (id, value), best first, ties by lowest id."""
    if count == 0:
        return [[] for _ in range(table.shape[0])]
    best = table.topk(min(count + 1, table.shape[1]))
    if count < table.shape[1] and bool((best.values[:, -1] == best.values[:, -2]).any()):
        return [_likeliest_of(row, count) for row in table.cpu().numpy()]  # a tie at the cut: topk takes any of them
    found = [list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [sorted(row, key=lambda entry: (-entry[1], entry[0]))[:count] for row in found]


def _likeliest_of(row: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    order = np.lexsort((np.arange(len(row)), -row))[:count]
    return [(int(token), float(row[token])) for token in order]

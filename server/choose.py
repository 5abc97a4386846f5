"""From the target's logits of one step to each generation's accepted nodes, bonus token and log-probabilities.

The one place where sampling parameters (``warp``), noise and verifiers (``verify``) meet, for drafted and undrafted
steps alike: a step without nodes is a tree of size 0.

Not here: cutting the accepted run at end-of-text, stop strings or ``max_tokens`` (the generation does that); which
nodes take part (the scheduler).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.shared.errors import PacelineError
from paceline.shared.messages import Proposal, TokenLogprobs
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.tree import TokenTree


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
    """

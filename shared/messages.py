"""The messages of the stream protocol, as frozen values (DESIGN.md section 5). Bytes are the business of ``wire``.

    client -> server   Hello, Open, Grow, Cancel
    server -> client   Welcome, Opened, Commit, Fault, Closing

Token positions count from 0 at the first prompt token. A generation's number means something on its own connection.
Node ids count up from 0 within a generation, across frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from paceline.shared.sampling import SamplingParams, Verifier

PROTOCOL_VERSION = 1
ANCHOR_ID = -1
"""The parent id of a node that hangs directly below its frame's anchor."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection. tokenizer: hex sha-256 of the client's tokenizer, or "" without one.

    padding: unit of the size classes that frames shall have, both ways (``padding``); 0 asks for nothing.
    """

    protocol: int
    client: str
    tokenizer: str = ""
    model: str = ""
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server accepts. Exceeding one is a ``LimitError``, named."""

    max_frame_bytes: int = 1 << 20
    max_frame_nodes: int = 256
    max_live_nodes: int = 1024
    max_depth: int = 64
    max_generations: int = 64
    max_context: int = 8192


@dataclass(frozen=True, slots=True)
class StepTime:
    """The server's step-time model t(n) = base_s + per_row_s * n seconds for n packed rows."""

    base_s: float
    per_row_s: float

    def at(self, rows: float) -> float:
        """Seconds for a step of that many rows."""
        return self.base_s + self.per_row_s * rows


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's answer to Hello: what it serves and what it accepts.

    padding: the unit that holds for this connection, both ways: the larger of what either side asks for.
    """

    protocol: int
    model: str
    tokenizer: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    limits: Limits
    step_time: StepTime
    fingerprint: str = ""
    padding: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """Start a generation, or go on with one after a lost link: resume is open-with-prefix.

    prompt, committed: int32 token ids; ``committed`` is the output that the client already holds.
    choice: index among n choices of one request, part of the noise's key. patience_s: None leaves it to the server.
    """

    generation: int
    prompt: NDArray[np.int32]
    sampling: SamplingParams
    verifier: Verifier
    committed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    choice: int = 0
    patience_s: float | None = None
    drafting: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The sparse q of one drafter below one parent before any draw: token_ids int32[k], probs float64[k], summing to 1.

    What travels is its quantised form (``quantise``): the q that is verified is bit for bit the q that was drawn from.
    """

    token_ids: NDArray[np.int32]
    probs: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Grow:
    """Propose nodes. Node i has id first_id + i and token tokens[i] below parents[i]: an earlier id, or ANCHOR_ID.

    at: position that a child of the anchor proposes for; the client believes that tokens 0..at-1 are committed.
    drafters: uint8[n], which drafter drew each node. proposals: (parent id, drafter) -> q, in mss only.
    """

    generation: int
    at: int
    first_id: int
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    drafters: NDArray[np.uint8] | None = None
    proposals: Mapping[tuple[int, int], Proposal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a generation and free it."""

    generation: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The generation runs. cached_tokens: prompt tokens whose KV was found in the prefix cache."""

    generation: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the target at one position: the chosen token's, and the likeliest ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """Tokens that are final from now on.

    at: position of tokens[0]. num_drafted: how many of them were accepted nodes. num_scored: nodes that this step
    evaluated. node_budget: how many nodes the server will score per step for this generation. step_s: seconds that the
    step took. finish: set on the last commit of a generation. logprobs: one entry per token if asked for.
    """

    generation: int
    at: int
    tokens: NDArray[np.int32]
    num_drafted: int
    num_scored: int
    node_budget: int
    step_s: float
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """An error: code from the error tree, one sentence, and the generation that it ended (None: the connection)."""

    code: str
    message: str
    generation: int | None = None
    param: str = ""


@dataclass(frozen=True, slots=True)
class Closing:
    """The server drains: generations that are not finished within grace_s seconds should resume elsewhere."""

    grace_s: float


ClientMessage = Hello | Open | Grow | Cancel
ServerMessage = Welcome | Opened | Commit | Fault | Closing
Message = ClientMessage | ServerMessage

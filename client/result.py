"""What a caller of the client gets: pieces of text as they come, and the figures at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.shared.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token added, and whether that token was drafted."""

    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit brought. token_ids and drafted belong together; text may lag behind by an unfinished character.

    drafted: for each token, whether it was an accepted draft node. logprobs: under the target, if asked for.
    pieces: the text token by token. finish_reason: set on the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one completion. Times in seconds, sizes in bytes of websocket payload.

    verify_steps: target forward passes that committed something. tokens_per_step: the mean accepted length, bonus token
    included. drafted: nodes sent. accepted: output tokens that were nodes. ttft_s: from the request to the first token.
    """

    verify_steps: int
    tokens_per_step: float
    drafted: int
    accepted: int
    bytes_up: int
    bytes_down: int
    ttft_s: float
    total_s: float
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. explanation: what the speculation controller chose last, and why."""

    text: str
    prompt_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    explanation: str = ""

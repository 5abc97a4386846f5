"""What a client session tells its owner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.shared.errors import PacelineError
from paceline.shared.messages import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Started:
    """The server took the generation. cached_tokens: prompt tokens that it did not have to compute."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Output that is final. at: position of the first. drafted: bool[n], which of them were accepted nodes."""

    at: int
    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is over."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The server ended the generation with an error."""

    error: PacelineError


Event = Started | Tokens | Finished | Failed

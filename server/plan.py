"""What ``Engine.next_step`` answers: a step to run, or a time to ask again. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.batch import Batch, Segment
from paceline.server.livetree import LaidOut
from paceline.server.participant import Participant


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One participant's share of a step: ``num_tokens`` committed tokens from ``base_len`` on, then the nodes.

    is_scored: whether the share reaches the last committed token, so that something is chosen.
    """

    participant: Participant
    base_len: int
    num_tokens: int
    laid_out: LaidOut
    is_scored: bool

    def segment(self) -> Segment:
        """The part as the target sees it."""
        assert self.participant.sequence is not None
        tokens = self.participant.generation.tokens[self.base_len : self.base_len + self.num_tokens].copy()
        return Segment(self.participant.sequence, self.base_len, tokens, self.laid_out.tree, self.is_scored)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: what the target shall run, and whose rows they are. started_at: the engine's clock at its start."""

    batch: Batch
    parts: tuple[Part, ...]
    started_at: float

    @classmethod
    def of(cls, parts: list[Part], now: float) -> StepPlan:
        """The step of these parts, in their order."""
        return cls(Batch(tuple(part.segment() for part in parts)), tuple(parts), now)


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing to run before this time, unless a message comes first."""

    at: float

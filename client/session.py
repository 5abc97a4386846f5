"""One generation on the client, sans-IO: the truth of its text, and a tree that never stops growing.

Feed it what arrived and the time, take what is to be sent:

    session.open(now)
    session.receive(message, now) -> events          commits, the end, errors
    session.next_draft(drafter, now) -> request      work for one drafter, or None; at most one is out for each
    session.drafted(drafter, candidates, now)        the answer to it
    session.outgoing(now) -> messages                to be called after each of the above

It never waits: commits arrive while drafters work, answers about nodes that died meanwhile are dropped, and what
survives a commit keeps its place with its KV. After a lost link ``reopen`` goes on from the tokens held here: resume is
open-with-prefix (DESIGN.md section 5).

Not here: sockets, threads and clocks (``stream``), text (``text``), the tree (``growth``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import Candidates, Drafter, DraftRequest
from paceline.client.drafting.live_tree import LiveTree
from paceline.client.drafting.policy import BestFirstPolicy, Conditions, Policy, Prospect
from paceline.client.drafting.ranking import make_ranking
from paceline.client.events import Event, Failed, Finished, Started, Tokens
from paceline.client.faults import error_from_fault
from paceline.client.flight import Flight
from paceline.client.growth import Growth, join_frames
from paceline.client.hold import Hold
from paceline.shared.errors import PacelineError, ProtocolError
from paceline.shared.messages import (
    Cancel,
    ClientMessage,
    Commit,
    Fault,
    FinishReason,
    Grow,
    Open,
    Opened,
    ServerMessage,
    Welcome,
)
from paceline.shared.sampling import SamplingParams, Verifier

_MAX_TIMED_ROWS = 40
"""Calls with more rows than this are prefill: they say nothing about the price of a level."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What a generation is to write. sampling.seed must be set unless it is greedy.

    prompt: int32 token ids. committed: int32 output already held. choice: index among n choices. patience_s: how long
    the server may hold a step back for a draft, None leaves it to the server.
    """

    prompt: NDArray[np.int32]
    sampling: SamplingParams
    verifier: Verifier
    committed: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    choice: int = 0
    patience_s: float | None = None


@dataclass(slots=True)
class SessionStats:
    """Counts since the start. drafted: nodes sent. accepted: output tokens that were nodes (cut-off ones don't count).

    scored: nodes that the server evaluated. draft_calls: requests answered by drafters. reopened: lost links survived.
    """

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    scored: int = 0
    draft_calls: int = 0
    reopened: int = 0


class ClientSession:
    """See the module's text. Not thread-safe: one owner calls it. ``now`` is seconds on any monotonic clock."""

    def __init__(
        self,
        generation: int,
        task: Task,
        welcome: Welcome,
        drafters: Sequence[Drafter] = (),
        *,
        policy: Policy | None = None,
        acceptance: Acceptance | None = None,
        controller: Controller | None = None,
    ) -> None:
        """acceptance outlives the session if it is shared. Raises ``ValueError`` if a seed is needed and missing."""
        self.generation = generation
        self.task = task
        self.stats = SessionStats()
        self.finish: FinishReason | None = None
        self.error: PacelineError | None = None
        self.controller = controller or Controller(welcome.step_time, welcome.limits)
        self._welcome = welcome
        self._drafters = tuple(drafters)
        self._growth = Growth(
            [*task.prompt.tolist(), *task.committed.tolist()],
            drafters,
            policy or BestFirstPolicy(),
            acceptance or Acceptance(),
            make_ranking(task.verifier, task.sampling, task.choice, welcome.vocab_size),
            draws=task.verifier is Verifier.MSS and not task.sampling.is_greedy,
            closing_ids=_closing_ids(task.sampling, welcome),
        )
        self._asked_at = [0.0] * len(self._drafters)
        self._retired: set[int] = set()
        self._hold = Hold(self._growth.tree, self.controller, self._prospect)
        self._flight = Flight(self._growth.tree, self.controller)
        models = [number for number, drafter in enumerate(self._drafters) if not drafter.is_instant]
        self._main_drafter = models[0] if models else None
        self._outbox: list[ClientMessage] = []
        self._is_open = False

    @property
    def num_drafters(self) -> int:
        """How many drafters may be asked."""
        return len(self._drafters)

    @property
    def tree(self) -> LiveTree:
        """The live tree, for reading."""
        return self._growth.tree

    @property
    def output(self) -> NDArray[np.int32]:
        """int32: all output tokens that are final."""
        return np.array(self._growth.tokens[len(self.task.prompt) :], np.int32)

    @property
    def num_committed(self) -> int:
        """Final tokens, prompt included: the position of the next one."""
        return len(self._growth.tokens)

    @property
    def num_output(self) -> int:
        """Final output tokens."""
        return len(self._growth.tokens) - len(self.task.prompt)

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish is not None or self.error is not None

    def max_depth(self, drafter: int | None = None) -> int:
        """The deepest node that can still matter: the very last token comes from the target anyway (U087).

        drafter: also keep within that drafter's context.
        """
        room = self._welcome.limits.max_context - self.num_committed
        if self.task.sampling.max_tokens is not None:
            room = min(room, self.task.sampling.max_tokens - self.num_output)
        depth = room - 1
        if drafter is not None:
            depth = min(depth, self._drafters[drafter].max_context - self.num_committed)
        return max(0, depth)

    def open(self, now: float) -> None:
        """Ask the server for the generation, with whatever output is held already."""
        del now
        self._is_open = True
        task = self.task
        drafts = bool(self._drafters)
        opening = Open(
            self.generation,
            task.prompt,
            task.sampling,
            task.verifier,
            self.output,
            task.choice,
            task.patience_s,
            drafts,
        )
        self._outbox.append(opening)

    def reopen(self, generation: int, welcome: Welcome, now: float) -> None:
        """Go on after a lost link, as another generation on whatever server answered. Nothing committed is lost."""
        self.generation = generation
        self._welcome = welcome
        self.stats.reopened += 1
        self._outbox.clear()
        self._growth.restart()
        self._flight.restart()
        self.open(now)
        self._grow()

    def cancel(self) -> None:
        """Stop here; the server frees the generation."""
        if not self.is_done:
            self.finish = FinishReason.CANCELLED
            self._outbox = [Cancel(self.generation)] if self._is_open else []

    def receive(self, message: ServerMessage, now: float) -> list[Event]:
        """Take a message of this generation. Raises ``ProtocolError`` for a commit that does not continue the text."""
        if self.is_done:
            return []
        match message:
            case Opened():
                return [Started(message.cached_tokens)]
            case Commit():
                return self._commit(message, now)
            case Fault():
                self.error = error_from_fault(message)
                return [Failed(self.error)]
            case _:
                raise ProtocolError(f"expected opened, commit or fault, got {type(message).__name__.lower()}")

    def _commit(self, commit: Commit, now: float) -> list[Event]:
        events: list[Event] = []
        num_known = self._num_known(commit)
        fresh = commit.tokens[num_known:]
        if len(fresh):
            at = self.num_committed
            drafted = (np.arange(len(commit.tokens)) < commit.num_drafted)[num_known:]
            self.controller.observe_commit(commit, top_hit=self._growth.commit(fresh))
            self._flight.on_commit(now, commit.num_scored)
            self.stats.verify_steps += 1
            self.stats.accepted += int(drafted.sum())
            self.stats.scored += commit.num_scored
            events.append(Tokens(at, fresh, drafted, commit.logprobs[num_known:]))
        if commit.finish is not None:
            self.finish = commit.finish
            events.append(Finished(commit.finish))
        self._grow()
        if self._main_drafter is not None and not self.is_done:
            call = self.controller.call_cost(self._main_drafter)
            self._hold.on_commit(now, call.base_s + call.per_row_s)
        return events

    def _prospect(self) -> Prospect:
        """What the next call of the main drafter is expected to bring."""
        number = self._main_drafter or 0
        return self._growth.prospect(number, self._conditions(number), self.controller.call_cost(number))

    def _num_known(self, commit: Commit) -> int:
        """How many of a commit's tokens are held. Exactly once, by position: gaps and other texts are refused."""
        overlap = self.num_committed - commit.at
        if overlap < 0:
            raise ProtocolError(f"expected a commit at position {self.num_committed}, got one at {commit.at}")
        if commit.at < len(self.task.prompt):
            raise ProtocolError(f"expected a commit behind the prompt, got one at position {commit.at}")
        num_known = min(overlap, len(commit.tokens))
        held = self._growth.tokens[commit.at : commit.at + num_known]
        if held != commit.tokens[:num_known].tolist():
            raise ProtocolError(f"expected the text from position {commit.at} to stay as it is, got another one")
        return num_known

    def next_draft(self, drafter: int, now: float) -> DraftRequest | None:
        """Work for drafter number ``drafter``, or None: it has a request out, or there is nothing worth asking."""
        if self.is_done or self._growth.is_asked(drafter) or self.max_depth(drafter) < 1 or drafter in self._retired:
            return None
        if drafter == self._main_drafter:
            self._hold.on_ask(now)
        request = self._growth.next_request(
            drafter, self._conditions(drafter), self.controller.call_cost(drafter), probes=self.controller.probes
        )
        if request is None and drafter == self._main_drafter:
            self._hold.on_answer()
        self._asked_at[drafter] = now
        return request

    def drafted(self, drafter: int, candidates: Candidates, now: float) -> None:
        """Take the answer to the request that drafter number ``drafter`` has out.

        Raises ``ProtocolError`` if it has none out.
        """
        request = self._growth.answered(drafter)
        if drafter == self._main_drafter:
            self._hold.on_answer()
        num_rows = len(request.token_ids) + len(request.keys)
        if num_rows <= _MAX_TIMED_ROWS:
            self.controller.observe_call(drafter, num_rows, now - self._asked_at[drafter])
        self.stats.draft_calls += 1
        if not self.is_done:
            most, conditions = self._welcome.limits.max_frame_nodes, self._conditions(drafter)
            self._outbox.extend(self._growth.take(request, candidates, conditions, self.generation, most))
            self._grow()

    def retire(self, drafter: int) -> None:
        """A drafter broke: never ask it again. The text goes on with the others, or plain."""
        self._retired.add(drafter)
        if drafter == self._main_drafter:
            self._main_drafter = None

    def _conditions(self, drafter: int | None = None) -> Conditions:
        return self.controller.conditions(self.max_depth(drafter), drafter or 0, scored_id=self._flight.scored_id)

    def outgoing(self, now: float) -> list[ClientMessage]:
        """What is to be sent now, in order. Frames that directly follow each other travel as one."""
        messages, self._outbox = self._outbox, []
        if self._main_drafter is not None and not self.is_done and self._hold.is_held(now):
            self._outbox = [message for message in messages if isinstance(message, Grow)]
            messages = [message for message in messages if not isinstance(message, Grow)]
        return self._flight.on_sent(now, join_frames(messages, self._welcome.limits.max_frame_nodes))

    def _grow(self) -> None:
        """Queue what has become worth sending, so that it can be expanded at once."""
        if self._is_open and not self.is_done and self._drafters:
            most = self._welcome.limits.max_frame_nodes
            self._outbox.extend(self._growth.frames(self.generation, self._conditions(), most))
            self.stats.drafted = self._growth.num_sent


def _closing_ids(sampling: SamplingParams, welcome: Welcome) -> tuple[int, ...]:
    """Tokens that end the text: nothing can follow them in a tree."""
    ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(welcome.eos_ids))
    return tuple(sorted(ids))

"""The engine's core: which generations run, and one step after another for all of them. No thread, no socket, no clock.

    plan = engine.next_step(now)                 schedule: who takes part, with which rows; KV reserved
    logits = target.forward(plan.batch)          run: the caller does it
    messages = engine.finish(plan, logits, now)  choose, commit, roll back

Three drivers use it: the engine thread (``driver``), the tests, and the simulator on a virtual clock. Between
``next_step`` and ``finish`` frames may be fed and generations cancelled. What is wrong with one generation ends that
one with a ``Fault``; the engine and the others go on.

Not here: how tokens are chosen (``choose``), how rows are shared out (``load``, ``scheduler``), what a frame means
(``livetree``), who holds KV (``roster``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.server.acceptance import NodeBudget
from paceline.server.choose import Choice, Request, choose
from paceline.server.counters import EngineCounters
from paceline.server.generation import Generation, OutputRules
from paceline.server.load import shares
from paceline.server.overload import overloaded
from paceline.server.participant import Key, Participant
from paceline.server.patience import Habits, Patience
from paceline.server.plan import Part, StepPlan, Wake
from paceline.server.roster import Roster
from paceline.server.scheduler import Share, StepLimits
from paceline.server.steptime import StepTimeModel
from paceline.server.target import Target
from paceline.shared.detokenize import Decode
from paceline.shared.errors import ContextError, PacelineError, ProtocolError
from paceline.shared.messages import Commit, Fault, FinishReason, Grow, Limits, Open, Opened, ServerMessage, StepTime
from paceline.shared.sampling import Verifier

Outbox = list[tuple[Key, ServerMessage]]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """max_running: generations that share steps. max_queue: generations that may wait for a place; more are refused.

    max_nodes: nodes scored per generation and step at most. patience_s: for generations that state no wish of their
    own; None is adaptive. limits: what the server accepts of a client.
    """

    max_running: int = 64
    max_queue: int = 256
    max_nodes: int = 128
    patience_s: float | None = None
    limits: Limits = field(default_factory=Limits)
    step_limits: StepLimits = field(default_factory=StepLimits)
    step_time: StepTime = field(default_factory=lambda: StepTime(0.01, 0.0001))


class Engine:
    """See the module's text. Not thread-safe: one thread owns it. ``now`` is seconds on any monotonic clock.

    decode: the target's tokenizer, ids to text, for stop strings; None refuses them.
    """

    def __init__(self, target: Target, settings: EngineSettings, decode: Decode | None = None) -> None:
        self.target = target
        self.settings = settings
        self.counters = EngineCounters()
        self.step_times = StepTimeModel(settings.step_time)
        # One block stays free for the copy that a write into a shared block makes.
        room = target.pool.num_slots - target.pool.block_size
        context = min(target.info.max_context, settings.limits.max_context, room)
        self.rules = OutputRules(target.info.vocab_size, target.info.eos_token_ids, context, decode)
        self._roster = Roster(target.pool, settings.max_running)
        self._outbox: Outbox = []
        self._in_flight: StepPlan | None = None
        self._habits: dict[int, Habits] = {}

    @property
    def num_running(self) -> int:
        """Generations that share steps."""
        return self._roster.num_running

    @property
    def num_waiting(self) -> int:
        """Generations that wait for a place or for KV."""
        return self._roster.num_waiting

    @property
    def num_preempted(self) -> int:
        """How often a generation lost its KV to an older one."""
        return self._roster.num_preempted

    @property
    def is_idle(self) -> bool:
        """Whether nobody runs or waits."""
        return not self.num_running and not self.num_waiting

    def find(self, key: Key) -> Participant | None:
        """The running or waiting generation of that key."""
        return self._roster.find(key)

    def open(self, key: Key, request: Open, now: float) -> None:
        """Queues a generation.

        Raises ``ParameterError``, ``ContextError``, ``BusyError`` or ``ProtocolError``; nothing has changed then.
        """
        if self.find(key) is not None:
            raise ProtocolError(f"expected a new generation number, got {key[1]}, which is in use")
        if self.num_running + self.num_waiting >= self.settings.max_running + self.settings.max_queue:
            numbers = (self.num_running, self.num_waiting, self.settings.max_queue)
            raise overloaded(self.counters, self.step_times.current, *numbers)
        generation = Generation(request, self.rules, self.settings.limits)
        wish = self.settings.patience_s if request.patience_s is None else request.patience_s
        max_nodes = min(self.settings.max_nodes, self.settings.limits.max_live_nodes) if request.drafting else 0
        # One client, one link and one draft stand behind a connection: what was learnt about them holds on.
        habits = self._habits.setdefault(key[0], Habits()) if request.drafting else None
        self._roster.enter(Participant(key, generation, NodeBudget(max_nodes), Patience(wish, habits), now))
        self.counters.num_opened += 1

    def grow(self, key: Key, frame: Grow, now: float) -> None:
        """Feeds a frame. One for a generation that is not there came too late and is dropped; a wrong one ends it."""
        participant = self.find(key)
        if participant is None:
            self.counters.num_stale += len(frame.tokens)
            return
        live = participant.generation.live
        num_stale = live.num_stale
        try:
            growth = participant.generation.grow(frame)
            participant.budget.observe(growth.judged, growth.accepted)
            participant.patience.on_frame(now, frame.at)
        except PacelineError as error:
            self._fail(participant, error)
        self.counters.num_stale += live.num_stale - num_stale

    def cancel(self, key: Key, *, quiet: bool = False) -> None:
        """Ends a generation and frees it at once. quiet: nobody is there any more to be told."""
        participant = self.find(key)
        if participant is None:
            return
        self._roster.remove(participant)
        self.counters.num_cancelled += 1
        if not quiet:
            nothing = (participant.generation.length, np.zeros(0, np.int32), 0, 0, 0, 0.0)
            self._outbox.append((key, Commit(key[1], *nothing, FinishReason.CANCELLED)))

    def disconnect(self, connection: int) -> None:
        """Frees everything that belonged to a connection."""
        self._habits.pop(connection, None)
        for participant in list(self._roster):
            if participant.key[0] == connection:
                self.cancel(participant.key, quiet=True)

    def take_messages(self) -> Outbox:
        """What there is to be told, in order, and forgets it."""
        messages, self._outbox = self._outbox, []
        return messages

    def next_step(self, now: float) -> StepPlan | Wake | None:
        """The next step, or when to ask again if all are held back, or None if there is nothing to do."""
        assert self._in_flight is None, "the step in flight must be finished first"
        while not self.is_idle:
            self._admit()
            participants, wake = self._runnable(now)
            if not participants:
                return None if wake is None else Wake(wake)
            wanted = shares(participants, self.settings.step_limits, self.step_times.current)
            parts = self._reserve(participants, wanted)
            if parts:
                self._in_flight = StepPlan.of(parts, now)
                self._roster.take_off()
                return self._in_flight
        return None

    def finish(self, plan: StepPlan, logits: torch.Tensor, now: float) -> Outbox:
        """Commits what the target chose and returns everything there is to be told.

        logits: float[R, vocab_size], as ``Target.forward`` returns them for ``plan.batch``.
        """
        scored = [part for part in plan.parts if part.is_scored]
        outcomes = choose(logits, [self._request(part) for part in scored]) if scored else []
        seconds = max(now - plan.started_at, 0.0)
        self._land(plan, seconds)
        for part in plan.parts:
            if not part.is_scored and self._roster.is_running(part.participant):
                self._commit_prefill(part)
        for part, outcome in zip(scored, outcomes, strict=True):
            if not self._roster.is_running(part.participant):
                continue
            if isinstance(outcome, PacelineError):
                self._fail(part.participant, outcome)
            else:
                self._commit(part, outcome, seconds, now)
        return self.take_messages()

    def abort(self, plan: StepPlan, error: PacelineError, now: float) -> Outbox:
        """Ends every generation of a step that the target could not run."""
        self._land(plan, max(now - plan.started_at, 0.0))
        for part in plan.parts:
            if self._roster.is_running(part.participant):
                self._fail(part.participant, error)
        return self.take_messages()

    def _land(self, plan: StepPlan, seconds: float) -> None:
        self._in_flight = None
        self._roster.land()
        self.step_times.observe(plan.batch.num_rows, seconds)
        self.counters.num_steps += 1
        self.counters.num_rows += plan.batch.num_rows
        self.counters.step_seconds += seconds

    def _admit(self) -> None:
        for participant in self._roster.admit():
            if not participant.was_opened:
                participant.was_opened = True
                self.counters.num_prompt_tokens += participant.generation.prompt_len
                self.counters.num_cached_tokens += participant.cached_len
                self._outbox.append((participant.key, Opened(participant.key[1], participant.cached_len)))

    def _runnable(self, now: float) -> tuple[list[Participant], float | None]:
        """Who takes part now, and if nobody does, until when to wait.

        A generation that is held back joins anyway when others run: it would lose a whole step, and a row costs little.
        Not if its client asked for a wait.
        """
        held: dict[Key, float] = {}
        for participant in self._roster.running:
            if participant.num_missing == 1 and not participant.has_nodes:
                until = participant.patience.hold_until(self.step_times.current, participant.budget.expected)
                if until > now:
                    held[participant.key] = until
        if len(held) == self.num_running:
            return [], min(held.values(), default=None)
        return [one for one in self._roster.running if one.key not in held or not one.patience.is_strict], None

    def _reserve(self, participants: Sequence[Participant], shares: Sequence[Share]) -> list[Part]:
        """Takes KV room for everybody's rows, most senior first."""
        parts: list[Part] = []
        for participant, share in zip(participants, shares, strict=True):
            if not share.num_tokens or not self._roster.is_running(participant):
                continue
            try:
                part = self._roster.fit(participant, share)
            except MemoryError as error:
                self._fail(participant, ContextError(str(error)))
                continue
            if part is not None:
                parts.append(part)
        return parts

    def _request(self, part: Part) -> Request:
        generation = part.participant.generation
        sampling = generation.sampling
        return Request(
            tree=part.laid_out.tree,
            sampling=sampling,
            verifier=Verifier.GREEDY if sampling.is_greedy else generation.request.verifier,
            seed=sampling.seed or 0,
            prompt=generation.tokens[: generation.prompt_len],
            output=generation.tokens[generation.prompt_len :],
            choice=generation.request.choice,
            eos_ids=self.rules.eos_ids,
            proposals=part.laid_out.proposals,
        )

    def _commit_prefill(self, part: Part) -> None:
        participant = part.participant
        assert participant.sequence is not None
        self.target.pool.commit(participant.sequence, part.base_len, range(part.num_tokens))
        participant.cached_len = part.base_len + part.num_tokens
        self.target.pool.publish(participant.sequence, participant.generation.tokens[: participant.cached_len])

    def _commit(self, part: Part, outcome: Choice, seconds: float, now: float) -> None:
        participant, generation = part.participant, part.participant.generation
        assert participant.sequence is not None
        waiting = generation.live.ids
        committed = generation.commit(outcome.nodes, outcome.bonus, part.laid_out)
        num_scored, num_committed = len(part.laid_out.tree), len(committed.tokens)
        rows = [*range(part.num_tokens), *(part.num_tokens + node for node in outcome.nodes[: committed.num_drafted])]
        self.counters.kv_bytes_moved += self.target.pool.commit(participant.sequence, part.base_len, rows)
        participant.cached_len = part.base_len + len(rows)
        self.target.pool.publish(participant.sequence, generation.tokens)
        participant.num_verified += num_scored
        participant.budget.observe(*generation.live.judge(waiting))
        participant.patience.on_commit(
            now,
            generation.length,
            num_tokens=num_committed,
            num_scored=num_scored,
            has_nodes=participant.has_nodes,
        )
        self.counters.num_drafted_steps += num_scored > 0
        self.counters.num_scored += num_scored
        self.counters.num_accepted += committed.num_drafted
        self.counters.num_committed += num_committed
        if committed.finish is not None:
            self._roster.remove(participant)
            self.counters.num_finished += 1
        message = Commit(
            generation=participant.key[1],
            at=committed.at,
            tokens=committed.tokens,
            num_drafted=committed.num_drafted,
            num_scored=num_scored,
            node_budget=participant.budget.current,
            step_s=seconds,
            finish=committed.finish,
            logprobs=outcome.logprobs[:num_committed],
        )
        self._outbox.append((participant.key, message))

    def _fail(self, participant: Participant, error: PacelineError) -> None:
        self._roster.remove(participant)
        self.counters.num_faults += 1
        fault = Fault(error.code, str(error), participant.key[1], getattr(error, "param", ""))
        self._outbox.append((participant.key, fault))

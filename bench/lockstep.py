"""Client sessions and one engine in lockstep, in one process, without sockets or threads: a pair's answers and counts.

Every round drafters answer a bounded number of calls, frames travel for a number of rounds, and the engine runs one
step for all. So late and stale frames occur as over a network, but the order of events is the same in every run. Used
to prove equality and to count accepted tokens; it says nothing about time (``simulator`` and ``real`` do).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import Drafter, DraftSequence
from paceline.client.drafting.live_tree import ANCHOR_ROW, LiveTree
from paceline.client.drafting.policy import Policy
from paceline.client.session import ClientSession, SessionStats, Task
from paceline.server.engine import Engine
from paceline.server.plan import Wake
from paceline.shared.messages import PROTOCOL_VERSION, Cancel, ClientMessage, Commit, Grow, Open, ServerMessage, Welcome
from paceline.shared.wire import decode, encode

ROUND_S = 0.02
"""Virtual seconds of one round."""
NO_DRAFTER = -1


@dataclass(frozen=True, slots=True)
class LockstepSettings:
    """num_parallel: generations in flight. delay: rounds that a frame travels, each way. calls: drafter calls a round
    and drafter at most, by turns. make_policy: a fresh tree policy for each session, None for the session's own.
    can_switch: False keeps speculation on whatever it yields. acceptance: shared by all sessions, None for their own.
    """

    num_parallel: int = 4
    delay: int = 0
    calls: int = 8
    make_policy: Callable[[], Policy] | None = None
    can_switch: bool = True
    acceptance: Acceptance | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Output ids of a task, which of them were accepted nodes, and the session's counts.

    proposers: int8, the drafter that proposed each accepted node first, ``NO_DRAFTER`` for the target's own tokens.
    """

    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    stats: SessionStats
    proposers: NDArray[np.int8]


class _Stream:
    """One task's session with its drafters' sequences and the frames under way."""

    def __init__(self, number: int, session: ClientSession, drafters: Sequence[Drafter]) -> None:
        self.number = number
        self.session = session
        self.drafters = drafters
        self.sequences: list[DraftSequence] = [drafter.start() for drafter in drafters]
        self.up: deque[tuple[int, bytes]] = deque()
        self.down: deque[tuple[int, bytes]] = deque()
        self.drafted: list[bool] = []
        self.proposers: list[int] = []

    def draft(self, calls: int, now: float) -> None:
        """Let the drafters answer by turns until they have nothing to do, or ``calls`` times each.

        An instant drafter answers until it has nothing to do, as in a client, where that takes no time.
        """
        for _ in range(calls):
            asked = [
                self._answer(index, calls if drafter.is_instant else 1, now)
                for index, drafter in enumerate(self.drafters)
            ]
            if not any(asked):
                break

    def _answer(self, index: int, calls: int, now: float) -> bool:
        """Whether a drafter had anything to do; it is asked ``calls`` times at most."""
        for number in range(calls):
            request = self.session.next_draft(index, now)
            if request is None:
                return number > 0
            self.session.drafted(index, self.sequences[index].expand(request), now)
        return True

    def receive(self, message: ServerMessage, now: float) -> None:
        """Hand a message to the session, and note who proposed what it accepts."""
        if isinstance(message, Commit):
            known = max(0, self.session.num_committed - message.at)
            self.proposers.extend(_proposers(self.session.tree, message, known))
        for event in self.session.receive(message, now):
            self.drafted.extend(getattr(event, "drafted", np.zeros(0, np.bool_)).tolist())


def run_lockstep(
    engine: Engine, welcome: Welcome, tasks: Sequence[Task], drafters: Sequence[Drafter], settings: LockstepSettings
) -> list[Answer]:
    """Write every task's output, at most ``num_parallel`` at a time, and return the answers in the tasks' order.

    Raises the error that the engine reports for a task.
    """
    waiting = deque(enumerate(tasks))
    running: dict[int, _Stream] = {}
    answers: dict[int, Answer] = {}
    round_number = 0
    while waiting or running:
        while waiting and len(running) < settings.num_parallel:
            number, task = waiting.popleft()
            policy = settings.make_policy() if settings.make_policy else None
            controller = Controller(welcome.step_time, welcome.limits, can_switch=settings.can_switch)
            session = ClientSession(
                number,
                task,
                welcome,
                drafters,
                policy=policy,
                acceptance=settings.acceptance,
                controller=controller,
            )
            running[number] = _Stream(number, session, drafters)
            session.controller.observe_rtt(2 * settings.delay * ROUND_S)
            session.open(round_number * ROUND_S)
        _round(engine, running, settings, round_number)
        for number in [number for number, stream in running.items() if stream.session.is_done]:
            answers[number] = _close(running.pop(number))
        round_number += 1
    return [answers[number] for number in range(len(tasks))]


def _round(engine: Engine, running: dict[int, _Stream], settings: LockstepSettings, round_number: int) -> None:
    now = round_number * ROUND_S
    for stream in running.values():
        stream.draft(settings.calls, now)
        stream.up.extend((round_number + settings.delay, encode(message)) for message in stream.session.outgoing(now))
        while stream.up and stream.up[0][0] <= round_number:
            message = decode(stream.up.popleft()[1])
            _feed(engine, stream.number, message, now)  # type: ignore[arg-type]
    for number, message in _step(engine, now):
        if number in running:
            running[number].down.append((round_number + settings.delay, encode(message)))
    for stream in running.values():
        while stream.down and stream.down[0][0] <= round_number:
            stream.receive(decode(stream.down.popleft()[1]), now)  # type: ignore[arg-type]


def _proposers(tree: LiveTree, commit: Commit, num_known: int) -> list[int]:
    """The drafter that proposed each new token of a commit first, of those that count as accepted nodes."""
    row: int | None = ANCHOR_ROW
    made: list[int] = []
    for place, token in enumerate(commit.tokens.tolist()[num_known:], start=num_known):
        matches = np.flatnonzero((tree.parents == row) & (tree.tokens == token))
        row = int(matches[0]) if row is not None and len(matches) else None
        counts = row is not None and place < commit.num_drafted
        made.append(int(tree.drafters[row]) if counts else NO_DRAFTER)
    return made


def _feed(engine: Engine, number: int, message: ClientMessage, now: float) -> None:
    key = (0, number)
    match message:
        case Open():
            engine.open(key, message, now)
        case Grow():
            engine.grow(key, message, now)
        case Cancel():
            engine.cancel(key)


def _step(engine: Engine, now: float) -> list[tuple[int, ServerMessage]]:
    plan = engine.next_step(now)
    if plan is None or isinstance(plan, Wake):
        return [(key[1], message) for key, message in engine.take_messages()]
    logits = engine.target.forward(plan.batch)
    return [(key[1], message) for key, message in engine.finish(plan, logits, now + ROUND_S)]


def _close(stream: _Stream) -> Answer:
    for sequence in stream.sequences:
        sequence.close()
    if stream.session.error is not None:
        raise stream.session.error
    drafted, proposers = np.array(stream.drafted, np.bool_), np.array(stream.proposers, np.int8)
    return Answer(stream.session.output, drafted, stream.session.stats, proposers)


def welcome_of(engine: Engine) -> Welcome:
    """What the engine's server would say to a client: enough for a session."""
    info = engine.target.info
    return Welcome(
        protocol=PROTOCOL_VERSION,
        model=info.name,
        tokenizer="",
        vocab_size=info.vocab_size,
        eos_ids=info.eos_token_ids,
        bos_id=info.bos_token_id,
        limits=engine.settings.limits,
        step_time=engine.step_times.current,
    )

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

from paceline.client.drafting.drafter import Drafter, DraftSequence
from paceline.client.drafting.policy import Policy
from paceline.client.session import ClientSession, SessionStats, Task
from paceline.server.engine import Engine
from paceline.server.plan import Wake
from paceline.shared.messages import PROTOCOL_VERSION, Cancel, ClientMessage, Grow, Open, ServerMessage, Welcome
from paceline.shared.wire import decode, encode

ROUND_S = 0.02
"""Virtual seconds of one round."""


@dataclass(frozen=True, slots=True)
class LockstepSettings:
    """num_parallel: generations in flight. delay: rounds that a frame travels, each way. calls: drafter calls a round
    and drafter at most. make_policy: a fresh tree policy for each session, None for the session's own.
    """

    num_parallel: int = 4
    delay: int = 0
    calls: int = 8
    make_policy: Callable[[], Policy] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Output ids of a task, which of them were accepted nodes, and the session's counts."""

    token_ids: NDArray[np.int32]
    drafted: NDArray[np.bool_]
    stats: SessionStats


class _Stream:
    """One task's session with its drafters' sequences and the frames under way."""

    def __init__(self, number: int, session: ClientSession, sequences: list[DraftSequence]) -> None:
        self.number = number
        self.session = session
        self.sequences = sequences
        self.up: deque[tuple[int, bytes]] = deque()
        self.down: deque[tuple[int, bytes]] = deque()
        self.drafted: list[bool] = []

    def draft(self, calls: int, now: float) -> None:
        """Let every drafter answer until it has nothing to do, or ``calls`` times."""
        for index, sequence in enumerate(self.sequences):
            for _ in range(calls):
                request = self.session.next_draft(index, now)
                if request is None:
                    break
                self.session.drafted(index, sequence.expand(request), now)


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
            session = ClientSession(number, task, welcome, drafters, policy=policy)
            running[number] = _Stream(number, session, [drafter.start() for drafter in drafters])
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
            for event in stream.session.receive(decode(stream.down.popleft()[1]), now):  # type: ignore[arg-type]
                stream.drafted.extend(getattr(event, "drafted", np.zeros(0, np.bool_)).tolist())


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
    return Answer(stream.session.output, np.array(stream.drafted, np.bool_), stream.session.stats)


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

"""Drives one generation over a real link: an actor on the event loop around the sans-IO session.

Everything that happens (messages, drafter answers, the link's fate) becomes an item in one inbox; after each item the
session's messages go out and idle drafters get work. Drafter calls run on the client's one drafting thread, instant
drafters in place. The event loop never computes a draft of a model.

Not here: text (``api``), the link (``transport``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, Drafter, DraftRequest, DraftSequence
from paceline.client.events import Event, Failed, Finished
from paceline.client.link import Link, Received
from paceline.client.session import ClientSession
from paceline.client.trace import Arrived, DraftCall, Sent, Trace
from paceline.client.transport import Uplink
from paceline.shared.errors import PacelineError
from paceline.shared.wire import encode

_LOG = logging.getLogger("paceline.client")
_MAX_INSTANT_CALLS = 24
"""Instant calls in a row before the event loop gets a turn."""

Clock = Callable[[], float]


class GenerationStream:
    """One generation. ``run`` yields its events and returns when it ends; leaving early cancels it."""

    def __init__(
        self,
        session: ClientSession,
        uplink: Uplink,
        drafters: Sequence[Drafter],
        pool: Executor,
        *,
        clock: Clock = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        self.session = session
        self.bytes_up = 0
        self.bytes_down = 0
        self.rtt_s = 0.0
        self._uplink = uplink
        self._drafters = tuple(drafters)
        self._sequences: list[DraftSequence] = []
        self._pool = pool
        self._clock = clock
        self._trace = trace
        self._inbox: asyncio.Queue[Callable[[], list[Event]]] = asyncio.Queue()
        self._is_linked = True
        self._calls: set[asyncio.Future[Candidates]] = set()

    # The port's side: called by the uplink, on the event loop

    def on_message(self, received: Received) -> None:
        self.bytes_down += received.num_bytes
        self._observe_rtt(received.rtt_s)
        if self._trace is not None:
            arrived = Arrived(self._clock(), received.message, received.num_bytes, received.rtt_s)
            self._trace.arrived.append(arrived)
        self._inbox.put_nowait(lambda: self.session.receive(received.message, self._clock()))

    def _observe_rtt(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.session.controller.observe_rtt(rtt_s)

    def on_lost(self) -> None:
        self._is_linked = False

    def on_restored(self, link: Link) -> None:
        self._inbox.put_nowait(lambda: self._reopen(link))

    def on_failed(self, error: PacelineError) -> None:
        self._inbox.put_nowait(lambda: self._raise(error))

    def _raise(self, error: PacelineError) -> list[Event]:
        raise error

    def _reopen(self, link: Link) -> list[Event]:
        self._uplink.forget(self.session.generation)
        self._is_linked = True
        self._observe_rtt(link.rtt_s)
        self.session.reopen(self._uplink.register(self), link.welcome, self._clock())
        return []

    @property
    def explanation(self) -> str:
        """What speculation chose and why, and which drafters had to stop."""
        parts = [self.session.controller.explain()]
        for drafter in self._drafters:
            if self.session.num_committed >= drafter.max_context:
                parts.append(f"{drafter.name} stopped at its context of {drafter.max_context} tokens")
        return "; ".join(parts)

    # The caller's side

    async def run(self) -> AsyncGenerator[Event, None]:
        """Open, and yield events until the end. Raises what the server or the link reported."""
        self.session.generation = self._uplink.register(self)
        self._sequences = [drafter.start() for drafter in self._drafters]
        try:
            # Without a link the port's registration brings one back, and the generation opens then.
            self._is_linked = self._uplink.is_linked
            if self._is_linked:
                self._observe_rtt(self._uplink.link.rtt_s)
                self.session.open(self._clock())
            self._pump()
            while not self.session.is_done:
                happened = await self._inbox.get()
                events = happened()
                self._pump()
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
                    if isinstance(event, Finished):
                        return
        finally:
            await self._stop()

    def _pump(self) -> None:
        """Send what is to be sent and give idle drafters work."""
        for _ in range(_MAX_INSTANT_CALLS):
            if not self._draft():
                break
        else:
            self._inbox.put_nowait(list)  # come back after the loop had its turn
        self._flush()

    def _draft(self) -> bool:
        """Start what can be started; whether an instant drafter answered, so that there may be more to do."""
        has_answered = False
        for number, drafter in enumerate(self._drafters):
            request = self.session.next_draft(number, self._clock())
            if request is None:
                continue
            if drafter.is_instant:
                candidates = self._sequences[number].expand(request)
                self.session.drafted(number, candidates, self._clock())
                has_answered = True
            else:
                self._call(number, request)
        return has_answered

    def _call(self, number: int, request: DraftRequest) -> None:
        self._flush()
        asked_at = self._clock()
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._sequences[number].expand, request)
        self._calls.add(future)

        def done(finished: asyncio.Future[Candidates]) -> None:
            self._calls.discard(finished)
            if not finished.cancelled():
                answered_at = self._clock()
                if self._trace is not None:
                    num_fresh = int(np.count_nonzero(request.path_keys == ANCHOR_KEY))
                    call = DraftCall(number, num_fresh + len(request.keys), asked_at, answered_at)
                    self._trace.calls.append(call)
                self._inbox.put_nowait(lambda: self._drafted(number, request, finished, answered_at))

        future.add_done_callback(done)

    def _drafted(
        self, number: int, request: DraftRequest, finished: asyncio.Future[Candidates], answered_at: float
    ) -> list[Event]:
        error = finished.exception()
        if error is not None:
            # Drafts can only help: a drafter that breaks is left out, and the text goes on without it.
            _LOG.warning("drafter %s failed and is left out: %s", self._drafters[number].name, error)
            self.session.retire(number)
            return []
        self.session.drafted(number, finished.result(), answered_at)
        return []

    def _flush(self) -> None:
        for message in self.session.outgoing(self._clock()):
            data = encode(message, self._uplink.padding)
            if self._is_linked:
                self.bytes_up += len(data)
                if self._trace is not None:
                    self._trace.sent.append(Sent(self._clock(), message, len(data)))
                self._uplink.post(data)

    async def _stop(self) -> None:
        if not self.session.is_done:
            self.session.cancel()
            self._flush()
        self._uplink.forget(self.session.generation)
        if self._calls:
            await asyncio.wait(self._calls)
        for sequence in self._sequences:
            sequence.close()

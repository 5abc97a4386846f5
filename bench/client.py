"""The simulated client: the real session core on a virtual clock, behind a link that may delay and break.

Each drafter has at most one call out; the call's answer comes after the time that it costs. Nothing waits for anything
else: that is the stream driver's behaviour, without its threads.

Not here: sockets (``paceline.client.transport``), and where proposals come from (``playback``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.bench.clock import VirtualClock
from paceline.bench.costs import DraftTime
from paceline.bench.frames import Weigh, weight
from paceline.bench.link import LinkModel, Outages, Pipe
from paceline.bench.playback import Oracle
from paceline.bench.recording import Recording
from paceline.bench.server import Connection, SimulatedServer
from paceline.bench.stats import Lane, Served, Span
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import ANCHOR_KEY, Drafter, DraftRequest
from paceline.client.drafting.policy import Policy
from paceline.client.events import Tokens
from paceline.client.session import ClientSession, Task
from paceline.shared.messages import Cancel, ClientMessage, Grow, Open, ServerMessage
from paceline.shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ClientModel:
    """How a client behaves. drafters are made per request from its recording; no drafter is plain streaming.

    stall: (begin, length) in seconds after open: calls that would end within it end behind it. patience_s: its wish.
    acceptance: what all requests learn together, as those of one client do; None: each for itself.
    """

    make_drafters: Callable[[Recording], Sequence[Drafter]]
    draft_time: DraftTime = field(default_factory=DraftTime)
    instant_s: float = 5e-5
    stall: tuple[float, float] | None = None
    patience_s: float | None = None
    make_policy: Callable[[], Policy] | None = None
    can_switch: bool = True
    acceptance: Acceptance | None = None


class StreamClient:
    """One request over one connection (or several in turn, if it breaks)."""

    def __init__(
        self,
        clock: VirtualClock,
        server: SimulatedServer,
        recording: Recording,
        link: LinkModel,
        model: ClientModel,
        *,
        number: int = 0,
        seed: int = 0,
        on_done: Callable[[], None] = lambda: None,
        weigh: Weigh = weight,
    ) -> None:
        self._clock, self._server, self._recording, self._link, self._model = clock, server, recording, link, model
        self._number, self._seed = number, seed
        self._on_done = on_done
        self._weigh = weigh
        self._drafters = tuple(model.make_drafters(recording))
        self._sequences = [drafter.start() for drafter in self._drafters]
        self._outages = Outages(link, seed)
        self._epoch = 0
        self._is_up = True
        self.served = Served(clock.now)
        welcome = server.welcome()
        sampling = SamplingParams(
            temperature=recording.temperature,
            seed=recording.seed if recording.temperature else None,
            max_tokens=len(recording.output),
            ignore_eos=True,
        )
        task = Task(recording.prompt, sampling, sampling.default_verifier(), patience_s=model.patience_s)
        self.session = ClientSession(
            0,
            task,
            welcome,
            self._drafters,
            policy=None if model.make_policy is None else model.make_policy(),
            acceptance=model.acceptance,
            controller=Controller(welcome.step_time, welcome.limits, can_switch=model.can_switch),
        )

    def start(self) -> None:
        """Open the generation on a connection that stands already."""
        self._connect()
        self.session.open(self._clock.now)
        self._pump()

    @property
    def _connection(self) -> int:
        return self._number * 100_000 + self._epoch

    def _connect(self) -> None:
        """A fresh connection; it knows the link's round trip from its handshake, as the transport's pings would."""
        epoch = self._epoch
        self._up = Pipe(self._link, is_up=True, seed=self._seed * 1009 + epoch)
        self._down = Pipe(self._link, is_up=False, seed=self._seed * 1009 + epoch)
        self._is_up = True
        self.session.controller.observe_rtt(self._link.rtt_s + self._link.jitter_s)

        def deliver(message: ServerMessage) -> None:
            size = self._weigh(message, is_up=False)
            self.served.bytes_down += size
            now = self._clock.now
            arrival = self._down.send(now, size)
            self.served.spans.append(Span(Lane.DOWN, now, arrival, size))
            self._clock.at(arrival, lambda: self._receive(message, epoch))

        self._server.connect(self._connection, Connection(Oracle(self._recording), deliver, self.served.spans.append))
        breaks_at = self._outages.next_after(self._clock.now)
        if breaks_at != float("inf"):
            self._clock.at(breaks_at, lambda: self._break(epoch))

    def _break(self, epoch: int) -> None:
        """The link is cut: what is in flight either way is lost, and a new connection is made."""
        if epoch != self._epoch or self.session.is_done:
            return
        gone = self._connection
        self._epoch += 1
        self._is_up = False
        self.served.num_reconnects += 1
        self._clock.after(self._link.rtt_s / 2, lambda: self._server.disconnect(gone))
        delay = self._link.downtime_s + self._link.handshake_rtts * self._link.rtt_s
        self._clock.after(delay, self._reconnect)

    def _reconnect(self) -> None:
        self._connect()
        self.session.reopen(self._epoch, self._server.welcome(), self._clock.now)
        self._pump()

    def _receive(self, message: ServerMessage, epoch: int) -> None:
        if epoch != self._epoch or self.session.is_done:
            return
        now = self._clock.now
        for event in self.session.receive(message, now):
            if isinstance(event, Tokens):
                self.served.arrive(now, event.token_ids.tolist())
        if self.session.is_done:
            self._finish()
        else:
            self._pump()

    def _finish(self) -> None:
        stats = self.session.stats
        self.served.num_steps = stats.verify_steps
        self.served.num_accepted = stats.accepted
        self.served.is_finished = self.session.error is None
        self._server.disconnect(self._connection)
        self._on_done()

    def _pump(self) -> None:
        """Send what there is to send, and give every idle drafter work."""
        # First send: only nodes that the server was told of are expanded further.
        if self._is_up:
            for message in self.session.outgoing(self._clock.now):
                self._send(message)
        for index in range(len(self._drafters)):
            self._ask(index)

    def _ask(self, index: int) -> None:
        now = self._clock.now
        request = self.session.next_draft(index, now)
        if request is None:
            return
        done_at = self._not_stalled(now + self._seconds(index, request))
        self.served.spans.append(Span(Lane.DRAFT, now, done_at, request.num_rows))

        def answer() -> None:
            if self.session.is_done:
                return
            candidates = self._sequences[index].expand(request)
            self.session.drafted(index, candidates, self._clock.now)
            self._pump()

        self._clock.at(done_at, answer)

    def _seconds(self, index: int, request: DraftRequest) -> float:
        """What the call costs: committed tokens that were expanded as nodes already have their KV."""
        if self._drafters[index].is_instant:
            return self._model.instant_s
        num_fresh = int(np.count_nonzero(request.path_keys == ANCHOR_KEY))
        return self._model.draft_time.at(num_fresh + len(request.keys))

    def _not_stalled(self, time_s: float) -> float:
        if self._model.stall is None:
            return time_s
        begin = self.served.opened_at + self._model.stall[0]
        end = begin + self._model.stall[1]
        return end if begin <= time_s < end else time_s

    def _send(self, message: ClientMessage) -> None:
        if not isinstance(message, Open | Grow | Cancel):
            return
        now, epoch, connection = self._clock.now, self._epoch, self._connection
        size = self._weigh(message, is_up=True)
        self.served.bytes_up += size
        if isinstance(message, Grow):
            self.served.num_drafted += len(message.tokens)
        arrival = self._up.send(now, size)
        self.served.spans.append(Span(Lane.UP, now, arrival, len(message.tokens) if isinstance(message, Grow) else 0))

        def arrive() -> None:
            if epoch == self._epoch:
                self._server.receive(connection, message)

        self._clock.at(arrival, arrive)

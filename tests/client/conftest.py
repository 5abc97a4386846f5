"""Client sessions against the real engine on a virtual clock: links that delay, jitter and drop, scripted drafters."""

from __future__ import annotations

import heapq
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates
from paceline.client.session import ClientSession, Failed, Task, Tokens
from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan, Wake
from paceline.server.scripted import ScriptedTarget, markov
from paceline.shared.messages import Cancel, Commit, Grow, Limits, Open, StepTime, Welcome
from paceline.shared.sampling import SamplingParams
from paceline.shared.wire import decode, encode


class ScriptedDrafter:
    """Knows the target's logits up to seeded noise; checks that every request is consistent with the text so far."""

    def __init__(self, next_logits, *, noise=0.0, width=8, max_context=4096, chunk_len=64, seed=0, instant=False):
        self.next_logits, self.noise, self.width, self.seed = next_logits, noise, width, seed
        self.name, self.is_instant, self.max_context, self.chunk_len = "scripted", instant, max_context, chunk_len
        self.sequences = []

    def start(self):
        self.sequences.append(ScriptedSequence(self))
        return self.sequences[-1]

    def close(self):
        self.sequences.clear()


class ScriptedSequence:
    def __init__(self, drafter):
        self.drafter = drafter
        self.text = []
        self.paths = {}
        self.num_rows = []

    def expand(self, request):
        assert request.start in (len(self.text), len(self.text) - 1), "no token is missing or doubled"
        assert request.committed_len + int(max(request.depths, default=0)) <= self.drafter.max_context
        assert len(request.token_ids) <= self.drafter.chunk_len
        for offset, key in enumerate(request.path_keys.tolist()):
            prefix = (*self.text[: request.start], *request.token_ids[: offset + 1].tolist())
            if key in self.paths:
                assert self.paths[key] == prefix, "a path key names the node that the text went through"
        self.text = [*self.text[: request.start], *request.token_ids.tolist()]
        alive = set(request.alive_keys.tolist())
        self.paths = {key: path for key, path in self.paths.items() if key in alive or key in request.path_keys}
        rows = [tuple(self.text)] if request.wants_anchor else []
        for key, token, parent, depth in zip(
            request.keys.tolist(), request.tokens.tolist(), request.parent_keys.tolist(), request.depths, strict=True
        ):
            above = tuple(self.text) if parent == ANCHOR_KEY else self.paths[parent]
            self.paths[key] = (*above, token)
            assert len(self.paths[key]) == request.committed_len + depth
            rows.append(self.paths[key])
        self.num_rows.append(len(rows))
        return self.candidates(rows, request.width)

    def candidates(self, rows, width):
        width = min(width, self.drafter.width)
        ids, logprobs = [], []
        for path in rows:
            logits = self.drafter.next_logits(np.array(path, np.int32)).astype(np.float64)
            rng = np.random.default_rng([self.drafter.seed, len(path), *path[-4:]])
            logits = logits + self.drafter.noise * rng.normal(size=len(logits))
            logq = logits - np.logaddexp.reduce(logits)
            top = np.argsort(-logq, kind="stable")[:width]
            ids.append(top)
            logprobs.append(logq[top])
        if not rows:
            return Candidates.empty(0)
        return Candidates(np.array(ids, np.int32), np.array(logprobs, np.float32))

    def close(self):
        self.text = None


class Peer:
    """One client on the world's clock: a session, its draft sequences and its link."""

    def __init__(self, world, key, session, drafters, *, delay, jitter, call_s, seed):
        self.world, self.key, self.session, self.delay, self.jitter = world, key, session, delay, jitter
        self.drafters = drafters
        self.sequences = [drafter.start() for drafter in drafters]
        self.call_s = call_s
        self.rng = random.Random(seed)
        self.last_up = self.last_down = 0.0
        self.link = 0
        self.is_linked = True
        self.events, self.times = [], []
        self.token_ids, self.drafted = [], []
        self.bytes_up = 0
        self.frames = []

    def lag(self, last):
        return max(last, self.world.now + self.delay + self.rng.random() * self.jitter)

    def start(self):
        self.session.open(self.world.now)
        self.pump()

    def pump(self):
        session, now = self.session, self.world.now
        for number, sequence in enumerate(self.sequences):
            request = session.next_draft(number, now)
            while request is not None and self.drafters[number].is_instant:
                session.drafted(number, sequence.expand(request), now)
                request = session.next_draft(number, now)
            if request is not None:
                seconds = self.call_s * (1.0 + 0.05 * request.num_rows)
                self.world.at(now + seconds, lambda n=number, r=request: self.answer(n, r))
        for message in session.outgoing(now):
            data = encode(message)
            self.bytes_up += len(data)
            self.frames.append((now, message, len(data)))
            self.last_up = self.lag(self.last_up)
            self.world.at(self.last_up, lambda d=data, k=self.link: k == self.link and self.world.feed(self, decode(d)))

    def answer(self, number, request):
        if self.session.is_done:
            return
        self.session.drafted(number, self.sequences[number].expand(request), self.world.now)
        self.pump()

    def deliver(self, message):
        message = decode(encode(message))
        self.last_down = self.lag(self.last_down)
        link = self.link
        self.world.at(self.last_down, lambda: link == self.link and self.receive(message))

    def receive(self, message):
        for event in self.session.receive(message, self.world.now):
            self.events.append(event)
            if isinstance(event, Tokens):
                self.token_ids += event.token_ids.tolist()
                self.drafted += event.drafted.tolist()
                self.times += [self.world.now] * len(event.token_ids)
            assert not isinstance(event, Failed), event
        self.pump()

    def drop(self, gap=0.05):
        """The link breaks: what is in flight is lost, and the session opens again after a while."""
        if self.session.is_done or not self.is_linked:
            return
        self.is_linked = False
        self.link += 1
        self.world.engine.disconnect(self.key[0])
        self.world.at(self.world.now + gap, self.reconnect)

    def reconnect(self):
        self.is_linked = True
        self.key = (next(self.world.connections), self.session.generation + 1)
        self.world.peers[self.key] = self
        self.session.reopen(self.key[1], self.world.welcome, self.world.now)
        self.pump()


class World:
    """Engine and clients on one virtual clock."""

    def __init__(self, target, *, step_time=None, limits=None, max_nodes=64):
        step_time = step_time or StepTime(0.03, 0.0005)
        limits = limits or Limits(max_context=target.info.max_context)
        settings = EngineSettings(step_time=step_time, limits=limits, max_nodes=max_nodes)
        self.target, self.step_time = target, step_time
        self.engine = Engine(target, settings)
        self.welcome = Welcome(
            1, "scripted", "", target.info.vocab_size, target.info.eos_token_ids, None, limits, step_time, ""
        )
        self.now, self.busy = 0.0, False
        self.heap, self.order, self.connections = [], itertools.count(), itertools.count()
        self.peers = {}

    def at(self, when, action):
        heapq.heappush(self.heap, (when, next(self.order), action))

    def client(
        self, prompt, drafters=(), *, verifier=None, policy=None, delay=0.02, jitter=0.0, call_s=0.004, **sampling
    ):
        acceptance = sampling.pop("acceptance", None)
        params = SamplingParams(**sampling)
        task = Task(np.array(prompt, np.int32), params, verifier or params.default_verifier())
        session = ClientSession(0, task, self.welcome, drafters, policy=policy, acceptance=acceptance)
        session.controller.observe_rtt(2 * delay)
        key = (next(self.connections), 0)
        peer = Peer(self, key, session, drafters, delay=delay, jitter=jitter, call_s=call_s, seed=len(self.peers))
        self.peers[key] = peer
        return peer

    def feed(self, peer, message):
        if isinstance(message, Open):
            self.engine.open(peer.key, message, self.now)
        elif isinstance(message, Grow):
            self.engine.grow(peer.key, message, self.now)
        elif isinstance(message, Cancel):
            self.engine.cancel(peer.key)
        self.flush(self.engine.take_messages())

    def flush(self, messages):
        for key, message in messages:
            if key in self.peers and self.peers[key].key == key:
                self.peers[key].deliver(message)

    def step(self):
        plan = self.engine.next_step(self.now)
        self.flush(self.engine.take_messages())
        if isinstance(plan, Wake):
            self.at(plan.at, lambda: None)
        if isinstance(plan, StepPlan):
            logits = self.target.forward(plan.batch)
            self.busy = True
            self.at(self.now + self.step_time.at(plan.batch.num_rows), lambda: self.land(plan, logits))

    def land(self, plan, logits):
        self.busy = False
        self.flush(self.engine.finish(plan, logits, self.now))

    def run(self, until=1e4):
        peers = list(self.peers.values())
        for peer in peers:
            peer.start()
        while self.heap and self.now < until:
            self.now, _, action = heapq.heappop(self.heap)
            action()
            while self.heap and self.heap[0][0] <= self.now:
                heapq.heappop(self.heap)[2]()
            if not self.busy:
                self.step()
            if all(peer.session.is_done for peer in peers) and not self.busy:
                break
        assert all(peer.session.is_done for peer in peers), "everybody came to an end"
        return self


@pytest.fixture(scope="session")
def lab():
    """The harness, as a namespace: tests cannot import one another."""

    def target(vocab=32, seed=0, **kw):
        return ScriptedTarget(markov(vocab, seed), vocab, **kw)

    return SimpleNamespace(
        World=World,
        ScriptedDrafter=ScriptedDrafter,
        target=target,
        scripted=ScriptedTarget,
        markov=markov,
        Commit=Commit,
        Limits=Limits,
        StepTime=StepTime,
    )

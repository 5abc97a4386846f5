"""The engine against scripted clients on a virtual clock: links delay and jitter, but keep each connection's order."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import websockets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.server.app import ServerState
from paceline.server.driver import EngineDriver, Served
from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan, Wake
from paceline.server.scripted import ScriptedTarget, markov
from paceline.server.serving import bind, run_server
from paceline.server.settings import make_settings
from paceline.server.text import TargetText
from paceline.shared.messages import (
    ANCHOR_ID,
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Fault,
    Grow,
    Hello,
    Limits,
    Open,
    StepTime,
)
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import decode, encode

MODEL = StepTime(0.03, 0.0005)
Frame = list[tuple[int, int]]
"""(token, parent id) of new nodes; parents are ids that the client has used before, or ANCHOR_ID."""


class VirtualClient:
    """Holds one generation: what it knows, the nodes that it has sent, and a drafter that proposes more."""

    def __init__(self, world, key, request, drafter, *, delay=0.02, jitter=0.0, every=0.01, seed=0):
        self.world, self.key, self.request, self.drafter = world, key, request, drafter
        self.delay, self.jitter, self.every = delay, jitter, every
        self.rng = random.Random(seed)
        self.known = list(request.committed.tolist())
        self.received: list[int] = []
        self.commits: list[Commit] = []
        self.times: list[float] = []
        self.fault: Fault | None = None
        self.finish = None
        self.next_id = 0
        self.paths: dict[int, tuple[int, ...]] = {}
        self.proposed: set[tuple[int, ...]] = set()
        self.last_up = self.last_down = 0.0
        self.opened = None

    @property
    def is_done(self):
        return self.finish is not None or self.fault is not None

    def link(self, now, last):
        return max(last, now + self.delay + self.rng.random() * self.jitter)

    def start(self):
        self.send(self.request)
        if self.drafter is not None:
            self.world.at(self.world.now + self.every, self.draft)

    def send(self, message):
        self.last_up = self.link(self.world.now, self.last_up)
        self.world.at(self.last_up, lambda: self.world.feed(self.key, message))

    def draft(self):
        if self.is_done:
            return
        frame = self.drafter(self)
        if frame:
            self.send_frame(frame)
        self.world.at(self.world.now + self.every, self.draft)

    def send_frame(self, frame: Frame):
        """Sends (token, parent) pairs; a parent >= next_id names an earlier node of the same frame."""
        first = self.next_id
        for token, parent in frame:
            base = tuple(self.known) if parent == ANCHOR_ID else self.paths[parent]
            path = (*base, token)
            assert path not in self.proposed, "a client never proposes one path twice"
            self.proposed.add(path)
            self.paths[self.next_id] = path
            self.next_id += 1
        tokens, parents = (np.array(column, np.int32) for column in zip(*frame, strict=True))
        at = len(self.request.prompt) + len(self.known)
        self.send(Grow(self.key[1], at, first, tokens, parents))

    def deliver(self, message):
        self.last_down = self.link(self.world.now, self.last_down)
        self.world.at(self.last_down, lambda: self.receive(message))

    def receive(self, message):
        if isinstance(message, Commit):
            assert message.at == len(self.request.prompt) + len(self.known), "commits are gapless"
            assert not self.is_done, "nothing follows the end"
            self.commits.append(message)
            self.known += message.tokens.tolist()
            self.received += message.tokens.tolist()
            self.times += [self.world.now] * len(message.tokens)
            self.finish = message.finish
        elif isinstance(message, Fault):
            self.fault = message
        else:
            self.opened = message


class World:
    """Engine, target and clients on one virtual clock."""

    def __init__(self, target, settings=None, *, decode=None, model=MODEL):
        settings = settings or EngineSettings(step_time=model)
        self.target, self.model = target, model
        self.engine = Engine(target, settings, decode)
        self.now, self.busy = 0.0, False
        self.heap: list = []
        self.order = itertools.count()
        self.clients: dict = {}
        self.wake = None

    def at(self, when: float, action: Callable[[], None]):
        heapq.heappush(self.heap, (when, next(self.order), action))

    def client(
        self,
        prompt,
        drafter=None,
        *,
        verifier=None,
        committed=(),
        choice=0,
        patience_s=None,
        link=None,
        connection=None,
        **sampling,
    ):
        params = SamplingParams(**sampling)
        key = (len(self.clients), 0) if connection is None else (connection, len(self.clients))
        request = Open(
            0,
            np.array(prompt, np.int32),
            params,
            verifier or params.default_verifier(),
            np.array(committed, np.int32),
            choice,
            patience_s,
        )
        client = VirtualClient(self, key, request, drafter, **{"seed": len(self.clients), **(link or {})})
        self.clients[key] = client
        return client

    def feed(self, key, message):
        client = self.clients[key]
        if isinstance(message, Open):
            self.engine.open(key, message, self.now)
        elif isinstance(message, Grow):
            self.engine.grow(key, message, self.now)
        elif isinstance(message, Cancel):
            self.engine.cancel(key)
        self.flush(self.engine.take_messages())
        assert client is not None

    def flush(self, messages):
        for key, message in messages:
            if key in self.clients:
                self.clients[key].deliver(message)

    def step(self):
        plan = self.engine.next_step(self.now)
        self.flush(self.engine.take_messages())
        if isinstance(plan, Wake):
            assert plan.at > self.now
            self.at(plan.at, lambda: None)
        if not isinstance(plan, StepPlan):
            return
        logits = self.target.forward(plan.batch)
        self.busy = True
        self.at(self.now + self.model.at(plan.batch.num_rows), lambda: self.land(plan, logits))

    def land(self, plan, logits):
        self.busy = False
        self.flush(self.engine.finish(plan, logits, self.now))

    def run(self, until=1e6, *, start=True):
        """Runs until all clients are done."""
        if start:
            for client in self.clients.values():
                client.start()
        while self.heap and self.now < until:
            self.now, _, action = heapq.heappop(self.heap)
            action()
            while self.heap and self.heap[0][0] <= self.now:
                heapq.heappop(self.heap)[2]()
            if not self.busy:
                self.step()
            if all(client.is_done for client in self.clients.values()) and not self.busy:
                return self
        return self


def tree_frame(client, widths, pick):
    """A fresh tree below the client's anchor: pick(path, width) names the children of each node."""
    frame, level, count = [], [(tuple(client.known), ANCHOR_ID)], client.next_id
    for width in widths:
        following = []
        for path, parent in level:
            for token in pick(path, width):
                if (*path, token) in client.proposed:
                    continue
                frame.append((token, parent))
                following.append(((*path, token), count))
                count += 1
        level = following
    return frame


def oracle(output, *, widths=(3, 1, 1, 1), vocab=32, rank=0, wrong=False):
    """Knows the output. Puts the right token at ``rank`` among its siblings; ``wrong``: leaves it out."""

    def pick(path, width):
        right = output[len(path)] if path == tuple(output[: len(path)]) and len(path) < len(output) else None
        if right is None:
            return [len(path) % vocab] if width == 1 else [(len(path) + i) % vocab for i in range(width)]
        others = [(right + 1 + i) % vocab for i in range(width)]
        if wrong:
            return others
        others[min(rank, width - 1)] = right
        return others

    return lambda client: tree_frame(client, widths, pick) if client.known == output[: len(client.known)] else []


def chatter(output, *, vocab=32, right=0.5, most=6):
    """Random nodes below any node that was ever sent, or the anchor; each is the right one with chance ``right``."""

    def propose(client):
        frame, own = [], dict(client.paths)
        if sum(len(path) > len(client.known) for path in list(own.values())[-400:]) > 300:
            return []
        for count in range(client.rng.randint(0, most)):
            recent = [ANCHOR_ID, *list(own)[-12:]]
            parent = client.rng.choice(recent)
            path = tuple(client.known) if parent == ANCHOR_ID else own[parent]
            good = len(path) < len(output) and client.rng.random() < right
            token = output[len(path)] if good else client.rng.randrange(vocab)
            fresh = (*path, token)
            deep = len(fresh) > len(client.known) + 40
            if deep or fresh in client.proposed or fresh in own.values():
                continue
            own[client.next_id + len(frame)] = fresh
            frame.append((token, parent))
            assert count < most
        return frame

    return propose


@pytest.fixture
def lab():
    """The harness, as a namespace: tests cannot import one another."""
    return SimpleNamespace(
        World=World,
        VirtualClient=VirtualClient,
        oracle=oracle,
        chatter=chatter,
        tree_frame=tree_frame,
        target=lambda vocab=32, seed=0, **kw: ScriptedTarget(markov(vocab, seed), vocab, **kw),
        Limits=Limits,
        Verifier=Verifier,
    )


TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START_ID, END_ID, BYTE_VOCAB = 256, 257, 258


@pytest.fixture(scope="session")
def byte_text(tmp_path_factory):
    """A tokenizer with a token for each byte and two control tokens, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return TargetText(folder / "tokenizer.json", folder / "chat_template.jinja")


def letter_logits(text, *, seed=0, step_s=0.0, end_at=None):
    """Random letters; the end of text at ``end_at`` tokens of context; each row takes ``step_s``."""
    base = markov(BYTE_VOCAB, seed, spread=2.0)
    letters = np.full(BYTE_VOCAB, -200.0, np.float32)
    letters[text.encode("abcdefghijklmnopqrstuvwxyz ,.", 99)] = 0.0

    def next_logits(context):
        if step_s:
            time.sleep(step_s)
        logits = base(context) + letters
        if end_at is not None and len(context) >= end_at:
            logits[END_ID] = 500.0
        return logits

    return next_logits


class RunningServer:
    """A real server with a scripted target on a free loopback port, in the test's event loop."""

    def __init__(self, text, logits, *, engine_settings=None, max_context=512, **settings):
        self.target = ScriptedTarget(
            logits, BYTE_VOCAB, eos_token_ids=(END_ID,), max_context=max_context, name="scripted", block_size=4
        )
        self.settings = make_settings(port=0, **{"grace": 2.0, **settings})
        engine_settings = engine_settings or EngineSettings(
            max_running=self.settings.max_running, max_queue=self.settings.max_queue, step_time=StepTime(0.001, 0.0001)
        )
        self.gate = threading.Event()
        self.gate.set()

        def load():
            self.gate.wait()
            return Served(Engine(self.target, engine_settings, text.decode), "fingerprint", text)

        self.state = ServerState(self.settings, EngineDriver(load, stall_s=self.settings.stall_timeout))

    async def __aenter__(self):
        self.listener = bind(self.settings)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.task = asyncio.create_task(run_server(self.settings, self.state, self.listener))
        for _ in range(2000):
            if not self.gate.is_set() or self.state.driver.health != "loading" or self.task.done():
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_):
        self.gate.set()
        if not self.task.done() and not self.state.is_draining:
            signal.raise_signal(signal.SIGTERM)
        self.code = await asyncio.wait_for(self.task, 20)
        self.listener.close()

    def connect(self, **options):
        return websockets.connect(self.url.replace("http", "ws") + "/v1/stream", proxy=None, **options)

    async def hello(self, socket):
        await socket.send(encode(Hello(PROTOCOL_VERSION, "test")))
        return decode(await socket.recv())

    def http(self, **options):
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=20, **options)


@pytest.fixture
def serve(byte_text):
    """Makes running servers: ``async with serve(step_s=0.01, max_running=1) as server``."""

    def make(*, step_s=0.0, end_at=None, seed=0, **options):
        return RunningServer(byte_text, letter_logits(byte_text, seed=seed, step_s=step_s, end_at=end_at), **options)

    return make

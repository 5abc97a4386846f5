"""The client's process of a real run: one line of JSON in, one line of JSON out, for each job.

    python -m paceline.bench.worker

The first line says where the relay listens and which methods will come; each method gets connections of its own, which
stay open, so that turns between methods cost nothing and nothing is started lazily while it is timed.

Not here: starting it and making sense of its answers (``real``, ``measured``).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from paceline.bench.baselines.real_waiting import RealWaitingClient
from paceline.bench.baselines.shapes import Shape
from paceline.bench.frames import header_bytes
from paceline.bench.methods import BEST_FIRST, CHAINS, TREES
from paceline.client.address import parse_address
from paceline.client.api import Client
from paceline.client.bundles import find_local_bundle
from paceline.client.drafting.choice import model_drafters
from paceline.client.drafting.drafter import Drafter
from paceline.client.link import Link
from paceline.client.settings import ClientSettings, make_settings
from paceline.client.trace import Trace
from paceline.shared.errors import ModelError, PacelineError
from paceline.shared.messages import PROTOCOL_VERSION, Commit, Grow, Hello, Opened
from paceline.shared.sampling import SamplingParams

DRAFTERS = {"server-alone": "none", "paceline": "auto"}
"""Methods that are a client's own, and the drafter that makes each."""
WAITING = ("chain", "tree", "specedge")
SHAPES: dict[str, Shape] = {shape.name: shape for shape in (*CHAINS, *TREES, *BEST_FIRST)}
PING_S = 0.4
"""Seconds between pings: the round trip time is wanted as it is under load."""


@dataclass
class Worker:
    """Everything that stays open between jobs. url, waiting_url: of our server and the baselines."""

    url: str
    waiting_url: str
    num_clients: int
    compression: bool = False
    clients: dict[str, list[Client]] = field(default_factory=dict)
    waiting: list[RealWaitingClient] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)
    pools: list[ThreadPoolExecutor] = field(default_factory=list)

    @property
    def settings(self) -> ClientSettings:
        """Of every connection."""
        return make_settings(server=self.url, ping_interval=PING_S, compression=self.compression)

    async def open(self, methods: Sequence[str]) -> dict[str, Any]:
        """Connect for each method. Returns what the server says about itself."""
        for method in methods:
            if method in DRAFTERS:
                self.clients[method] = [await self._client(DRAFTERS[method]) for _ in range(self.num_clients)]
        if set(methods) & set(WAITING):
            for _ in range(self.num_clients):
                self.waiting.append(await self._waiting_client())
        welcome = next(iter(self.clients.values()))[0].welcome
        bundle = find_local_bundle(welcome)
        return {
            "bundle": None if bundle is None else str(bundle.folder),
            "step_base_s": welcome.step_time.base_s,
            "step_per_row_s": welcome.step_time.per_row_s,
            "max_context": welcome.limits.max_context,
            "drafters": list(self.clients["paceline"][0].drafter_names) if "paceline" in self.clients else [],
        }

    async def _client(self, drafter: str) -> Client:
        return await Client(self.url, drafter=drafter, settings=self.settings).__aenter__()

    async def _waiting_client(self) -> RealWaitingClient:
        address = parse_address(self.waiting_url)
        link = await Link.connect(address, Hello(PROTOCOL_VERSION, "paceline"), None, self.settings.link)
        bundle = find_local_bundle(link.welcome)
        if bundle is None:
            raise ModelError(f"no draft model for {link.welcome.model!r} here: the baselines need one")
        drafter = model_drafters(bundle, link.welcome, 1)[0]
        pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-draft")
        self.drafters.append(drafter)
        self.pools.append(pool)
        return RealWaitingClient(link, drafter, pool)

    async def serve(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """method, prompts (lists of ids, one for each client at most), max_tokens, shape."""
        prompts: list[list[int]] = job["prompts"]
        work = [self._serve_one(job, prompt, number) for number, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*work))

    async def _serve_one(self, job: dict[str, Any], prompt: list[int], number: int) -> dict[str, Any]:
        method, max_tokens = job["method"], job["max_tokens"]
        if method in DRAFTERS:
            return await _stream(self.clients[method][number], prompt, max_tokens)
        answer = await self.waiting[number].serve(
            prompt, max_tokens, SHAPES[job["shape"]], is_proactive=method == "specedge"
        )
        return _facts(answer.opened_at, answer.arrivals, answer.trace)

    async def close(self) -> None:
        """Close all connections."""
        for client in (client for clients in self.clients.values() for client in clients):
            await client.close()
        for waiting in self.waiting:
            await waiting.close()
        for pool in self.pools:
            pool.shutdown()


async def _stream(client: Client, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    trace = Trace()
    opened_at = perf_counter()
    stream = client.stream(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), trace=trace)
    arrivals = [(perf_counter(), list(chunk.token_ids)) async for chunk in stream]
    return _facts(opened_at, arrivals, trace)


def _facts(opened_at: float, arrivals: Sequence[tuple[float, list[int]]], trace: Trace) -> dict[str, Any]:
    """What the other process needs to know of one answer."""
    commits = [one for one in trace.arrived if isinstance(one.message, Commit)]
    grows = [one.message for one in trace.sent if isinstance(one.message, Grow)]
    return {
        "opened_at": opened_at,
        "arrivals": arrivals,
        "cached_tokens": next((o.message.cached_tokens for o in trace.arrived if isinstance(o.message, Opened)), 0),
        "commits": [_commit_facts(one.at, one.message) for one in commits if isinstance(one.message, Commit)],
        "calls": [(call.num_rows, call.asked_at, call.answered_at) for call in trace.calls],
        "rtt_s": [one.rtt_s for one in commits],
        "num_drafted": sum(len(grow.tokens) for grow in grows),
        "num_frames": len(grows),
        "bytes_up": sum(one.num_bytes + header_bytes(one.num_bytes, is_up=True) for one in trace.sent),
        "bytes_down": sum(one.num_bytes + header_bytes(one.num_bytes, is_up=False) for one in trace.arrived),
    }


def _commit_facts(at: float, commit: Commit) -> list[float]:
    """[time, tokens, nodes scored, nodes accepted, step seconds]."""
    return [at, len(commit.tokens), commit.num_scored, commit.num_drafted, commit.step_s]


async def _run() -> None:
    worker: Worker | None = None
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            if worker is None:
                methods = job.pop("methods")
                worker = Worker(**job)
                answer: Any = await worker.open(methods)
            else:
                answer = await worker.serve(job)
            print(json.dumps(answer), flush=True)
    finally:
        if worker is not None:
            await worker.close()


def main() -> None:
    """Jobs until the input ends."""
    try:
        asyncio.run(_run())
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

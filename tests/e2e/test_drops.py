"""Forced disconnections over loopback, killed servers among them: no token lost, none doubled, the same text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.processes import Cores, ServerProcess
from paceline.bench.real import relay_to
from paceline.bench.relay import Relay, RelaySettings
from paceline.client.api import Client
from paceline.client.settings import make_settings
from paceline.models.tiny import save_tiny_target
from paceline.shared.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=80, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=80, temperature=1.0, seed=11, ignore_eos=True)


async def ids_of(client: Client, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    return [token async for chunk in client.stream(prompt, sampling) for token in chunk.token_ids]


class Saboteur:
    """Cuts every connection of some relays now and then, from another task than the one that streams."""

    def __init__(self, relays: Sequence[Relay], mean_s: float, seed: int = 0) -> None:
        self._relays, self._mean_s, self._rng = relays, mean_s, random.Random(seed)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1.0 / self._mean_s))
            for relay in self._relays:
                relay.drop_all_soon()

    @property
    def num_cuts(self) -> int:
        """Connections that stood and were cut."""
        return sum(relay.counters.num_dropped for relay in self._relays)


async def cut_now_and_then(
    relay: Relay, prompt: Sequence[int], sampling: SamplingParams, drafter: str, every: int
) -> list[int]:
    """An answer whose link is cut whenever so many more tokens have come."""
    settings = make_settings(connect_timeout=20.0)
    async with Client(relay.url, drafter=drafter, settings=settings) as client:
        ids: list[int] = []
        due = every
        async for chunk in client.stream(prompt, sampling):
            ids += chunk.token_ids
            if len(ids) >= due:
                relay.drop_all_soon()
                due = len(ids) + every
        return ids


async def undisturbed(url: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
    async with Client(url, drafter="none", settings=make_settings(pull=False)) as client:
        return [await ids_of(client, prompt, sampling) for prompt in prompts]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_cut_links_change_no_token_of_the_embedded_pair(server: Any, sampling: SamplingParams) -> None:
    prompt = list(range(500, 520))
    with relay_to(int(server.url.rsplit(":", 1)[1]), RelaySettings(0.01)) as relay:
        ids = asyncio.run(cut_now_and_then(relay, prompt, sampling, "auto", 12))
        num_cuts = relay.counters.num_dropped
    assert num_cuts >= 4
    assert [ids] == asyncio.run(undisturbed(server.url, [prompt], sampling))


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two processes with the same tiny random target."""
    target = save_tiny_target(tmp_path / "target", "llama")
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(str(target), Cores())) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_fifty_drops_with_killed_servers_among_them_lose_and_double_nothing(
    two_servers: list[ServerProcess], sampling: SamplingParams
) -> None:
    prompts = [[10 + number, 20, 30] for number in range(200)] * 5
    with ExitStack() as stack:
        relays = [stack.enter_context(relay_to(one.port, RelaySettings(0.005))) for one in two_servers]
        saboteur = Saboteur(relays, 0.4)
        received, num_kills = asyncio.run(_until_fifty(two_servers, relays, prompts, sampling, saboteur))
    assert num_kills >= 3
    assert saboteur.num_cuts + num_kills >= 50
    alone = asyncio.run(undisturbed(two_servers[0].url, prompts[: len(received)], sampling))
    assert received == alone


async def _until_fifty(
    servers: Sequence[ServerProcess],
    relays: Sequence[Relay],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    saboteur: Saboteur,
) -> tuple[list[list[int]], int]:
    """Streams prompt after prompt; every tenth drop is a killed process, which comes back while the other serves."""
    received: list[list[int]] = []
    num_kills = 0
    reviving: asyncio.Future[None] | None = None
    settings = make_settings(pull=False, connect_timeout=20.0)
    async with Client([relay.url for relay in relays], drafter="ngram", settings=settings) as client:
        work = asyncio.create_task(saboteur.run())
        for prompt in prompts:
            ids: list[int] = []
            async for chunk in client.stream(prompt, sampling):
                ids += chunk.token_ids
                is_due = saboteur.num_cuts >= 10 * num_kills + 5
                if is_due and num_kills < 5 and (reviving is None or reviving.done()):
                    victim = servers[num_kills % 2]
                    victim.kill()
                    num_kills += 1
                    reviving = asyncio.get_running_loop().run_in_executor(None, victim.start)
            received.append(ids)
            if saboteur.num_cuts + num_kills >= 50 and num_kills >= 3:
                break
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        if reviving is not None:
            await reviving
    return received, num_kills

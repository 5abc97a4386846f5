"""The client's process of a real run: reads one job as JSON from stdin, serves its prompts, writes JSON to stdout.

    python -m paceline.bench.worker < job.json

Not here: starting it and making sense of its answer (``real``).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from paceline.client.api import Client
from paceline.client.settings import make_settings
from paceline.shared.sampling import SamplingParams


async def _serve(client: Client, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    opened_at = time.perf_counter()
    stream = client.stream(prompt, sampling)
    arrivals: list[tuple[float, list[int]]] = []
    async for chunk in stream:
        arrivals.append((time.perf_counter(), list(chunk.token_ids)))
    completion = stream.completion
    stats = completion.stats
    return {
        "opened_at": opened_at,
        "arrivals": arrivals,
        "num_steps": stats.verify_steps,
        "num_drafted": stats.drafted,
        "num_accepted": stats.accepted,
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "explanation": completion.explanation,
    }


async def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """url, drafter, prompts (lists of ids), max_tokens, clients: that many at a time, each on a connection of its own.

    Every client first completes one token of a prompt of its own, so that nothing is started lazily while it is timed.
    """
    prompts: list[list[int]] = job["prompts"]
    waiting = list(enumerate(prompts))
    served: list[dict[str, Any] | None] = [None] * len(prompts)

    async def one_client() -> None:
        settings = make_settings(server=job["url"])
        async with Client(job["url"], drafter=job["drafter"], settings=settings) as client:
            await _serve(client, prompts[0][:8], 8)
            while waiting:
                index, prompt = waiting.pop(0)
                served[index] = await _serve(client, prompt, job["max_tokens"])

    await asyncio.gather(*(one_client() for _ in range(job["clients"])))
    return [one for one in served if one is not None]


def main() -> None:
    """One job."""
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()

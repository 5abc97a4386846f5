"""``paceline bench --real``: server and clients as processes over loopback, a delaying relay between, cores pinned.

The server gets all cores but the last; the clients and the relay share the last one. Methods are those that one server
can serve: plain streaming and ours, in turns at every RTT, so that a machine that warms up or slows down favours none.

Not here: the virtual clock (``grid``).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.bench.grid import CellKey, Results
from paceline.bench.methods import Outcome
from paceline.bench.processes import Cores, ServerProcess, divide_cores, pin, start_pinned
from paceline.bench.prompts import SHIPPED, load_prompts
from paceline.bench.relay import Relay, RelaySettings
from paceline.bench.report import meta
from paceline.bench.stats import Row, Served, row_of, with_speedups
from paceline.models.catalogue import find_target
from paceline.shared.errors import LinkError, ParameterError

DRAFTERS = {"server-alone": "none", "paceline": "auto"}
"""The methods of a real run, and the drafter that makes each."""
_NUM_DEFAULT_PROMPTS = 8
_JOB_TIMEOUT_S = 1800.0


@contextmanager
def relay_to(port: int, settings: RelaySettings) -> Iterator[Relay]:
    """A relay on an event loop in a thread of its own."""
    relay = Relay("127.0.0.1", port, settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="relay", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(relay.start(), loop).result()
    try:
        yield relay
    finally:
        asyncio.run_coroutine_threadsafe(relay.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_worker(job: dict[str, Any], cores: Cores) -> list[Served]:
    """One job in a client process. Raises ``LinkError`` with its last line if it fails."""
    command = [sys.executable, "-m", "paceline.bench.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_pinned(command, cores.client, cores.client, **pipes) as process:
        try:
            output, errors = process.communicate(json.dumps(job).encode(), timeout=_JOB_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise LinkError(f"the client process failed: {lines[-1] if lines else process.returncode}")
    return [_served(answer) for answer in json.loads(output)]


def _served(answer: dict[str, Any]) -> Served:
    served = Served(answer["opened_at"], is_finished=True)
    for time_s, token_ids in answer["arrivals"]:
        served.arrive(time_s, token_ids)
    for name in ("num_steps", "num_drafted", "num_accepted", "bytes_up", "bytes_down"):
        setattr(served, name, answer[name])
    return served


def _names(methods: str | None) -> tuple[str, ...]:
    if not methods:
        return tuple(DRAFTERS)
    wanted = {name.strip() for name in methods.split(",") if name.strip()}
    unknown = sorted(wanted - DRAFTERS.keys())
    if unknown:
        raise ParameterError("methods", f"expected methods among {', '.join(DRAFTERS)} with --real, got {unknown[0]!r}")
    return tuple(name for name in DRAFTERS if name in wanted or name == "server-alone")


def run_real(
    *,
    model: str,
    prompts: Path | None,
    rtts_ms: Sequence[float],
    methods: str | None,
    clients: int,
    max_tokens: int,
    jitter_share: float,
    progress: Callable[[str], None],
) -> tuple[Results, dict[str, Any]]:
    """The rows and what they mean. Raises ``ModelError`` if the pair is not built, ``LinkError`` if a process fails."""
    from paceline.bench.recorder import prompt_ids

    names = _names(methods)
    folder = find_target(model)
    chosen = load_prompts(prompts) if prompts is not None else load_prompts(SHIPPED)[:_NUM_DEFAULT_PROMPTS]
    ids = [one.tolist() for one in prompt_ids(folder, chosen)]
    cores = divide_cores()
    pin(cores.client)
    outcomes: dict[CellKey, dict[str, Outcome]] = {}
    with ServerProcess(model, cores) as server:
        for rtt_ms in rtts_ms:
            settings = RelaySettings(rtt_ms / 1e3, jitter_share * rtt_ms / 1e3)
            with relay_to(server.port, settings) as relay:
                for name in names:
                    progress(f"rtt {rtt_ms:g} ms, {name}")
                    job = {
                        "url": f"http://127.0.0.1:{relay.port}",
                        "drafter": DRAFTERS[name],
                        "prompts": ids,
                        "max_tokens": max_tokens,
                        "clients": clients,
                    }
                    outcomes.setdefault((rtt_ms, "real"), {})[name] = Outcome(run_worker(job, cores))
    about = meta(
        "real",
        model=model,
        prompts=len(ids),
        max_tokens=max_tokens,
        jitter_share=jitter_share,
        cores={"server": list(cores.server), "client": list(cores.client)},
    )
    return Results(_rows(outcomes, clients), outcomes), about


def _rows(outcomes: dict[CellKey, dict[str, Outcome]], clients: int) -> list[Row]:
    """step_ms is what it turned out to be: the server alone's median inter-token latency at the first RTT."""
    first = next(iter(outcomes.values()))["server-alone"].served
    step_ms = round(row_of("", first, rtt_ms=0, step_ms=0, clients=clients).itl_p50_s * 1e3, 2)
    rows: list[Row] = []
    for (rtt_ms, _), found in outcomes.items():
        wanted = [one.token_ids for one in found["server-alone"].served]
        for name, outcome in found.items():
            flips = sum(
                max(len(mine.token_ids), len(theirs)) - sum(map(int.__eq__, mine.token_ids, theirs))
                for mine, theirs in zip(outcome.served, wanted, strict=True)
            )
            rows.append(row_of(name, outcome.served, rtt_ms=rtt_ms, step_ms=step_ms, clients=clients, flips=flips))
    return with_speedups(rows)

"""``paceline bench --real``: server and clients as processes over loopback, a delaying relay between, cores pinned.

The server gets all cores but the last; the clients and the relay share the last one. In order:

    rehearse    every prompt once without drafts, a few with: fills caches, gives the texts, and a first calibration
    choose      baselines take the tree that the simulator, so calibrated, finds best for them in each cell
    measure     prompt by prompt, RTT by RTT, method by method, in turns: whatever else the machine does hits them all
    compare     the simulator again, calibrated by what was measured, beside it (``agreement``)

Not here: the virtual clock alone (``grid``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.bench.baselines.shapes import Shape
from paceline.bench.measured import RealAnswer
from paceline.bench.methods import BEST_FIRST, CHAINS, TREES
from paceline.bench.processes import SERVE, WHOLE_TREES, Cores, ServerProcess, WorkerProcess, divide_cores, pin
from paceline.bench.prompts import SHIPPED, load_prompts
from paceline.bench.recording import RecordingSet
from paceline.bench.relay import Relay, RelaySettings
from paceline.bench.worker import PING_S, WAITING
from paceline.models.catalogue import find_target
from paceline.shared.errors import ParameterError
from paceline.shared.messages import StepTime

METHODS = ("server-alone", "chain", "tree", "specedge", "paceline")
BASELINE_SHAPES: dict[str, Sequence[Shape]] = {"chain": CHAINS, "tree": TREES, "specedge": BEST_FIRST}
_NUM_DEFAULT_PROMPTS = 4
_NUM_REHEARSED = 2
_WARM_TOKENS = 3
_FIRST_SHAPES = {"chain": "chain-4", "tree": "<3,2,1,1>", "specedge": "best-16x6"}
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RealPlan:
    """What to run. jitter_share: largest jitter as a share of the RTT."""

    model: str
    prompts: Path | None
    rtts_ms: Sequence[float]
    methods: Sequence[str] = METHODS
    clients: int = 1
    max_tokens: int = 48
    jitter_share: float = 0.0


@dataclass(slots=True)
class RealRun:
    """What came of it. answers: by (RTT in ms, method), in the prompts' order. shapes: the baselines', likewise."""

    plan: RealPlan
    prompts: list[list[int]]
    cores: Cores
    step_time: StepTime = field(default_factory=lambda: StepTime(0.0, 0.0))
    max_context: int = 0
    bundle: Path | None = None
    rehearsal: dict[str, list[RealAnswer]] = field(default_factory=dict)
    recordings: RecordingSet = field(default_factory=lambda: RecordingSet((), {}))
    shapes: dict[tuple[float, str], Shape] = field(default_factory=dict)
    answers: dict[tuple[float, str], list[RealAnswer]] = field(default_factory=dict)


def method_names(methods: str | None) -> tuple[str, ...]:
    """The methods of ``--methods``, server-alone always among them. Raises ``ParameterError`` that lists them."""
    wanted = {name.strip() for name in (methods or ",".join(METHODS)).split(",") if name.strip()}
    unknown = sorted(wanted - set(METHODS))
    if unknown:
        raise ParameterError("methods", f"expected methods among {', '.join(METHODS)} with --real, got {unknown[0]!r}")
    return tuple(name for name in METHODS if name in wanted or name == "server-alone")


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


def run_real(plan: RealPlan, progress: Progress) -> RealRun:
    """Raises ``ModelError`` if the pair is not built, ``LinkError`` if a process fails."""
    from paceline.bench.recorder import prompt_ids

    folder = find_target(plan.model)
    chosen = load_prompts(plan.prompts or SHIPPED)
    if plan.prompts is None:
        chosen = chosen[:_NUM_DEFAULT_PROMPTS]
    run = RealRun(plan, [one.tolist() for one in prompt_ids(folder, chosen)], divide_cores())
    pin(run.cores.client)
    with ExitStack() as stack:
        # Baselines have a server of their own, see ``whole_tree_server``; while one serves the other sleeps.
        programs = [SERVE, WHOLE_TREES] if set(plan.methods) & set(WAITING) else [SERVE]
        servers = [stack.enter_context(ServerProcess(plan.model, run.cores, program=one)) for one in programs]
        relays = [stack.enter_context(relay_to(server.port, RelaySettings())) for server in servers]
        worker = stack.enter_context(WorkerProcess(run.cores))
        _Stage(run, relays, worker, progress).play()
    return run


class _Stage:
    """One run, with everything that it needs open."""

    def __init__(self, run: RealRun, relays: Sequence[Relay], worker: WorkerProcess, progress: Progress) -> None:
        self._run, self._relays, self._worker, self._progress = run, relays, worker, progress

    def play(self) -> None:
        run, plan = self._run, self._run.plan
        opening = {
            "url": self._relays[0].url,
            "waiting_url": self._relays[-1].url,
            "num_clients": plan.clients,
            "methods": list(plan.methods),
        }
        welcome = self._worker.ask(opening)
        run.step_time = StepTime(welcome["step_base_s"], welcome["step_per_row_s"])
        run.max_context = welcome["max_context"]
        run.bundle = None if welcome["bundle"] is None else Path(welcome["bundle"])
        self._rehearse()
        self._choose()
        self._measure()

    def _rehearse(self) -> None:
        run, plan = self._run, self._run.plan
        self._progress("rehearsing: every prompt once")
        run.rehearsal["server-alone"] = self._ask("server-alone", run.prompts, plan.max_tokens)
        for method in plan.methods[1:]:
            shape = _FIRST_SHAPES.get(method, "")
            run.rehearsal[method] = self._ask(method, run.prompts[:_NUM_REHEARSED], plan.max_tokens, shape)
        if set(plan.methods) & set(WAITING):
            # The other server has prompts to read too.
            method = next(name for name in plan.methods if name in WAITING)
            self._ask(method, run.prompts, _WARM_TOKENS, _FIRST_SHAPES[method])
        run.recordings = record_answers(run)

    def _choose(self) -> None:
        from paceline.bench.agreement import best_shape
        from paceline.bench.comparison import conditions_of

        run = self._run
        for rtt_ms in run.plan.rtts_ms:
            for method in run.plan.methods:
                if method in BASELINE_SHAPES:
                    # The rehearsal ran without delay; the cell's is added to the round trip that it had.
                    conditions = conditions_of(run, run.rehearsal, method, rtt_ms / 1e3)
                    run.shapes[rtt_ms, method] = best_shape(method, BASELINE_SHAPES[method], conditions)

    def _measure(self) -> None:
        run, plan = self._run, self._run.plan
        step = plan.clients
        for turn, begin in enumerate(range(0, len(run.prompts), step)):
            for rtt_ms in plan.rtts_ms:
                settings = RelaySettings(rtt_ms / 1e3, plan.jitter_share * rtt_ms / 1e3)
                if settings != self._relays[0].settings:
                    for relay in self._relays:
                        relay.settings = settings
                    # Long enough for every connection to have seen a ping come back over the new delay.
                    time.sleep(1.5 * PING_S + rtt_ms / 1e3)
                shift = turn % len(plan.methods)
                for method in (*plan.methods[shift:], *plan.methods[:shift]):
                    self._progress(f"prompts from {begin + 1} of {len(run.prompts)}, rtt {rtt_ms:g} ms, {method}")
                    shape = run.shapes.get((rtt_ms, method))
                    found = self._ask(
                        method, run.prompts[begin : begin + step], plan.max_tokens, shape.name if shape else ""
                    )
                    run.answers.setdefault((rtt_ms, method), []).extend(found)

    def _ask(self, method: str, prompts: list[list[int]], max_tokens: int, shape: str = "") -> list[RealAnswer]:
        """So many prompts at a time as there are clients."""
        made: list[RealAnswer] = []
        step = self._run.plan.clients
        for begin in range(0, len(prompts), step):
            some = prompts[begin : begin + step]
            job = {"method": method, "prompts": some, "max_tokens": max_tokens, "shape": shape}
            answers = self._worker.ask(job)
            made += [RealAnswer.of(facts, len(ids)) for facts, ids in zip(answers, some, strict=True)]
        return made


def record_answers(run: RealRun) -> RecordingSet:
    """The texts that the server alone wrote, and what the pair's draft model says along them."""
    from paceline.bench.recorder import WIDTH, add_answers
    from paceline.bench.recording import Recording, Rows
    from paceline.client.drafting.onnx_ssm import OnnxDrafter
    from paceline.models.manifest import load_manifest

    nothing = Rows(np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH), np.float32))
    texts = [
        Recording(
            np.array(prompt, np.int32),
            np.array(answer.served(run.plan.max_tokens).token_ids, np.int32),
            nothing,
            nothing,
        )
        for prompt, answer in zip(run.prompts, run.rehearsal["server-alone"], strict=True)
    ]
    recordings = RecordingSet(tuple(texts), {"pair": run.plan.model})
    if run.bundle is None:
        return recordings
    entry = load_manifest(run.bundle).drafters[0]
    drafter = OnnxDrafter(run.bundle / entry.file, max_context=entry.context_len, threads=1)
    try:
        return add_answers(recordings, drafter)
    finally:
        drafter.close()

"""``paceline bench``: parses, calls what measures, and prints. No measuring here."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.models import OptionInfo

from paceline.bench import recording
from paceline.bench.costs import PRESETS, DraftTime, step_time_of
from paceline.bench.options import REAL_STEP_NOTE, Mode, check_options, mode_of, typed_options
from paceline.bench.page import check_plot_path, write_plot
from paceline.bench.prompts import load_prompts
from paceline.bench.recording import RecordingSet
from paceline.bench.report import TABLE_WIDTH, as_json, check_writable, meta, table, write_text
from paceline.shared.errors import ParameterError

if TYPE_CHECKING:
    from paceline.bench.capacity import CapacityPlan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_RTTS, _STEPS = "0,10,20,40,80,150,300", "30"
_CAPACITY_RTTS, _CAPACITY_STEPS = "20", "8b-h100,70b-4xh100"
_PROMISE_RTTS, _PROMISE_STEPS = "0,5,10,20,40,80,150,300", "15,30,60"

_EXAMPLES = """
Examples:

  paceline bench                                        simulate the recorded pair at common RTTs

  paceline bench --rtt 0,20,80 --step 8b-h100,30 --plot gain.html

  paceline bench --real --rtt 0,20,80 --json real.json  processes over loopback, through a delaying relay

  paceline bench --simulate --capacity --json c.json    how many clients one server holds, by latency

  paceline bench --simulate --promises --json p.json    what the grid promises, pass or fail; minutes

  paceline bench --prompts my.jsonl --calibrate         your prompts, this machine's step time

  paceline bench --flips --json flips.json              what bfloat16 changes, against teacher forcing
"""


def _flag(name: str, text: str) -> OptionInfo:
    """A switch with its environment twin."""
    option: OptionInfo = typer.Option(f"--{name}", help=text, envvar=f"PACELINE_BENCH_{name.upper()}")
    return option


def _numbers(param: str, text: str, what: str = "milliseconds") -> tuple[float, ...]:
    """Raises ``ParameterError`` for anything but finite numbers from 0 on, with commas between."""
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values or not all(0 <= value < math.inf for value in values):
        raise ParameterError(param, f"expected --{param} as {what} with commas between, got {text!r}")
    return values


@app.command(help="Measure what a pair gains, simulated or real, side by side with its baselines.", epilog=_EXAMPLES)
def bench(
    context: typer.Context,
    simulate: Annotated[bool, _flag("simulate", "on a virtual clock (the default)")] = False,
    real: Annotated[bool, _flag("real", "processes over loopback through a delaying relay")] = False,
    engine: Annotated[bool, _flag("engine", "the engine against transformers, no network")] = False,
    verifiers: Annotated[bool, _flag("verifiers", "tokens per step of the four verifiers")] = False,
    flips: Annotated[bool, _flag("flips", "bfloat16 tokens that are not a plain forward's argmax")] = False,
    capacity: Annotated[
        bool, _flag("capacity", "clients that one server can serve, simulated with Poisson arrivals")
    ] = False,
    promises: Annotated[
        bool, _flag("promises", "check the grid's promises, simulated; exit code 1 when one fails")
    ] = False,
    slo: Annotated[
        str,
        typer.Option(
            help="for --capacity: limits of p95 inter-token latency in one-token steps, with commas",
            envvar="PACELINE_BENCH_SLO",
        ),
    ] = "0.5,0.75,1,1.25,1.5,2,3",
    rtt: Annotated[
        str | None,
        typer.Option(
            help=f"round trip times in ms, with commas; {_RTTS}, or {_CAPACITY_RTTS} in --capacity, "
            f"or {_PROMISE_RTTS} in --promises, if not set",
            envvar="PACELINE_BENCH_RTT",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="one-token step times in ms, BASE+ROW in ms, or presets, with commas; "
            f"{_STEPS}, or {_CAPACITY_STEPS} in --capacity, or {_PROMISE_STEPS} in --promises, if not set",
            envvar="PACELINE_BENCH_STEP",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="methods with commas; all by default", envvar="PACELINE_BENCH_METHODS")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="concurrent clients", envvar="PACELINE_BENCH_CLIENTS")] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with turns or prompt, or plain text", envvar="PACELINE_BENCH_PROMPTS"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="tokens of output per prompt", envvar="PACELINE_BENCH_MAX_TOKENS")
    ] = 96,
    model: Annotated[
        str, typer.Option(help="the pair for --prompts, --real and --flips", envvar="PACELINE_BENCH_MODEL")
    ] = "smollm2",
    jitter: Annotated[
        float, typer.Option(min=0.0, help="largest jitter as a share of the RTT", envvar="PACELINE_BENCH_JITTER")
    ] = 0.0,
    loss: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="chance that a frame stalls", envvar="PACELINE_BENCH_LOSS")
    ] = 0.0,
    draft_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="ms per draft call; as measured if not set", envvar="PACELINE_BENCH_DRAFT_MS"),
    ] = None,
    calibrate: Annotated[bool, _flag("calibrate", "take the step time of this machine")] = False,
    quick: Annotated[bool, _flag("quick", "fewer positions in --verifiers")] = False,
    seed: Annotated[int, typer.Option(min=0, help="of the link's dice", envvar="PACELINE_BENCH_SEED")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the figures here", envvar="PACELINE_BENCH_JSON")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="write a .png or a self-contained .html", envvar="PACELINE_BENCH_PLOT")
    ] = None,
) -> None:
    mode = mode_of(simulate=simulate, real=real, engine=engine, verifiers=verifiers, flips=flips)
    typed = typed_options(context)
    check_options(mode, typed, is_capacity=capacity, is_promises=promises)
    usual_rtts = _CAPACITY_RTTS if capacity else _PROMISE_RTTS if promises else _RTTS
    usual_steps = _CAPACITY_STEPS if capacity else _PROMISE_STEPS if promises else _STEPS
    rtts = _numbers("rtt", usual_rtts if rtt is None else rtt)
    step = usual_steps if step is None else step
    steps = tuple(part.strip() for part in step.split(",") if part.strip())
    for one in steps:
        step_time_of(one)
    if not steps:
        raise ParameterError("step", f"expected --step with commas between, got {step!r}")
    if plot is not None:
        check_plot_path(plot)
    check_writable(json_path, plot)
    console = Console(stderr=True)
    if mode is Mode.REAL and "step" in typed:
        console.print(REAL_STEP_NOTE, highlight=False)
    if capacity:
        from paceline.bench.capacity import CapacityPlan

        slos = _numbers("slo", slo, "one-token steps above 0")
        if not min(slos):
            raise ParameterError("slo", f"expected --slo as one-token steps above 0, got {slo!r}")
        recordings = _recordings(prompts, model, max_tokens, console)
        search = CapacityPlan(recordings, steps, slos, rtts, _draft_time(recordings, draft_ms), seed)
        _capacity(search, json_path, plot, console)
        return
    if promises:
        from paceline.bench.grid import Grid
        from paceline.bench.link import LinkModel
        from paceline.bench.promises import check_promises

        recordings, link = _recordings(prompts, model, max_tokens, console), LinkModel(loss=loss)
        steps = _calibrated(model, console) if calibrate else steps
        grid = Grid(recordings, rtts, steps, (), link, 0.0, _draft_time(recordings, draft_ms), clients, seed)
        check_promises(grid, json_path, lambda line: console.print(line, highlight=False))
        return
    if mode is Mode.ENGINE:
        from paceline.bench.engine import run_engine_bench

        _print_json(run_engine_bench(), json_path)
        return
    if mode is Mode.VERIFIERS:
        from paceline.bench.verifiers import QUICK, run_verifier_bench

        effort = QUICK if quick else None
        _print_json(run_verifier_bench(model, prompts, effort, progress=console.print), json_path)
        return
    if mode is Mode.FLIPS:
        from paceline.bench.flips import check_flips, run_flip_bench

        report = run_flip_bench(model, prompts, max_tokens, progress=console.print)
        _print_json(report, json_path)
        check_flips(report)
        return
    if mode is Mode.REAL:
        from paceline.bench.comparison import agreement_table, compare
        from paceline.bench.real import RealPlan, run_real
        from paceline.bench.real import method_names as real_method_names

        plan = RealPlan(model, prompts, rtts, real_method_names(methods), clients, max_tokens, jitter)
        results, about = compare(run_real(plan, console.print))
        if about["agreement"]:
            wide = Console()
            Console(width=max(wide.width, TABLE_WIDTH)).print(agreement_table(about))
    else:
        results, about = _simulate(
            recordings=_recordings(prompts, model, max_tokens, console),
            rtts_ms=rtts,
            steps=_calibrated(model, console) if calibrate else steps,
            methods=methods,
            clients=clients,
            link={"loss": loss},
            jitter_share=jitter,
            draft_ms=draft_ms,
            seed=seed,
        )
    out = Console()
    Console(width=max(out.width, TABLE_WIDTH)).print(table(results.rows))
    for name, cost in about.get("transport", {}).items():
        up, down = cost["bytes_up_per_token"], cost["bytes_down_per_token"]
        console.print(f"paceline, {name}: {up:g} bytes up and {down:g} down per token", highlight=False)
    for line in about["caveats"]:
        console.print(f"- {line}", highlight=False)
    if json_path is not None:
        write_text(json_path, as_json(results.rows, about))
    if plot is not None:
        for file in write_plot(plot, results, about):
            console.print(f"wrote {file}", highlight=False)


def _recordings(prompts: Path | None, model: str, max_tokens: int, console: Console) -> RecordingSet:
    if prompts is None:
        return RecordingSet.load(recording.SHIPPED)
    from paceline.bench.recorder import record

    return record(model, load_prompts(prompts), max_tokens, progress=console.print)


def _calibrated(model: str, console: Console) -> tuple[str, ...]:
    from paceline.bench.calibrate import calibrate_target
    from paceline.server.loading import load_target

    found = calibrate_target(load_target(model))
    console.print(f"calibrated: {', '.join(f'{rows} rows {ms:.1f} ms' for rows, ms in found.step_ms.items())}")
    return (f"{1e3 * found.step_time.base_s:.3f}+{1e3 * found.step_time.per_row_s:.4f}",)


def _draft_time(recordings: RecordingSet, draft_ms: float | None) -> DraftTime:
    from paceline.bench.calibrate import draft_time_of

    draft_time = draft_time_of(recordings)
    return draft_time if draft_ms is None else DraftTime(draft_ms / 1e3, draft_time.per_row_s)


def _capacity(plan: CapacityPlan, json_path: Path | None, plot: Path | None, console: Console) -> None:
    from paceline.bench.capacity import run_capacity
    from paceline.bench.capacity_report import about_capacity, capacity_json, capacity_table, verdict
    from paceline.bench.capacity_report import write_capacity_plot as write_plot

    rows = run_capacity(plan.workloads(), plan.slos, progress=lambda line: console.print(line, highlight=False))
    steps = dict(_step_facts(one) for one in plan.steps)
    about = about_capacity(recordings=plan.recordings.meta, rtts_ms=list(plan.rtts_ms), seed=plan.seed, steps=steps)
    out = Console()
    Console(width=max(out.width, TABLE_WIDTH)).print(capacity_table(rows))
    for line in (*about["caveats"], verdict(rows)):
        console.print(f"- {line}", highlight=False)
    if json_path is not None:
        write_text(json_path, capacity_json(rows, about))
    if plot is not None:
        write_plot(plot, rows, about)
        console.print(f"wrote {plot}", highlight=False)


def _simulate(*, recordings: RecordingSet, draft_ms: float | None, methods: str | None, **conditions: Any) -> Any:
    from paceline.bench.grid import Grid, run_grid
    from paceline.bench.link import LinkModel
    from paceline.bench.methods import method_names
    from paceline.bench.transport_cost import transport_cost

    draft_time = _draft_time(recordings, draft_ms)
    names = method_names(methods)
    link = LinkModel(**conditions.pop("link"))
    grid = Grid(recordings, methods=names, link=link, draft_time=draft_time, **conditions)
    about = meta(
        "simulate",
        recordings=recordings.meta,
        prompts=len(recordings.recordings),
        draft_ms={"base": round(1e3 * draft_time.base_s, 3), "per_row": round(1e3 * draft_time.per_row_s, 4)},
        jitter_share=grid.jitter_share,
        loss=link.loss,
        seed=grid.seed,
        steps=dict(_step_facts(one) for one in grid.steps),
        transport={name: asdict(cost) for name, cost in transport_cost(grid).items()} if "paceline" in names else {},
    )
    return run_grid(grid), about


def _step_facts(text: str) -> tuple[str, dict[str, float | str]]:
    name, step_time = step_time_of(text)
    facts: dict[str, float | str] = {"base_ms": 1e3 * step_time.base_s, "per_row_ms": 1e3 * step_time.per_row_s}
    return name, facts | ({"source": PRESETS[name].source} if name in PRESETS else {})


def _print_json(figures: dict[str, Any], json_path: Path | None) -> None:
    import json

    text = json.dumps(figures, indent=1)
    typer.echo(text)
    if json_path is not None:
        write_text(json_path, text)

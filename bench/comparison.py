"""What a real run says, for people and programs: its rows, the calibrated simulator's beside them, and how they agree.

Not here: running (``real``), simulating (``agreement``), fitting (``measured``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from paceline.bench.agreement import Replay, margin, replay
from paceline.bench.grid import CellKey, Results, count_flips
from paceline.bench.measured import MeasuredCost, RealAnswer, between_steps_s, draft_time, rtt_s, step_table
from paceline.bench.methods import Outcome
from paceline.bench.real import RealRun
from paceline.bench.report import meta
from paceline.bench.stats import Row, Served, row_of, with_speedups
from paceline.bench.target import renumbered
from paceline.server.kv.pool import BLOCK_SIZE

TOLERANCE = 0.15
"""How far the simulator's speed may be from the real one."""


def conditions_of(
    run: RealRun, answers: Mapping[str, Sequence[RealAnswer]], method: str, added_rtt_s: float = 0.0
) -> Replay:
    """A method's cell in the simulator's terms. answers: by method, those that were measured together."""
    recordings, vocab_size = renumbered(run.recordings)
    everything = [one for some in answers.values() for one in some]
    cost = MeasuredCost(run.step_time, table=step_table(everything, between_steps_s(answers["server-alone"])))
    mine = answers[method]
    # A second opening of the same prompt finds all of its whole blocks but the one that holds the last token.
    cached = tuple((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in run.prompts)
    return Replay(
        recordings.recordings, vocab_size, cost, rtt_s(mine) + added_rtt_s, draft_time(mine), cached, run.max_context
    )


def compare(run: RealRun) -> tuple[Results, dict[str, Any]]:
    """The rows of the run, and everything else about it: calibration, simulated rows, agreement, margins."""
    plan = run.plan
    outcomes: dict[CellKey, dict[str, Outcome]] = {}
    simulated: dict[CellKey, dict[str, Outcome]] = {}
    calibration: list[dict[str, Any]] = []
    for rtt_ms in plan.rtts_ms:
        answers = {method: run.answers[rtt_ms, method] for method in plan.methods}
        key = (rtt_ms, "real")
        for method in plan.methods:
            shape = run.shapes.get((rtt_ms, method))
            name = "" if shape is None else shape.name
            real = [one.served(plan.max_tokens) for one in answers[method]]
            outcomes.setdefault(key, {})[method] = Outcome(real, name)
            if plan.clients == 1:
                conditions = conditions_of(run, answers, method)
                calibration.append(_calibration(rtt_ms, method, conditions))
                simulated.setdefault(key, {})[method] = Outcome(replay(method, shape, conditions), name)
    step_ms = round(1e3 * _plain_itl_s(outcomes), 2)
    rows = _rows(outcomes, run, step_ms)
    # Simulated tokens are numbered otherwise: there are no flips to count among them.
    twins = _rows(simulated, run, step_ms, counts_flips=False)
    about = meta(
        "real",
        model=plan.model,
        prompts=len(run.prompts),
        max_tokens=plan.max_tokens,
        jitter_share=plan.jitter_share,
        cores={"server": list(run.cores.server), "client": list(run.cores.client)},
        calibration=calibration,
        simulated=[row.plain() for row in twins],
        agreement=_agreement(rows, twins),
        margins=_margins(outcomes),
    )
    return Results(rows, outcomes), about


def _calibration(rtt_ms: float, method: str, conditions: Replay) -> dict[str, Any]:
    """What the simulator was told."""
    return {
        "rtt_ms": rtt_ms,
        "method": method,
        "measured_rtt_ms": round(1e3 * conditions.rtt_s, 2),
        "step_ms": {f"{rows:.1f}": round(1e3 * seconds, 2) for rows, seconds in conditions.cost.table},
        "draft_base_ms": round(1e3 * conditions.draft_time.base_s, 3),
        "draft_per_row_ms": round(1e3 * conditions.draft_time.per_row_s, 4),
    }


def _plain_itl_s(outcomes: Mapping[CellKey, Mapping[str, Outcome]]) -> float:
    """The step time that it turned out to be: the server alone's median inter-token latency at the first RTT."""
    first = next(iter(outcomes.values()))["server-alone"].served
    return row_of("", first, rtt_ms=0, step_ms=0, clients=1).itl_p50_s


def _rows(
    outcomes: Mapping[CellKey, Mapping[str, Outcome]], run: RealRun, step_ms: float, *, counts_flips: bool = True
) -> list[Row]:
    rows = [
        row_of(
            name,
            outcome.served,
            rtt_ms=rtt_ms,
            step_ms=step_ms,
            clients=run.plan.clients,
            shape=outcome.shape,
            flips=_flips(run, outcome.served) if counts_flips else 0,
        )
        for (rtt_ms, _), found in outcomes.items()
        for name, outcome in found.items()
    ]
    return with_speedups(rows)


def _flips(run: RealRun, served: Sequence[Served]) -> int:
    """Tokens that are not those of the rehearsal without drafts."""
    pairs = zip(run.recordings.recordings, served, strict=True)
    return sum(count_flips(one.token_ids, recording) for recording, one in pairs)


def _agreement(rows: Sequence[Row], twins: Sequence[Row]) -> list[dict[str, Any]]:
    theirs = {(row.rtt_ms, row.method): row for row in twins}
    made: list[dict[str, Any]] = []
    for row in rows:
        twin = theirs.get((row.rtt_ms, row.method))
        if twin is None:
            continue
        made.append(
            {
                "rtt_ms": row.rtt_ms,
                "method": row.method,
                "real_tok_s": row.tok_s,
                "simulated_tok_s": twin.tok_s,
                "simulated_over_real": twin.tok_s / row.tok_s,
                "real_tokens_per_step": row.tokens_per_step,
                "simulated_tokens_per_step": twin.tokens_per_step,
                "is_within": abs(twin.tok_s / row.tok_s - 1.0) <= TOLERANCE,
            }
        )
    return made


def _margins(outcomes: Mapping[CellKey, Mapping[str, Outcome]]) -> list[dict[str, Any]]:
    """Every method against the server alone, prompt by prompt."""
    return [
        {"rtt_ms": rtt_ms, "method": name, **asdict(found), "loses": found.loses}
        for (rtt_ms, _), methods in outcomes.items()
        for name, outcome in methods.items()
        if name != "server-alone"
        for found in (margin(outcome.served, methods["server-alone"].served),)
    ]


def agreement_table(about: Mapping[str, Any]) -> Table:
    """One line for each method and RTT: real, simulated, and how sure the speed-up is."""
    made = Table(title=f"real against simulated (wanted: within {TOLERANCE:.0%})", title_justify="left")
    names = ("rtt ms", "method", "real tok/s", "simulated", "sim/real", "tok/step", "simulated", "speed-up (2 s.e.)")
    for name in names:
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    margins = {(one["rtt_ms"], one["method"]): one for one in about["margins"]}
    for one in about["agreement"]:
        sure = margins.get((one["rtt_ms"], one["method"]))
        made.add_row(
            f"{one['rtt_ms']:g}",
            one["method"],
            f"{one['real_tok_s']:.2f}",
            f"{one['simulated_tok_s']:.2f}",
            f"{one['simulated_over_real']:.2f}" + ("" if one["is_within"] else " !"),
            f"{one['real_tokens_per_step']:.2f}",
            f"{one['simulated_tokens_per_step']:.2f}",
            "" if sure is None else f"{sure['speed_up']:.2f} ({sure['low']:.2f}-{sure['high']:.2f})",
        )
    return made

"""The kinds of run of ``paceline bench``, and which options each of them reads, so that none is typed in vain.

Only what is typed counts: a variable of the environment may stand for other runs. Not here: what the options mean
(``commands``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import typer

from paceline.shared.errors import UsageError


class Mode(StrEnum):
    """What is measured."""

    SIMULATE = "simulate"
    REAL = "real"
    ENGINE = "engine"
    VERIFIERS = "verifiers"
    FLIPS = "flips"


_PAIR = frozenset({"model", "prompts", "json_path"})
_VIRTUAL = _PAIR | {"rtt", "step", "max_tokens", "draft_ms", "seed"}
READ: Mapping[str, frozenset[str]] = {
    "simulate": _VIRTUAL | {"methods", "clients", "jitter", "loss", "calibrate", "plot"},
    "capacity": _VIRTUAL | {"slo", "plot"},
    "promises": _VIRTUAL | {"clients", "loss", "calibrate"},
    "real": _PAIR | {"rtt", "step", "methods", "clients", "max_tokens", "jitter", "plot"},
    "engine": frozenset({"json_path"}),
    "verifiers": _PAIR | {"quick"},
    "flips": _PAIR | {"max_tokens"},
}
"""By kind of run. simulate, capacity and promises run on the virtual clock; what real says to a step is a note."""
REAL_STEP_NOTE = "--step is for the virtual clock: with --real a step takes as long as it takes"
KINDS = frozenset(READ)


def mode_of(**flags: bool) -> Mode:
    """The one that is set, the simulator if none is. flags: by the names of the modes. Raises ``UsageError``."""
    chosen = [Mode(name) for name, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise UsageError(f"expected one of {', '.join(f'--{mode}' for mode in Mode)}, got {len(chosen)}")
    return chosen[0] if chosen else Mode.SIMULATE


def typed_options(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name for name, source in sources if source is not None and source.name == "COMMANDLINE"}


def check_options(mode: Mode, typed: Collection[str], *, is_capacity: bool, is_promises: bool) -> None:
    """Raises ``UsageError`` for the first of the options typed, by parameter name, that the run does not read."""
    if is_capacity and is_promises:
        raise UsageError("expected one of --capacity and --promises, got both")
    kind = "capacity" if is_capacity else "promises" if is_promises else mode.value
    if kind != mode and mode is not Mode.SIMULATE:
        raise UsageError(f"expected --{kind} with --simulate, got it with --{mode}")
    for name in sorted(set(typed) - KINDS - READ[kind]):
        readers = [f"--{other}" for other, read in READ.items() if name in read]
        raise UsageError(f"expected {_flag(name)} with {' or '.join(readers)}, got it with --{kind}")
    if mode is not Mode.SIMULATE:
        return
    if "calibrate" in typed and "step" in typed:
        raise UsageError("expected --step or --calibrate, got both: --calibrate takes this machine's step time")
    if "prompts" not in typed:
        if "max_tokens" in typed:
            raise UsageError("expected --max-tokens with --prompts: the recording that ships has its own lengths")
        if "model" in typed and "calibrate" not in typed:
            raise UsageError("expected --model with --prompts or --calibrate: the recording that ships is of smollm2")


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_path").replace("_", "-")

"""``paceline bench --real`` as a person runs it, on a tiny random pair: all methods, one text, the simulator too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.models.tiny import save_tiny_target

MAKING = "--tokens 800 --layers 2 --vocab 200 --steps 6 --rows 8 --slots 100 --row-len 128 --threads 1 --device cpu"
METHODS = ["server-alone", "chain", "tree", "specedge", "paceline"]


@pytest.mark.slow
def test_real_run_serves_every_method_and_puts_the_simulator_beside_it(
    tmp_path: Path, paceline: Callable[..., Any]
) -> None:
    target, cache = save_tiny_target(tmp_path / "target", "llama"), tmp_path / "cache"
    environment = {"PACELINE_CACHE_DIR": str(cache)}
    folders = ("--work-dir", str(tmp_path / "work"), "--out", str(cache / "drafts" / "target"))
    made = paceline("models", "distill", str(target), *folders, *MAKING.split(), **environment)
    assert made.returncode == 0, made.stderr
    prompts, figures = tmp_path / "prompts.txt", tmp_path / "real.json"
    prompts.write_text("Paceline rides\nThe quick brown fox\n")
    options = ("--rtt", "0,20", "--max-tokens", "24", "--json", str(figures))
    done = paceline(
        "bench", "--real", "--model", str(target), "--prompts", str(prompts), *options, timeout=900, **environment
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(figures.read_text())
    assert [(row["rtt_ms"], row["method"]) for row in told["rows"]] == [(r, m) for r in (0.0, 20.0) for m in METHODS]
    assert all(row["flips"] == 0 for row in told["rows"])
    assert all(row["tok_s"] > 0 for row in told["rows"])
    meta = told["meta"]
    assert len(meta["agreement"]) == len(meta["simulated"]) == len(meta["calibration"]) == 10
    assert len(meta["margins"]) == 8
    assert all(one["measured_rtt_ms"] >= one["rtt_ms"] for one in meta["calibration"])
    assert "real against simulated" in done.stdout

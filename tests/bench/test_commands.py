"""``paceline bench`` as typed."""

import json
from pathlib import Path

import pytest
from typer.main import get_command

from paceline.bench import recording
from paceline.bench.commands import app
from paceline.bench.options import KINDS, READ
from paceline.bench.synthetic import synthetic
from paceline.shared import cli
from paceline.shared.errors import PacelineError


@pytest.fixture(autouse=True)
def _small_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic(1, 16).save(tmp_path / "set.npz")
    monkeypatch.setattr(recording, "SHIPPED", tmp_path / "set.npz")


def run(*words: str) -> int:
    try:
        app(args=list(words), prog_name="paceline bench")
    except SystemExit as done:
        return int(done.code or 0)
    except PacelineError as error:
        return error.exit_code
    return 0


def test_simulate_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert run("--rtt", "0,20", "--step", "8b-h100", "--methods", "chain,paceline", "--json", str(path)) == 0
    assert "paceline" in capsys.readouterr().out
    plain = json.loads(path.read_text())
    assert {row["method"] for row in plain["rows"]} == {"server-alone", "chain", "paceline"}
    assert "HBM3" in plain["meta"]["steps"]["8b-h100"]["source"]


@pytest.mark.parametrize(
    "words",
    [
        ("--rtt", "fast"),
        ("--rtt", ""),
        ("--rtt", "nan"),
        ("--rtt", "20,inf"),
        ("--step", "inf"),
        ("--step", "nan"),
        ("--step", ","),
        ("--methods", ","),
        ("--capacity", "--slo", "nan"),
        ("--capacity", "--slo", "0,1"),
        ("--json", "/nonexistent/folder/out.json"),
        ("--plot", "/nonexistent/folder/out.png"),
        ("--step", "9z"),
        ("--methods", "magic"),
        ("--plot", "x.pdf"),
        ("--simulate", "--real"),
        ("--flips", "--engine"),
        ("--clients", "0"),
        ("--prompts", "/nonexistent/file"),
        ("--unknown",),
    ],
)
def test_usage_mistakes_exit_with_2(words: tuple[str, ...]) -> None:
    assert run(*words) == 2


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "paceline bench --real" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("--capacity", "--promises"),
        ("--capacity", "--methods", "chain"),
        ("--capacity", "--clients", "3"),
        ("--promises", "--slo", "2"),
        ("--real", "--draft-ms", "3"),
        ("--real", "--calibrate"),
        ("--engine", "--rtt", "20"),
        ("--verifiers", "--max-tokens", "20"),
        ("--flips", "--quick"),
        ("--slo", "2"),
        ("--quick",),
        ("--max-tokens", "20"),
        ("--model", "smollm2"),
        ("--calibrate", "--step", "30"),
    ],
)
def test_option_that_a_run_does_not_read_is_refused_by_name(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: expected ")
    assert any(word in err for word in words if word.startswith("--"))


def test_variable_of_the_environment_stands_for_the_runs_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BENCH_SLO", "2")
    assert run("--rtt", "20", "--methods", "chain", "--json", str(tmp_path / "out.json")) == 0


def test_every_option_is_read_by_some_run() -> None:
    names = {one.name for one in get_command(app).params} - {"help"}
    assert names == KINDS | set().union(*READ.values())

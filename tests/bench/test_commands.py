"""``paceline bench`` as typed."""

import json
from pathlib import Path

import pytest

from paceline.bench import recording
from paceline.bench.commands import app
from paceline.bench.synthetic import synthetic
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

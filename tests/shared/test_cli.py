"""The root command: what it lists, how it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from paceline.shared import cli
from paceline.shared.errors import BusyError, ModelError


def install(monkeypatch: pytest.MonkeyPatch, command: Callable[..., object] | Exception) -> None:
    """Make ``paceline probe`` the only command, answered by ``command`` or failing to load with it."""

    class Entry:
        name = "probe"

        def load(self) -> Callable[..., object]:
            if isinstance(command, Exception):
                raise command
            return command

    monkeypatch.setattr(cli, "_commands", lambda: {"probe": Entry()})


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("serve", "complete", "models", "bench", "demo"):
        assert f"  {name} " in out
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0


def test_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["srve"]) == 2
    captured = capsys.readouterr()
    assert "serve" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(ModelError("no such model"), 2), (BusyError("try later"), 1), (KeyboardInterrupt(), 130), (SystemExit(3), 3)],
)
def test_errors_become_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcome: BaseException, code: int
) -> None:
    def command(args: list[str], prog_name: str, standalone_mode: bool) -> None:
        raise outcome

    install(monkeypatch, command)
    assert cli.main(["probe"]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("complete",),
        ("complete", "hi", "there"),
        ("complete", "hi", "--bogus"),
        ("complete", "hi", "--seed", "1.5"),
        ("chat", "--max-tokens", "many"),
        ("serve", "--port", "x"),
        ("forget", "--all"),
        ("models", "nonsense"),
        ("models", "distill"),
        ("models", "eval", "--nodes", "0"),
        ("bench", "--clients", "0"),
        ("demo", "--max-tokens", "0"),
    ],
)
def test_what_cannot_be_parsed_is_one_sentence_too(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and len(captured.err.splitlines()) == 1
    command = " ".join(words[:2]) if words[1:2] in (("distill",), ("eval",)) else words[0]
    assert f"`paceline {command} --help`" in captured.err


def test_models_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 2
    captured = capsys.readouterr()
    assert "distill" in captured.out + captured.err
    assert "error: " not in captured.err


@pytest.mark.parametrize("reason", ["No module named 'torch'", "DLL load failed while importing onnxruntime"])
def test_missing_extra_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    install(monkeypatch, ImportError(reason))
    assert cli.main(["probe"]) == 2
    err = capsys.readouterr().err
    assert "Visual C++ redistributable" in err if "DLL" in reason else "pip install" in err


def test_every_declared_command_exists() -> None:
    for entry in cli._commands().values():
        assert isinstance(entry, EntryPoint)
        assert callable(entry.load())


@pytest.mark.parametrize("name", cli._commands())
def test_help_of_every_command_shows_how_it_is_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"paceline {name}" in capsys.readouterr().out.lower().split("example")[-1]


def test_wrong_option_of_the_server_is_refused_before_torch_is_loaded() -> None:
    script = (
        "import sys; from paceline.shared.cli import main; code = main(['serve', '--padding', '-1']); "
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "--padding" in done.stderr

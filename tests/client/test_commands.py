"""``paceline complete`` and ``paceline chat`` as typed: where each option goes, and what a wrong one is answered."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from paceline.client.commands import chat, complete
from paceline.client.settings import ClientSettings, make_settings
from paceline.server.settings import make_settings as make_server_settings
from paceline.shared import cli
from paceline.shared.errors import ParameterError, UsageError
from paceline.shared.sampling import SamplingParams

OF_THE_COMMAND = {"prompt", "verify", "chat", "as_json", "explain", "verbose", "system"}


@pytest.mark.parametrize("command", [complete, chat])
def test_every_option_is_a_setting_a_sampling_parameter_or_the_commands_own(command: Callable[..., Any]) -> None:
    known = ClientSettings.model_fields.keys() | {one.name for one in fields(SamplingParams)} | OF_THE_COMMAND
    assert inspect.signature(command).parameters.keys() <= known


@pytest.mark.parametrize("command", ["complete", "chat"])
@pytest.mark.parametrize(
    ("option", "value"), [("--draft-threads", "0"), ("--draft-threads", "1000"), ("--padding", "-1"), ("--top-p", "2")]
)
def test_value_out_of_range_is_one_sentence_before_anything_is_connected(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["hi"] if command == "complete" else []
    assert cli.main([command, *prompt, option, value, "--server", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: expected ")
    assert len(err.splitlines()) == 1
    assert option.strip("-").replace("-", "_") in err.replace("-", "_")


def test_client_and_server_word_a_mistake_alike() -> None:
    with pytest.raises(ParameterError) as ours:
        make_settings(padding=-1)
    with pytest.raises(UsageError) as theirs:
        make_server_settings(padding=-1)
    assert str(ours.value) == str(theirs.value)
    assert str(ours.value).startswith("expected a valid --padding, got -1: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("EXPANSION", "wide"), ("EXPANSION", "3,0"), ("CONNECT_TIMEOUT", "soon"), ("REMEMBER_TOKENS", "1")],
)
def test_setting_without_an_option_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"PACELINE_{name}", value)
    with pytest.raises(ParameterError, match=f"expected a valid PACELINE_{name}, got "):
        make_settings()


def test_expansion_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EXPANSION", "3,2,1")
    assert make_settings().expansion == (3, 2, 1)
    assert make_settings(expansion=(4, 1)).expansion == (4, 1)

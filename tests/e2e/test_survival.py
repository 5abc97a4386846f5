"""What people and machines do to running programs: kill, interrupt, drain, odd consoles, closed pipes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client.api import Client
from paceline.client.settings import make_settings
from paceline.shared.sampling import SamplingParams

PACELINE = str(Path(sys.executable).with_name("paceline"))
PROMPT = "Count to one thousand: 1, 2, 3,"
Run = Callable[..., subprocess.CompletedProcess[str]]


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", response.read().decode(), re.MULTILINE)
    return sum(float(value) for value in values)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def is_running(url: str) -> Callable[[], bool]:
    return lambda: gauge(url, "paceline_requests_running") > 0


def is_idle(url: str) -> Callable[[], bool]:
    return lambda: gauge(url, "paceline_requests_running") == 0


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "11")], ids=["greedy", "seeded"])
def test_killed_server_is_replaced_by_the_next_and_no_token_is_lost(
    server: Any, new_server: Any, paceline: Run, sampling: tuple[str, ...]
) -> None:
    """U091: SIGKILL in mid-stream; the ids are those of an undisturbed run."""
    first = new_server()
    options = ("complete", PROMPT, "--max-tokens", "96", "--json", *sampling)
    both = subprocess.Popen(
        [PACELINE, *options, "--server", f"{first.url},{server.url}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: both.poll() is not None or gauge(first.url, "paceline_generation_tokens_total") >= 16)
    first.popen.kill()
    output, errors = both.communicate(timeout=120)
    assert both.returncode == 0, errors.decode()
    undisturbed = paceline(*options, "--server", server.url, "--drafter", "none")
    assert json.loads(output)["token_ids"] == json.loads(undisturbed.stdout)["token_ids"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupted_command_frees_its_generation(server: Any, number: signal.Signals) -> None:
    """U060."""
    # A shell's background job ignores Ctrl-C and hands that down: start as a terminal would.
    heeding = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeding}; from paceline.shared.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "complete", PROMPT, "--server", server.url, "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert is_running(server.url)()
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert b"Traceback" not in errors, errors.decode()
    wait_until(is_idle(server.url), 10)


def test_closed_pipe_is_quiet_and_frees_the_generation(server: Any) -> None:
    """U089: ``paceline complete ... | head -c 1``."""
    command = [PACELINE, "complete", PROMPT, "--server", server.url, "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=20)
    assert b"Traceback" not in errors, errors.decode()
    assert b"BrokenPipe" not in errors, errors.decode()
    wait_until(is_idle(server.url), 10)


def test_legacy_console_shows_replacements_and_no_colour(server: Any, paceline: Run) -> None:
    """U089: a console that knows no emoji."""
    environment = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "NO_COLOR": "1"}
    options = ("complete", "🎉🎉🎉🎉🎉🎉", "--server", server.url, "--max-tokens", "12")
    whole = json.loads(paceline(*options, "--json").stdout)["text"]
    assert not whole.isascii()
    done = subprocess.run(
        [PACELINE, *options], capture_output=True, env={**os.environ, **environment}, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stdout.decode("cp1252").strip() == whole.encode("cp1252", "replace").decode("cp1252").strip()


def test_drain_ends_idle_and_generating_clients_within_the_grace(new_server: Any) -> None:
    """U082: three idle and two generating clients; exit code 0 in time."""
    server = new_server("--grace", "2")

    async def main() -> list[int]:
        settings = make_settings(reconnect_timeout=0.1)
        clients = [Client(server.url, drafter="none", settings=settings) for _ in range(5)]
        for client in clients:
            await client.__aenter__()
        received = [0, 0]

        async def generate(index: int) -> None:
            try:
                async for chunk in clients[index].stream(PROMPT, SamplingParams(max_tokens=3000, ignore_eos=True)):
                    received[index] += len(chunk.token_ids)
            except Exception as error:  # noqa: BLE001 - the server goes away, whatever the client calls it
                assert "127.0.0.1" in str(error)

        tasks = [asyncio.create_task(generate(index)) for index in range(2)]
        while min(received) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        server.popen.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        for client in clients:
            await client.close()
        return received

    began = time.monotonic()
    asyncio.run(main())
    assert server.close() == 0
    assert time.monotonic() - began < 60


def test_second_signal_exits_at_once(new_server: Any) -> None:
    server = new_server("--grace", "600")
    command = [PACELINE, "complete", PROMPT, "--server", server.url, "--max-tokens", "4000", "--drafter", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: any("shutting down" in line for line in server.log))
        assert server.popen.poll() is None
        server.popen.send_signal(signal.SIGINT)
        assert server.close() == 128 + signal.SIGINT
        process.kill()

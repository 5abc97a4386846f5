"""Real processes over loopback: one server with the embedded target, and the reference answers of transformers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.models.catalogue import target_folder

PACELINE = str(Path(sys.executable).with_name("paceline"))
READY_S = 120


@dataclass
class Process:
    """A ``paceline serve`` that listens; everything it says on stderr is kept."""

    popen: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.close()

    def kill(self) -> None:
        """SIGKILL, and no trace left."""
        self.popen.kill()
        self.close()

    def close(self) -> int:
        """Wait for the end and for the last line."""
        code = self.popen.wait(timeout=60)
        if self.reader is not None:
            self.reader.join(timeout=10)
        if self.popen.stderr is not None:
            self.popen.stderr.close()
        return code


def start_server(*options: str) -> Process:
    """Starts a server on a free port and waits until it says where it listens."""
    command = [PACELINE, "serve", "--model", "smollm2", "--port", "0", *options]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    process = Process(popen)
    found = threading.Event()

    def read() -> None:
        assert popen.stderr is not None
        for line in popen.stderr:
            process.log.append(line)
            match = re.search(r"listening on (http://\S+)", line)
            if match:
                process.url = match.group(1)
                found.set()
        found.set()

    process.reader = threading.Thread(target=read, daemon=True)
    process.reader.start()
    found.wait(READY_S)
    if not process.url:
        process.kill()
        pytest.fail("the server never listened:\n" + "".join(process.log))
    return process


@pytest.fixture(scope="session")
def server() -> Iterator[Process]:
    """One server for all tests of this folder."""
    process = start_server()
    yield process
    assert process.stop() == 0, "".join(process.log)


@pytest.fixture
def new_server() -> Iterator[Callable[..., Process]]:
    """Starts servers with options; those that still run are killed in the end."""
    started: list[Process] = []

    def start(*options: str) -> Process:
        started.append(start_server(*options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="session")
def paceline() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one ``paceline`` command in a process of its own; keywords are environment variables.

    typed: bytes on its standard input.
    """

    def run(
        *arguments: str, timeout: float = 180, typed: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **environment}
        done = subprocess.run(
            [PACELINE, *arguments], capture_output=True, input=typed, timeout=timeout, env=env, check=False
        )
        texts = (stream.decode().replace("\r\n", "\n") for stream in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, *texts)

    return run


@pytest.fixture(scope="session")
def reference() -> Callable[[list[list[int]], int], list[list[int]]]:
    """Greedy answers of plain transformers in fp32: prompts and a number of tokens in, output ids (with EOS) out."""
    model: Any = AutoModelForCausalLM.from_pretrained(target_folder("smollm2"), dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for at in range(0, len(prompts), 14):
            group = prompts[at : at + 14]
            longest = max(len(prompt) for prompt in group)
            pads = [longest - len(prompt) for prompt in group]
            ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, group, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in zip(pads, group, strict=True)])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=2
                )
            for row in out[:, longest:].tolist():
                answers.append(row[: row.index(2) + 1] if 2 in row else row)
        return answers

    return generate

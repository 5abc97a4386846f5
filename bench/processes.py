"""Starts servers and client workers as processes of their own, pinned to cores, for the demo and for real runs.

Not here: what the processes do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import IO, Any, Self

from paceline.shared.errors import LinkError

READY_TIMEOUT_S = 300.0
SERVE = ("paceline.shared.cli", "serve", "--log-level", "warning")
WHOLE_TREES = ("paceline.bench.whole_tree_server",)
_POLL_S = 0.2
_STOP_TIMEOUT_S = 10.0
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the server and the client get; empty where there is nothing to divide."""

    server: tuple[int, ...] = ()
    client: tuple[int, ...] = ()


def divide_cores() -> Cores:
    """All but the last core for the server, the last one for the client; nothing is pinned with one core."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = sorted(affinity(0)) if affinity is not None else []
    return Cores(tuple(cores[:-1]), (cores[-1],)) if len(cores) > 1 else Cores()


def pin(cores: Sequence[int]) -> None:
    """Keep this process (and what it starts from now on) to these cores, where the platform can."""
    setter = getattr(os, "sched_setaffinity", None)
    if cores and setter is not None:
        setter(0, cores)


def start_pinned(
    command: Sequence[str], cores: Sequence[int], back_to: Sequence[int], **options: IO[bytes] | int | None
) -> subprocess.Popen[bytes]:
    """Start a process on some cores. Children inherit affinity, so this process goes there for a moment and back."""
    environment: Mapping[str, str] = os.environ
    if cores:
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
    pin(cores)
    try:
        return subprocess.Popen(list(command), env=environment, **options)  # type: ignore[call-overload,no-any-return]
    finally:
        pin(back_to)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_words(log: IO[bytes]) -> str:
    """The last lines that a process wrote, in one."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return "; ".join(line.removeprefix("error: ") for line in lines[-_TAIL_LINES:]) or "it said nothing"


class ServerProcess:
    """``paceline serve`` on a free port; ready when ``start`` returns, gone when the context ends.

    program: what to run instead; it takes ``--model`` and ``--port``.
    """

    def __init__(self, model: str, cores: Cores, extra: Sequence[str] = (), program: Sequence[str] = SERVE) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", *program, "--model", model, "--port", str(self.port), *extra]
        self._cores = cores
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start it and wait until it is ready. Raises ``LinkError`` with its last words if it is not in time."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = start_pinned(
            self._command,
            self._cores.server,
            self._cores.client,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        try:
            self._wait_ready(timeout_s)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise LinkError(f"the server ended with code {code} before it was ready: {self._last_words()}")
            if self._is_ready():
                return
            time.sleep(_POLL_S)
        raise LinkError(f"expected the server to be ready within {timeout_s:g} s: {self._last_words()}")

    def _is_ready(self) -> bool:
        """Asks as cheaply as it goes: the server may share its core with us."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _last_words(self) -> str:
        return "" if self._log is None else last_words(self._log)

    def kill(self) -> None:
        """End it at once, as a crash would. It may be started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def stop(self) -> None:
        """Ask it to end, and make it end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._log is not None:
            self._log.close()
            self._log = None


class WorkerProcess:
    """``paceline.bench.worker``: jobs in, answers out, until the context ends."""

    def __init__(self, cores: Cores) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "paceline.bench.worker"]
        self._process = start_pinned(
            command, cores.client, cores.client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def ask(self, job: dict[str, Any]) -> Any:
        """One job's answer. Raises ``LinkError`` with the process's last words if it ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        raise LinkError(f"the client process ended: {last_words(self._log)}")

"""The nginx recipe of ``deploy/``, run for real in front of a real server."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
RECIPE = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def proxy(server: Any, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    text = RECIPE.read_text(encoding="utf-8")
    for old, new in (("127.0.0.1:8765", server.url.removeprefix("http://")), ("127.0.0.1:8080", f"127.0.0.1:{port}")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text, encoding="utf-8")
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path), "-g", "user root;"])
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=10)


def test_completion_through_the_proxy_equals_the_direct_one(
    server: Any, proxy: str, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    options = ("The capital of France is", "--json", "--max-tokens", "24")
    answers = []
    for url in (server.url, proxy):
        done = paceline("complete", *options, "--server", url)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_events_pass_the_proxy_one_by_one(proxy: str) -> None:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 12, "stream": True}
    request = urllib.request.Request(
        proxy + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        first = response.readline()
        rest = response.read()
    assert first.startswith(b"data: ")
    assert rest.endswith(b"data: [DONE]\n\n")

"""``paceline serve`` in one process, ``paceline complete`` in others: exact text, clear errors, vanishing clients."""

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
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import websockets

from paceline.shared.messages import PROTOCOL_VERSION, Commit, Fault, Grow, Hello, Message, Open, Welcome
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import decode, encode

Run = Callable[..., subprocess.CompletedProcess[str]]
Reference = Callable[[list[list[int]], int], list[list[int]]]

JSON_KEYS = {"text", "prompt_tokens", "token_ids", "finish_reason", "usage", "stats"}
STATS_KEYS = {
    "verify_steps",
    "tokens_per_step",
    "drafted",
    "accepted",
    "bytes_up",
    "bytes_down",
    "ttft_s",
    "total_s",
    "rtt_s",
}
PROMPTS = [
    "The capital of France is",
    "I am at KDD conference in Barcelona. After the conference tutorial today I will",
    "def fibonacci(n):\n",
    "Repeat this sentence: This is a test. This is a test. This is a",
]


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def gauge(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no gauge {name} in\n{text}"
    return sum(float(value) for value in values)


@pytest.mark.parametrize("drafter", ["auto", "none", "wrong", "ngram"])
def test_text_is_the_targets_whatever_drafts(server: Any, paceline: Run, reference: Reference, drafter: str) -> None:
    prompt = PROMPTS[1]
    done = paceline("complete", prompt, "--server", server.url, "--json", "--max-tokens", "40", "--drafter", drafter)
    result = answer(done)
    assert set(result) == JSON_KEYS
    assert set(result["stats"]) >= STATS_KEYS
    expected = reference([result["prompt_tokens"]], 40)[0]
    assert result["token_ids"] == expected
    assert result["usage"]["completion_tokens"] == len(expected)
    assert result["usage"]["prompt_tokens"] == len(result["prompt_tokens"])
    if drafter == "none":
        assert result["stats"]["drafted"] == 0
        assert result["stats"]["verify_steps"] == len(expected)
    if drafter == "wrong":
        assert result["stats"]["accepted"] == 0
    if drafter == "auto":
        assert result["stats"]["accepted"] > 0
        assert result["stats"]["verify_steps"] < len(expected)


def test_two_clients_at_once_keep_their_own_answers(server: Any, paceline: Run, reference: Reference) -> None:
    def one(prompt: str) -> dict[str, Any]:
        return answer(paceline("complete", prompt, "--server", server.url, "--json", "--max-tokens", "32"))

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, [PROMPTS[0], PROMPTS[3]]))
    expected = reference([result["prompt_tokens"] for result in results], 32)
    assert [result["token_ids"] for result in results] == expected


def test_streamed_text_equals_the_json_text(server: Any, paceline: Run) -> None:
    options = ("complete", PROMPTS[2], "--server", server.url, "--max-tokens", "24")
    plain, result = paceline(*options), answer(paceline(*options, "--json"))
    assert plain.returncode == 0, plain.stderr
    assert result["text"].strip() in plain.stdout
    assert "\x1b[" not in plain.stdout


def test_chat_wraps_the_prompt_and_ends_at_the_end_of_text(server: Any, paceline: Run) -> None:
    done = paceline("complete", "What is 2+2?", "--chat", "--server", server.url, "--json", "--max-tokens", "120")
    result = answer(done)
    assert "<|im_end|>" not in result["text"]
    assert result["prompt_tokens"][0] == 1
    assert result["finish_reason"] in {"stop", "length"}
    if result["finish_reason"] == "stop":
        assert result["token_ids"][-1] == 2


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_conversation_survives_a_line_that_is_no_text(server: Any, paceline: Run, utf8: str) -> None:
    typed = b"Say hello.\ncaf\xff\n/new\nSay hello.\n\n"
    done = paceline("chat", "--server", server.url, "--max-tokens", "6", typed=typed, PYTHONUTF8=utf8, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    answers = done.stdout.strip().split("\n")
    assert len(answers) == 2 and answers[0] == answers[1] != ""
    assert "error: expected messages to be whole Unicode text" in done.stderr
    assert "Traceback" not in done.stderr


def test_seeded_sampling_gives_the_same_tokens_with_and_without_drafts(server: Any, paceline: Run) -> None:
    options = ("complete", PROMPTS[0], "--server", server.url, "--json", "--max-tokens", "32", "--temperature", "1")
    drafted, plain, other = (
        answer(paceline(*options, *rest))
        for rest in (("--seed", "7"), ("--seed", "7", "--drafter", "none"), ("--seed", "8", "--drafter", "none"))
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["token_ids"] != other["token_ids"]


def test_stop_string_ends_text_and_ids_together(server: Any, paceline: Run) -> None:
    options = ("complete", PROMPTS[0], "--server", server.url, "--json", "--max-tokens", "40")
    whole = answer(paceline(*options))
    stop = whole["text"].split()[2]
    cut = answer(paceline(*options, "--stop", stop))
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert cut["usage"]["completion_tokens"] == len(cut["token_ids"])


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("complete", "", "--server", "{url}"), "prompt"),
        (("complete", "hi", "--server", "{url}", "--temperature", "-1"), "temperature"),
        (("complete", "hi", "--server", "{url}", "--max-tokens", "0"), "max_tokens"),
        (("complete", "hi", "--server", "{url}", "--drafter", "nosuch"), "nosuch"),
        (("complete", "hi", "--server", "{url}", "--verify", "nosuch"), "nosuch"),
        (("complete", "word " * 9000, "--server", "{url}"), "8192"),
        (("complete", "hi", "--server", "not a url"), "url"),
        (("serve", "--model", "nosuch-model"), "nosuch-model"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:30],
)
def test_user_mistake_is_one_sentence_and_exit_code_2(
    server: Any, paceline: Run, arguments: tuple[str, ...], names: str
) -> None:
    done = paceline(*(word.replace("{url}", server.url) for word in arguments))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert names.lower() in done.stderr.lower()
    assert done.stdout == ""


def test_refused_connection_is_a_runtime_failure_that_names_the_server(paceline: Run) -> None:
    done = paceline("complete", "hi", "--server", "http://127.0.0.1:9", timeout=60)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_pair_says_what_to_run(paceline: Run, tmp_path: Path) -> None:
    done = paceline("serve", "--model", "smollm2", PACELINE_CACHE_DIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "paceline models build smollm2" in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_client_frees_its_generation(server: Any) -> None:
    paceline_script = str(Path(sys.executable).with_name("paceline"))
    command = [paceline_script, "complete", "Count to one thousand: 1, 2, 3,", "--server", server.url]
    process = subprocess.Popen([*command, "--max-tokens", "2000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.read(1)
    assert gauge(server.url, "paceline_requests_running") == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while gauge(server.url, "paceline_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gauge(server.url, "paceline_requests_running") == 0


def talk(url: str, conversation: Callable[[Any], Awaitable[None]]) -> None:
    """Opens a raw websocket and lets ``conversation`` use it."""

    async def main() -> None:
        address = url.replace("http", "ws") + "/v1/stream"
        async with websockets.connect(address, max_size=1 << 22) as socket:
            await conversation(socket)

    asyncio.run(main())


async def greet(socket: Any) -> Welcome:
    await socket.send(encode(Hello(PROTOCOL_VERSION, "raw")))
    welcome = decode(await socket.recv())
    assert isinstance(welcome, Welcome)
    return welcome


async def until(socket: Any, kind: type[Message], limit: int = 200) -> Any:
    for _ in range(limit):
        message = decode(await socket.recv())
        if isinstance(message, kind):
            return message
    pytest.fail(f"no {kind.__name__} among {limit} messages")


def opening(generation: int = 0, max_tokens: int = 2000) -> Open:
    prompt = np.array([1, 4093, 198, 28120], np.int32)
    return Open(generation, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), Verifier.GREEDY)


GROWS = {
    "self parent": {0: 3, 1: 0, 2: 4, 3: 0, 4: b"\x01\x05\x06", 5: b"\x01\x00\x09"},
    "token beyond the vocabulary": {0: 3, 1: 0, 2: 4, 3: 0, 4: b"\x04\xff\xff\xff\x7f", 5: b"\x01\x00"},
    "anchor in the future": {0: 3, 1: 0, 2: 4000, 3: 0, 4: b"\x01\x05", 5: b"\x01\x00"},
    "anchor inside the prompt": {0: 3, 1: 0, 2: 1, 3: 0, 4: b"\x01\x05", 5: b"\x01\x00"},
    "wrong first id": {0: 3, 1: 0, 2: 4, 3: 77, 4: b"\x01\x05", 5: b"\x01\x00"},
    "duplicate siblings": {0: 3, 1: 0, 2: 4, 3: 0, 4: b"\x01\x05\x05", 5: b"\x01\x00\x00"},
    "unknown field": {0: 3, 1: 0, 2: 4, 3: 0, 4: b"\x01\x05", 5: b"\x01\x00", 99: 1},
}


@pytest.mark.parametrize("name", GROWS)
def test_bad_tree_is_a_typed_error_and_others_go_on(server: Any, paceline: Run, name: str) -> None:
    async def conversation(socket: Any) -> None:
        await greet(socket)
        await socket.send(encode(opening()))
        await until(socket, Commit)
        await socket.send(msgpack.packb(GROWS[name]))
        try:
            fault = await until(socket, Fault)
        except websockets.ConnectionClosed as closed:
            assert closed.rcvd is not None
            assert closed.rcvd.code in {1007, 1008, 1009}
        else:
            assert fault.code in {"invalid_tree", "protocol", "malformed", "limit"}

    talk(server.url, conversation)
    after = answer(paceline("complete", PROMPTS[0], "--server", server.url, "--json", "--max-tokens", "4"))
    assert len(after["token_ids"]) == 4


@pytest.mark.parametrize("garbage", [b"", b"\xc1\xff", b"\x91" * 50_000, bytes(2 << 20), "text"], ids=range(5))
def test_garbage_closes_only_its_connection(server: Any, garbage: bytes | str) -> None:
    async def conversation(socket: Any) -> None:
        await greet(socket)
        await socket.send(garbage)
        with pytest.raises(websockets.ConnectionClosed) as caught:
            for _ in range(10):
                decode(await socket.recv())
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code in {1003, 1007, 1008, 1009}

    talk(server.url, conversation)
    with urllib.request.urlopen(server.url + "/readyz", timeout=10) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "invalid_parameter"),
        ([49152], "invalid_parameter"),
        ([7] * 8192, "context_length_exceeded"),
    ],
    ids=["empty prompt", "token out of range", "prompt as long as the context"],
)
def test_bad_opening_is_a_typed_error(server: Any, prompt: list[int], code: str) -> None:
    async def conversation(socket: Any) -> None:
        await greet(socket)
        ids = np.array(prompt, np.int32)
        await socket.send(encode(Open(0, ids, SamplingParams(max_tokens=4), Verifier.GREEDY)))
        assert (await until(socket, Fault)).code == code
        await socket.send(encode(opening(1, max_tokens=2)))
        assert isinstance(await until(socket, Commit), Commit)

    talk(server.url, conversation)


def test_other_protocol_version_is_refused_by_number(server: Any) -> None:
    async def conversation(socket: Any) -> None:
        await socket.send(encode(Hello(PROTOCOL_VERSION + 1, "raw")))
        fault = decode(await socket.recv())
        assert isinstance(fault, Fault)
        assert str(PROTOCOL_VERSION + 1) in fault.message

    talk(server.url, conversation)


def test_grown_tree_of_one_connection_does_not_reach_another(server: Any, reference: Reference) -> None:
    async def conversation(socket: Any) -> None:
        await greet(socket)
        for generation in (0, 1):
            await socket.send(encode(opening(generation, max_tokens=12)))
        tokens = np.array([5, 6, 7], np.int32)
        await socket.send(encode(Grow(1, 4, 0, tokens, np.array([-1, 0, 1], np.int32))))
        outputs: dict[int, list[int]] = {0: [], 1: []}
        while any(len(output) < 12 for output in outputs.values()):
            commit = await until(socket, Commit)
            assert commit.at == 4 + len(outputs[commit.generation])
            outputs[commit.generation].extend(commit.tokens.tolist())
        assert outputs[0] == outputs[1]

    talk(server.url, conversation)

"""``/v1/stream`` over a real socket on loopback, with a scripted target behind it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import Any

import msgpack
import numpy as np
import pytest
import websockets

from paceline.shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Closing,
    Commit,
    Fault,
    FinishReason,
    Grow,
    Hello,
    Open,
    Opened,
    Welcome,
)
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import decode, encode

PROMPT = [65, 66, 67, 68]


def opening(generation: int = 0, prompt: list[int] | None = None, **sampling: Any) -> bytes:
    ids = np.array(PROMPT if prompt is None else prompt, np.int32)
    return encode(Open(generation, ids, SamplingParams(**{"max_tokens": 20, **sampling}), Verifier.GREEDY))


async def collect(socket: Any, generation: int = 0) -> tuple[list[int], Any]:
    """Tokens of a generation until its end, and how it ended."""
    tokens: list[int] = []
    while True:
        message = decode(await asyncio.wait_for(socket.recv(), 10))
        if isinstance(message, Fault):
            return tokens, message
        if isinstance(message, Commit) and message.generation == generation:
            tokens += message.tokens.tolist()
            if message.finish is not None:
                return tokens, message.finish


async def closed(socket: Any) -> int:
    """The close code that the server sends, whatever comes before it."""
    try:
        while True:
            await asyncio.wait_for(socket.recv(), 15)
    except websockets.ConnectionClosed as error:
        return error.rcvd.code if error.rcvd is not None else 1006


async def settled(server: Any, seconds: float = 3.0) -> None:
    """Until nothing runs and no KV is held."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        engine = server.state.driver.engine
        if engine.is_idle and server.target.pool.num_used_blocks == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail("something still runs")


async def test_welcome_open_grow_commit_gives_the_targets_output(serve: Any) -> None:
    async with serve() as server, server.connect() as socket:
        welcome = await server.hello(socket)
        assert isinstance(welcome, Welcome)
        assert welcome.model == "scripted"
        assert welcome.fingerprint == "fingerprint"
        assert welcome.limits.max_context == 512
        expected = server.target.greedy(PROMPT, 20)
        await socket.send(opening())
        tokens = np.array(expected[:6], np.int32)
        await socket.send(encode(Grow(0, 4, 0, tokens, np.arange(-1, 5, dtype=np.int32))))
        assert isinstance(decode(await socket.recv()), Opened)
        assert await collect(socket) == (expected, FinishReason.LENGTH)
        await socket.send(opening(1, max_tokens=5))
        assert (await collect(socket, 1))[0] == expected[:5]
    assert server.code == 0


async def test_generations_of_two_connections_keep_apart(serve: Any) -> None:
    async with serve(step_s=0.001) as server, server.connect() as first, server.connect() as second:
        prompts = {first: [65, 65], second: [90, 91, 92]}
        for socket, prompt in prompts.items():
            await server.hello(socket)
            await socket.send(opening(3, prompt))
        for socket, prompt in prompts.items():
            assert (await collect(socket, 3))[0] == server.target.greedy(prompt, 20)


BAD_FIRST = {
    "open before hello": opening(),
    "other version": encode(Hello(PROTOCOL_VERSION + 1, "test")),
    "other model": encode(Hello(PROTOCOL_VERSION, "test", model="other")),
    "garbage": b"\xc1\xff\x00",
    "empty": b"",
    "deep nesting": b"\x91" * 100_000,
    "server's message": encode(Opened(0, 0)),
}


@pytest.mark.parametrize("name", BAD_FIRST)
async def test_bad_handshake_is_answered_and_closed(serve: Any, name: str) -> None:
    async with serve() as server:
        async with server.connect() as socket:
            await socket.send(BAD_FIRST[name])
            fault = decode(await socket.recv())
            assert isinstance(fault, Fault)
            assert fault.generation is None
            assert await closed(socket) in {1007, 1008, 1009, 1011}
        async with server.connect() as socket:
            assert isinstance(await server.hello(socket), Welcome)


async def test_text_message_closes_with_1003_and_too_big_a_one_with_1009(serve: Any) -> None:
    async with serve() as server:
        for message, code in (("text", 1003), (bytes(2 << 20), 1009)):
            async with server.connect() as socket:
                await server.hello(socket)
                await socket.send(message)
                assert await closed(socket) == code


async def test_missing_hello_closes_the_connection(serve: Any) -> None:
    """U072."""
    async with serve(hello_timeout=0.2) as server, server.connect() as socket:
        began = time.monotonic()
        assert await closed(socket) == 1008
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "frame",
    [
        {0: 3, 1: 0, 2: 4, 3: 77, 4: b"\x01\x05", 5: b"\x01\x00"},
        {0: 3, 1: 0, 2: 4000, 3: 0, 4: b"\x01\x05", 5: b"\x01\x00"},
        {0: 3, 1: 0, 2: 4, 3: 0, 4: b"\x01\x05", 5: b"\x01\x00", 99: 1},
        {0: 3, 1: 0, 2: float("nan"), 3: 0, 4: b"\x01\x05", 5: b"\x01\x00"},
        {0: 99},
        dict.fromkeys(range(4000), 0),
    ],
)
async def test_bad_frame_hurts_nobody_else(serve: Any, frame: dict[int, Any]) -> None:
    """U068: an error frame or a close within a step, and the neighbour's text is its own."""
    async with serve(step_s=0.002) as server, server.connect() as bad, server.connect() as good:
        for socket in (bad, good):
            await server.hello(socket)
        await bad.send(opening(0, max_tokens=400))
        await good.send(opening(0, [70, 71], max_tokens=60))
        await bad.recv()
        await bad.send(msgpack.packb(frame))
        try:
            _, fault = await collect(bad)
        except websockets.ConnectionClosed as error:
            assert error.rcvd is not None
            assert error.rcvd.code in {1007, 1008, 1009}
        else:
            assert fault.code in {"protocol", "malformed", "invalid_tree", "limit"}
        assert (await collect(good))[0] == server.target.greedy([70, 71], 60)


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [([], {}, "invalid_parameter"), ([9999], {}, "invalid_parameter"), ([65] * 512, {}, "context_length_exceeded")],
)
async def test_bad_opening_ends_itself_only(serve: Any, prompt: list[int], sampling: Any, code: str) -> None:
    async with serve() as server, server.connect() as socket:
        await server.hello(socket)
        await socket.send(opening(0, prompt, **sampling))
        _, fault = await collect(socket)
        assert (fault.code, fault.generation) == (code, 0)
        await socket.send(opening(0, max_tokens=3))
        assert len((await collect(socket))[0]) == 3


BAD_VALUES = [
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 7}, "top_p"),
    ({"n": 10**6}, "n"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"stop": ["x"] * 4000}, "stop"),
    ({"stop": "x"}, "stop"),
    ({"stop_token_ids": [1 << 30]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [None]}, "stop_token_ids"),
    ({"logit_bias": {1 << 30: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: 1e9}}, "logit_bias"),
    ({"seed": -1}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"nosuch": 1}, "nosuch"),
]


@pytest.mark.parametrize(("sampling", "param"), BAD_VALUES, ids=str)
async def test_bad_value_in_an_opening_ends_itself_only(serve: Any, sampling: dict[str, Any], param: str) -> None:
    """U067: a fault for that generation that names the parameter; the connection and its neighbour go on."""
    async with serve() as server, server.connect() as socket:
        await server.hello(socket)
        await socket.send(opening(1, max_tokens=30))
        frame = {0: 2, 1: 2, 2: b"\x01\x41", 3: {"max_tokens": 5, **sampling}, 4: 0}
        await socket.send(msgpack.packb(frame))
        tokens, fault = await collect(socket, 1)
        if isinstance(fault, Fault):
            assert (fault.code, fault.generation, fault.param) == ("invalid_parameter", 2, param)
            tokens += (await collect(socket, 1))[0]
        else:
            _, fault = await collect(socket, 2)
            assert (fault.code, fault.generation, fault.param) == ("invalid_parameter", 2, param)
        assert tokens == server.target.greedy(PROMPT, 30)


async def test_prompt_of_a_third_of_a_million_tokens_names_the_limit(serve: Any) -> None:
    """U063."""
    async with serve() as server, server.connect() as socket:
        await server.hello(socket)
        await socket.send(opening(4, [7] * 300_000))
        _, fault = await collect(socket)
        assert (fault.code, fault.generation) == ("context_length_exceeded", 4)
        await socket.send(opening(4, max_tokens=3))
        assert len((await collect(socket, 4))[0]) == 3


async def test_number_in_use_is_a_protocol_error(serve: Any) -> None:
    async with serve(step_s=0.005) as server, server.connect() as socket:
        await server.hello(socket)
        await socket.send(opening(0, max_tokens=400))
        await socket.send(opening(0, max_tokens=400))
        assert await closed(socket) == 1008
        await settled(server)


async def test_cancel_ends_with_its_own_reason(serve: Any) -> None:
    async with serve(step_s=0.003) as server, server.connect() as socket:
        await server.hello(socket)
        await socket.send(opening(0, max_tokens=400))
        await socket.recv()
        await socket.send(encode(Cancel(0)))
        tokens, finish = await collect(socket)
        assert finish is FinishReason.CANCELLED
        assert tokens == server.target.greedy(PROMPT, 400)[: len(tokens)]
        await settled(server)


async def test_vanished_client_is_freed_within_a_second(serve: Any) -> None:
    """U060: the socket dies without a close frame."""
    async with serve(step_s=0.003) as server:
        socket = await server.connect()
        await server.hello(socket)
        await socket.send(opening(0, max_tokens=500))
        for _ in range(5):
            await socket.recv()
        socket.transport.abort()
        await settled(server, 1.0)


async def test_full_queue_is_a_busy_fault_for_those_that_came_last(serve: Any) -> None:
    """U080: one runs, one waits, four are refused at once."""
    async with serve(step_s=0.003, max_running=1, max_queue=1) as server, server.connect() as socket:
        await server.hello(socket)
        for generation in range(6):
            await socket.send(opening(generation, max_tokens=20))
        refused, served = [], []
        while len(refused) + len(served) < 6:
            message = decode(await asyncio.wait_for(socket.recv(), 10))
            if isinstance(message, Fault):
                refused.append(message)
            elif isinstance(message, Commit) and message.finish is not None:
                served.append(message.generation)
        assert [fault.code for fault in refused] == ["busy"] * 4
        assert served == [0, 1]


async def test_reader_that_stops_is_cut_off_and_delays_nobody(serve: Any) -> None:
    """U064: its buffer is bounded, its generations are freed, the others go on."""
    options = {"send_buffer": 2000, "send_timeout": 0.5, "max_context": 4096}
    async with serve(**options) as server, server.connect() as good:
        await server.hello(good)
        lazy = await server.connect(max_queue=1)
        await server.hello(lazy)
        for generation in range(60):
            await lazy.send(opening(generation, max_tokens=4000, ignore_eos=True, logprobs=20))
        await asyncio.sleep(0.3)
        await good.send(opening(0, [70, 71], max_tokens=30))
        assert (await collect(good))[0] == server.target.greedy([70, 71], 30)
        deadline = time.monotonic() + 20
        while server.state.stream.num_connections > 1 and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert server.state.stream.num_connections == 1
        await settled(server)
        lazy.transport.abort()


async def test_drain_lets_generations_finish_and_exits_with_0(serve: Any) -> None:
    """U082: idle connections get 1001 at once, the working one is told and finishes within the grace."""
    async with serve(step_s=0.004, grace=10.0) as server, server.connect() as idle, server.connect() as busy:
        for socket in (idle, busy):
            await server.hello(socket)
        await busy.send(opening(0, max_tokens=100))
        await busy.recv()
        signal.raise_signal(signal.SIGTERM)
        assert await closed(idle) == 1001
        with pytest.raises(websockets.InvalidStatus) as caught:
            await server.connect()
        assert caught.value.response.status_code == 503
        messages = []
        while not messages or getattr(messages[-1], "finish", None) is None:
            messages.append(decode(await asyncio.wait_for(busy.recv(), 10)))
        assert any(isinstance(message, Closing) for message in messages)
        tokens = itertools.chain.from_iterable(m.tokens.tolist() for m in messages if isinstance(m, Commit))
        assert list(tokens) == server.target.greedy(PROMPT, 100)
        assert await closed(busy) == 1001
    assert server.code == 0


async def test_drain_closes_what_does_not_finish_in_time(serve: Any) -> None:
    async with serve(step_s=0.01, grace=0.3) as server, server.connect() as busy:
        await server.hello(busy)
        await busy.send(opening(0, max_tokens=500))
        await busy.recv()
        began = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        assert await closed(busy) == 1012
        await asyncio.wait_for(asyncio.shield(server.task), 10)
        assert time.monotonic() - began < 5
    assert server.code == 0


async def raw_socket(server: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A websocket by hand, upgraded."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = ["GET /v1/stream HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13", "", ""]
    writer.write("\r\n".join(lines).encode())
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


FLOODS = {
    "pings that nobody reads the answers to": b"\x89\xfd\0\0\0\0" + bytes(125),
    "a message in endless empty fragments": b"\x00\x80\0\0\0\0",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_flood_below_the_messages_is_cut_off(serve: Any, name: str) -> None:
    async with serve(step_s=0.002) as server, server.connect() as good:
        await server.hello(good)
        await good.send(opening(0, max_tokens=60))
        _, writer = await raw_socket(server)
        if "fragments" in name:
            writer.write(b"\x02\x80\0\0\0\0")
        batch = FLOODS[name] * 4000
        sent = 0
        try:
            while sent < 100 << 20:
                writer.write(batch)
                await writer.drain()
                sent += len(batch)
        except ConnectionError:
            pass
        assert sent < 100 << 20
        writer.close()
        assert (await collect(good))[0] == server.target.greedy(PROMPT, 60)


async def test_orders_about_nothing_change_nothing(serve: Any) -> None:
    """Frames for generations that never were or are over, cancels twice, and far more openings than allowed."""
    async with serve(step_s=0.001, max_queue=100_000) as server, server.connect() as bad, server.connect() as good:
        for socket in (bad, good):
            await server.hello(socket)
        await good.send(opening(0, [70, 71], max_tokens=60))
        ids, parents = np.array([5], np.int32), np.array([-1], np.int32)
        await bad.send(opening(3, max_tokens=2))
        assert len((await collect(bad, 3))[0]) == 2
        for number in (3, 77):
            for _ in range(2):
                await bad.send(encode(Grow(number, 4, 0, ids, parents)))
                await bad.send(encode(Cancel(number)))
        for number in range(100, 1100):
            await bad.send(opening(number, max_tokens=1 if number % 2 else 300))
        faults = ends = 0
        while faults + ends < 900:
            message = decode(await asyncio.wait_for(bad.recv(), 10))
            if isinstance(message, Fault):
                assert (message.code, message.generation is None) == ("limit", False)
                faults += 1
            ends += isinstance(message, Commit) and message.finish is not None
        await bad.close()
        assert (await collect(good))[0] == server.target.greedy([70, 71], 60)
        await settled(server)


async def test_one_connection_too_many_is_busy_and_no_wrong_key(serve: Any) -> None:
    async with serve(max_connections=1) as server, server.connect() as socket:
        await server.hello(socket)
        with pytest.raises(websockets.InvalidStatus) as caught:
            await server.connect()
        assert caught.value.response.status_code == 429
        assert b"--max-connections" in caught.value.response.body
        await socket.send(opening(0, max_tokens=3))
        assert len((await collect(socket))[0]) == 3

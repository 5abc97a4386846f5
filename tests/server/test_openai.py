"""OpenAI's endpoints on the server alone, over HTTP: shapes, streams, refusals, overload, health."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from paceline.server import serving
from paceline.server.openai import router

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
COMPLETION = {"prompt": "hello", "max_tokens": 12, "temperature": 0}


def events(text: str) -> list[Any]:
    """The data of an SSE body; the last is [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def stream_of(client: Any, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    response = await client.post(path, json={**body, "stream": True})
    return response, events(response.text)


async def test_whole_and_streamed_answers_are_the_targets_text(serve: Any, byte_text: Any) -> None:
    async with serve() as server, server.http() as client:
        ids = byte_text.encode("hello", 99)
        expected = byte_text.decode(server.target.greedy(ids, 12))
        whole = (await client.post("/v1/completions", json=COMPLETION)).json()
        assert whole["object"] == "text_completion"
        assert whole["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
        assert whole["usage"]["prompt_tokens"] == 5
        assert whole["usage"]["completion_tokens"] == 12
        assert whole["timings"]["predicted_n"] == 12
        assert whole["timings"]["draft_n"] == 0
        response, chunks = await stream_of(client, "/v1/completions", COMPLETION)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert not any("usage" in chunk for chunk in chunks)
        counted = {**COMPLETION, "stream_options": {"include_usage": True}}
        _, chunks = await stream_of(client, "/v1/completions", counted)
        assert chunks[-1]["choices"] == []
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert chunks[-1]["usage"][name] == whole["usage"][name]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-request-id"].startswith("req-")


async def test_chat_chunks_have_the_shape_that_clients_rely_on(serve: Any) -> None:
    """U075, U077."""
    async with serve() as server, server.http() as client:
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()
        _, chunks = await stream_of(client, "/v1/chat/completions", CHAT)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        for chunk in chunks[1:-1]:
            assert chunk["choices"][0]["finish_reason"] is None
            assert chunk["choices"][0]["delta"]["content"]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        _, chunks = await stream_of(client, "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole["usage"]["prompt_tokens"] - 4
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_official_client_works_both_ways(serve: Any) -> None:
    async with serve(end_at=60) as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        models = await client.models.list()
        assert [model.id for model in models.data] == ["scripted"]
        answer = await client.chat.completions.create(model="scripted", messages=CHAT["messages"], temperature=0)
        assert answer.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            model="scripted",
            messages=CHAT["messages"],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=CHAT["messages"])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="scripted", messages=CHAT["messages"], temperature=-1)
        assert caught.value.param == "temperature"
        await client.close()


async def test_logprobs_are_one_for_each_token_with_the_best_first(serve: Any) -> None:
    """U015."""
    async with serve() as server, server.http() as client:
        body = {**CHAT, "logprobs": True, "top_logprobs": 3}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        for entry in content:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
            assert entry["logprob"] == pytest.approx(values[0])
            assert entry["bytes"] == list(entry["token"].encode())
        body = {**COMPLETION, "logprobs": 2}
        shaped = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert {len(values) for values in shaped.values()} == {12}
        _, chunks = await stream_of(client, "/v1/completions", body)
        tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {}).get("tokens", [])]
        assert tokens == shaped["tokens"]


async def test_stops_before_min_tokens_are_text_and_count_as_tokens(serve: Any) -> None:
    async with serve() as server, server.http() as client:

        async def complete(**more: Any) -> Any:
            body = {**COMPLETION, "max_tokens": 40, **more}
            answer = (await client.post("/v1/completions", json=body)).json()
            _, chunks = await stream_of(client, "/v1/completions", body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]
            return answer

        whole = (await complete())["choices"][0]["text"]
        stop = whole[7:9]
        later = await complete(stop=[stop], min_tokens=whole.index(stop) + len(stop) + 1)
        second = whole.find(stop, whole.index(stop) + len(stop))
        assert later["choices"][0]["text"] == (whole[:second] if second >= 0 else whole)
        assert later["usage"]["completion_tokens"] == (second + len(stop) if second >= 0 else 40)
        ending = server.target.greedy(list(COMPLETION["prompt"].encode()), 40)[5]
        cut = await complete(stop_token_ids=[ending])
        num = cut["usage"]["completion_tokens"]
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert len(cut["choices"][0]["text"]) == num - 1


async def test_stop_strings_seeds_and_choices(serve: Any) -> None:
    async with serve() as server, server.http() as client:

        async def complete(**changes: Any) -> Any:
            return (await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 40, **changes})).json()

        text = (await complete())["choices"][0]["text"]
        stop = text[7:10]
        cut = await complete(stop=[stop])
        assert cut["choices"][0]["text"] == text[: text.index(stop)]
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens"] == text.index(stop) + 3
        _, chunks = await stream_of(client, "/v1/completions", {**COMPLETION, "max_tokens": 40, "stop": stop})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut["choices"][0]["text"]
        same = [(await complete(temperature=1, seed=42))["choices"][0]["text"] for _ in range(2)]
        assert same[0] == same[1]
        several = await complete(temperature=1, seed=42, n=3)
        texts = [choice["text"] for choice in several["choices"]]
        assert len(set(texts)) == 3
        assert texts[0] == same[0]
        assert several["usage"]["completion_tokens"] == 120
        many = await complete(prompt=["hello", "help"], max_tokens=3)
        assert [choice["index"] for choice in many["choices"]] == [0, 1]
        assert many["choices"][0]["text"] == text[:3]


GOOD_BODIES = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]},
    {**CHAT, "max_tokens": None, "max_completion_tokens": 3, "stop": None, "seed": None, "logit_bias": None, "n": None},
    {**CHAT, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "x", "store": False},
    {**CHAT, "nonsense": 1, "seed": -5},
]


@pytest.mark.parametrize("body", GOOD_BODIES)
async def test_bodies_that_clients_really_send_are_taken(serve: Any, body: dict[str, Any]) -> None:
    """U078."""
    async with serve() as server, server.http() as client:
        response = await client.post("/v1/chat/completions", json={"max_tokens": 2, **body})
        assert response.status_code == 200, response.text


BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [5000], "min_tokens": 1}, "stop_token_ids"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 1_000_000, "logprobs": True}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_parameters_are_400_with_their_name_and_never_a_stream(serve: Any, stream: bool) -> None:
    """U067, U076, U078: plain HTTP, OpenAI's shape, fast, and the engine lives on."""
    async with serve() as server, server.http() as client:
        for change, param in BAD:
            response = await client.post("/v1/chat/completions", json={**CHAT, **change, "stream": stream})
            assert response.status_code == 400, (change, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, (change, error)
        for prompt in ([-1], [[70_000]], [2**40], "", [], [1.5]):
            response = await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "stream": stream})
            assert response.status_code == 400, (prompt, response.text)
        response = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 0, "stream": stream})
        assert response.json()["error"]["param"] == "max_tokens"
        for data in (b"", b"[1]", b"{", b"[" * 100_000):
            response = await client.post("/v1/completions", content=data)
            assert response.status_code == 400
            assert "detail" not in response.json()
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert server.target.pool.num_used_blocks == 0


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"prompt": "caf\ud800"}, "prompt"),
        ("completions", {"stop": "\ud800"}, "stop"),
        ("completions", {"model": "\ud800"}, "model"),
        ("completions", {"temperature": "\ud800"}, "temperature"),
        ("completions", {"\ud800": 1}, "body"),
        ("chat/completions", {"messages": [{"role": "user", "content": "caf\ud800"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "\ud800", "content": "x"}]}, "messages"),
    ],
)
async def test_half_characters_are_400_wherever_they_stand(
    serve: Any, path: str, change: dict[str, Any], param: str
) -> None:
    """What cut text becomes in JSON: valid there, but no tokenizer and no answer can carry it."""
    async with serve() as server, server.http() as client:
        body = json.dumps({**(COMPLETION if path == "completions" else CHAT), **change})
        response = await client.post(f"/v1/{path}", content=body)
        assert response.status_code == (404 if param == "model" else 400), response.text
        assert response.json()["error"]["param"] == (None if param == "model" else param)


async def test_huge_prompts_and_bodies_are_refused_quickly(serve: Any) -> None:
    """U073: by length before tokenising, by Content-Length, and while reading a body without one."""
    async with serve(max_body="6MiB") as server, server.http() as client:
        began = time.monotonic()
        response = await client.post("/v1/completions", json={**COMPLETION, "prompt": "a" * 5_000_000})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert time.monotonic() - began < 10

        async def endless() -> Any:
            for _ in range(100):
                yield b" " * (1 << 18)

        assert (await client.post("/v1/completions", content=b" " * (7 << 20))).status_code == 413
        response = await client.post("/v1/completions", content=endless())
        assert response.status_code == 413
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_overload_is_429_with_retry_after(serve: Any) -> None:
    """U080: one runs, one waits, the rest is refused at once."""
    async with serve(step_s=0.004, max_running=1, max_queue=1) as server, server.http() as client:
        requests = [client.post("/v1/completions", json={**COMPLETION, "max_tokens": 40}) for _ in range(6)]
        responses = await asyncio.gather(*requests)
        codes = sorted(response.status_code for response in responses)
        assert codes == [200, 200, 429, 429, 429, 429]
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "busy"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_its_generation(serve: Any, stream: bool) -> None:
    """U060, over HTTP."""
    async with serve(step_s=0.004) as server:
        async with server.http() as client:
            body = {**COMPLETION, "max_tokens": 400, "stream": stream}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while server.state.driver.engine.num_running == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        deadline = time.monotonic() + 3
        while not server.state.driver.engine.is_idle and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert server.state.driver.engine.is_idle
        assert server.target.pool.num_used_blocks == 0


async def test_error_in_a_stream_is_an_event_and_one_done(serve: Any) -> None:
    """U076: the step fails in the middle of an answer."""
    async with serve(step_s=0.002) as server, server.http() as client:
        good = server.target.forward

        def forward(batch: Any) -> Any:
            if len(server.target.num_rows) > 8:
                raise RuntimeError("device lost")
            return good(batch)

        logging.getLogger("paceline.server").disabled = True
        server.target.forward = forward
        response, chunks = await stream_of(client, "/v1/chat/completions", {**CHAT, "max_tokens": 100})
        assert response.status_code == 200
        assert chunks[-1]["error"]["type"] == "server_error"
        assert "device lost" not in response.text
        server.target.forward = good
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        logging.getLogger("paceline.server").disabled = False


async def test_keep_alive_comments_fill_a_long_silence(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """U066."""
    monkeypatch.setattr(router, "KEEP_ALIVE_S", 0.05)
    async with serve(step_s=0.3) as server, server.http() as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 2, "stream": True})
        assert ": keep-alive\n\n" in response.text
        assert len(events(response.text)) >= 2


async def test_health_tells_loading_ready_and_draining_apart(serve: Any) -> None:
    """U081."""
    server = serve(step_s=0.01)
    server.gate.clear()
    async with server, server.http() as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/readyz", "/health", "/v1/models"):
            response = await client.get(path)
            assert response.status_code == 503
            assert "loads" in response.text
        server.gate.set()
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).text == "ok"
        running = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "max_tokens": 60}))
        await asyncio.sleep(0.1)
        signal.raise_signal(signal.SIGTERM)
        while (await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await client.get("/livez")).status_code == 200
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 503
        assert (await running).status_code == 200
    assert server.code == 0


async def test_a_step_that_hangs_makes_the_server_not_ready(serve: Any) -> None:
    async with serve(step_s=1.5, stall_timeout=0.2) as server, server.http() as client:
        task = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "max_tokens": 1}))
        await asyncio.sleep(0.6)
        response = await client.get("/readyz")
        assert (response.status_code, response.text) == (503, "a step takes too long")
        assert (await client.get("/livez")).status_code == 200
        assert (await task).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_engine_that_dies_is_not_live(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as server, server.http() as client:
        logging.getLogger("paceline.server").disabled = True

        def broken(now: float) -> None:
            raise AttributeError("bug")

        monkeypatch.setattr(server.state.driver.engine, "next_step", broken)
        response = await client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 500
        assert (await client.get("/livez")).status_code == 503
        logging.getLogger("paceline.server").disabled = False
    assert server.code == 1


async def test_streams_dropped_at_any_moment_are_freed(serve: Any) -> None:
    """U060: also between admission and the first event."""
    async with serve(step_s=0.002) as server:
        body = json.dumps({**COMPLETION, "max_tokens": 400, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for index in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + body)
            await writer.drain()
            await asyncio.sleep(0.0005 * (index % 20))
            writer.transport.abort()
        deadline = time.monotonic() + 3
        while not server.state.driver.is_idle and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert server.state.driver.is_idle
        assert server.target.pool.num_used_blocks == 0


async def test_dripping_body_is_refused_in_time(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """U072."""
    monkeypatch.setattr(router, "BODY_S", 0.3)
    monkeypatch.setattr(serving, "HEADER_S", 0.3)

    async def drip() -> Any:
        for _ in range(200):
            yield b" "
            await asyncio.sleep(0.05)

    async with serve() as server, server.http() as client:
        try:
            response = await asyncio.wait_for(client.post("/v1/completions", content=drip()), 5)
        except httpx.TransportError:
            pass  # the server hung up while the body was still on its way
        else:
            assert response.status_code == 413
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

"""Padding and compression over a real socket: a running server with a scripted target, and the real client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.client.api import Client
from paceline.client.settings import make_settings as client_settings
from paceline.client.trace import Trace
from paceline.server.settings import make_settings as server_settings
from paceline.shared.errors import ParameterError, UsageError
from paceline.shared.messages import PROTOCOL_VERSION, Commit, Fault, Grow, Hello, Open, Opened
from paceline.shared.sampling import SamplingParams, Verifier
from paceline.shared.wire import decode, encode

PROMPT = [65, 66, 67, 68, 65, 66, 67]


async def traced(server: Any, drafter: str, **settings: Any) -> tuple[list[int], Trace, Client]:
    made = client_settings(pull=False, **settings)
    async with Client(server.url, drafter=drafter, settings=made) as client:
        trace = Trace()
        stream = client.stream(PROMPT, SamplingParams(max_tokens=60, temperature=0.8, seed=5), trace=trace)
        ids = [token async for chunk in stream for token in chunk.token_ids]
    return ids, trace, client


def sizes(trace: Trace) -> dict[type, set[int]]:
    found: dict[type, set[int]] = {}
    for one in (*trace.sent, *trace.arrived):
        found.setdefault(type(one.message), set()).add(one.num_bytes)
    return found


@pytest.mark.parametrize("drafter", ["wrong", "ngram"])
@pytest.mark.parametrize(("ours", "theirs"), [(64, 0), (0, 64), (32, 64)], ids=["server", "client", "larger"])
async def test_either_side_may_ask_for_padding_and_both_pad(serve: Any, drafter: str, ours: int, theirs: int) -> None:
    async with serve(step_s=0.0005) as plain_server:
        plain, bare, _ = await traced(plain_server, drafter)
    async with serve(step_s=0.0005, padding=ours) as server:
        ids, trace, _ = await traced(server, drafter, padding=theirs)
    assert ids == plain
    found = sizes(trace)
    assert {Open, Opened, Commit} <= set(found)
    if drafter == "wrong":
        assert Grow in found
    assert {size for some in found.values() for size in some} <= {64, 128, 256, 512}
    assert not {size for some in sizes(bare).values() for size in some} <= {64, 128, 256, 512}


async def test_compression_is_used_only_where_both_sides_want_it(serve: Any) -> None:
    texts = []
    for server_has in (False, True):
        async with serve(compression=server_has) as server:
            async with server.connect(compression="deflate") as socket:
                header = socket.response.headers.get("Sec-WebSocket-Extensions", "")
                assert ("permessage-deflate" in header) == server_has
            for client_has in (False, True):
                ids, _, _ = await traced(server, "wrong", compression=client_has)
                texts.append(ids)
    assert texts == [texts[0]] * 4


async def test_a_wish_for_too_much_padding_is_refused_by_name(serve: Any) -> None:
    async with serve() as server, server.connect() as socket:
        await socket.send(encode(Hello(PROTOCOL_VERSION, "test", padding=4097)))
        fault = decode(await socket.recv())
        assert isinstance(fault, Fault)
        assert "padding of at most 4096" in fault.message


async def test_padding_with_anything_in_it_ends_the_connection(serve: Any) -> None:
    async with serve() as server, server.connect() as socket:
        await server.hello(socket)
        padded = encode(Open(0, np.array(PROMPT, np.int32), SamplingParams(), Verifier.GREEDY), 128)
        await socket.send(padded[:-1] + b"\x01")
        fault = decode(await socket.recv())
        assert isinstance(fault, Fault)
        assert "open.padding" in fault.message


def test_settings_exclude_what_undoes_each_other_and_bound_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="--padding or --compression"):
        client_settings(padding=64, compression=True)
    with pytest.raises(UsageError, match="--padding or --compression"):
        server_settings(padding=64, compression=True)
    with pytest.raises(ParameterError, match="padding"):
        client_settings(padding=5000)
    with pytest.raises(UsageError, match="--padding"):
        server_settings(padding=-1)
    monkeypatch.setenv("PACELINE_PADDING", "128")
    assert (client_settings().padding, server_settings().padding) == (128, 128)
    monkeypatch.setenv("PACELINE_PADDING", "0")
    monkeypatch.setenv("PACELINE_COMPRESSION", "true")
    assert (client_settings().link.compression, server_settings().compression) == (True, True)

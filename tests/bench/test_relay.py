"""The delaying relay, over loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.bench.relay import Relay, RelaySettings


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def relayed(settings: RelaySettings) -> AsyncIterator[Relay]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    relay = Relay("127.0.0.1", server.sockets[0].getsockname()[1], settings)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()
        server.close()
        await server.wait_closed()


async def test_bytes_come_back_in_order_and_not_before_the_round_trip() -> None:
    async with relayed(RelaySettings(rtt_s=0.06, jitter_s=0.02, seed=1)) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        sent = b"".join(bytes([i % 251]) * 50 for i in range(200))
        for start in range(0, len(sent), 500):
            writer.write(sent[start : start + 500])
            await asyncio.sleep(0)
        got = await reader.readexactly(len(sent))
        assert got == sent
        assert loop.time() - begin >= 0.06
        assert (relay.counters.bytes_up, relay.counters.bytes_down) == (len(sent), len(sent))
        writer.close()
        await writer.wait_closed()


async def test_the_end_of_a_direction_passes_through() -> None:
    async with relayed(RelaySettings(rtt_s=0.01)) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"bye")
        writer.write_eof()
        assert await reader.read() == b"bye"
        writer.close()
        await writer.wait_closed()


async def test_drops_cut_connections_and_the_relay_takes_new_ones() -> None:
    async with relayed(RelaySettings()) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert relay.drop_all() == 1
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()
        await writer.wait_closed()
        assert relay.counters.num_connections == 2


async def test_random_drops_happen() -> None:
    async with relayed(RelaySettings(mean_uptime_s=0.01, seed=5)) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        try:
            await asyncio.wait_for(reader.read(), 10)
        except ConnectionError:
            pass
        writer.close()
        assert relay.counters.num_dropped == 1


async def test_nobody_behind_the_relay_is_a_reset() -> None:
    relay = Relay("127.0.0.1", 1, RelaySettings())
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    try:
        assert await reader.read() == b""
    except ConnectionError:
        pass
    writer.close()
    await relay.stop()

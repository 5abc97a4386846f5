"""A TCP relay that makes loopback a real network: delay, jitter, bandwidth and forced drops, in user space.

Bytes keep their order, as TCP's do: a chunk that jitter holds back holds back what is behind it. Nothing is looked
into. Runs as part of an event loop, or as a process:

    python -m paceline.bench.relay --to 127.0.0.1:8765 --rtt 80

Not here: the model of a link on a virtual clock (``link``).
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16
_MAX_QUEUED = 1 << 10
"""Chunks under way per direction; beyond that the sender feels back-pressure, as behind a full pipe."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """rtt_s: added round trip. jitter_s: largest extra delay of a chunk, one way. bytes_per_s: per direction, or None.

    mean_uptime_s: mean time between forced drops of each connection (exponential), None for never.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    mean_uptime_s: float | None = None
    seed: int = 0


@dataclass(slots=True)
class RelayCounters:
    """What went through."""

    num_connections: int = 0
    num_dropped: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class Relay:
    """Listens on a port of its own and passes every connection on. ``settings`` may be replaced while it runs."""

    def __init__(self, host: str, port: int, settings: RelaySettings) -> None:
        """host, port: where the server listens."""
        self._upstream = (host, port)
        self.settings = settings
        self.counters = RelayCounters()
        self._random = random.Random(settings.seed)
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: set[_Link] = set()

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listen on a port of the loopback interface, 0 for any free one."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)

    def drop_all(self) -> int:
        """Cut every connection now, without a goodbye. Returns how many there were."""
        links = list(self._links)
        for link in links:
            link.abort()
        self.counters.num_dropped += len(links)
        return len(links)

    def drop_all_soon(self) -> None:
        """The same, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drop_all)

    async def stop(self) -> None:
        """Stop listening and cut what is left."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The handshake crosses the link too, before the server sees anything.
        await asyncio.sleep(self.settings.rtt_s)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        self.counters.num_connections += 1
        link = _Link((reader, writer), (far_reader, far_writer), self)
        self._links.add(link)
        uptime = self.settings.mean_uptime_s
        cut = None
        if uptime is not None:
            delay = self._random.expovariate(1.0 / uptime)
            cut = asyncio.get_running_loop().call_later(delay, self._drop, link)
        try:
            await link.run()
        finally:
            if cut is not None:
                cut.cancel()
            self._links.discard(link)

    def _drop(self, link: _Link) -> None:
        self.counters.num_dropped += 1
        link.abort()

    def delay_s(self) -> float:
        """One way, for the next chunk."""
        settings = self.settings
        return settings.rtt_s / 2 + settings.jitter_s * self._random.random()


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, near: Ends, far: Ends, relay: Relay) -> None:
        self._near, self._far, self._relay = near, far, relay

    async def run(self) -> None:
        """Until both directions have ended."""
        up = self._pump(self._near[0], self._far[1], is_up=True)
        down = self._pump(self._far[0], self._near[1], is_up=False)
        await asyncio.gather(up, down, return_exceptions=True)
        for _, writer in (self._near, self._far):
            writer.close()

    def abort(self) -> None:
        """Reset both ends; what is under way is lost."""
        for _, writer in (self._near, self._far):
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        pipe = _Pipe(writer)
        sending = asyncio.create_task(pipe.run())
        loop = asyncio.get_running_loop()
        free_at = 0.0
        try:
            while data := await reader.read(_CHUNK_BYTES):
                self._count(len(data), is_up=is_up)
                speed = self._relay.settings.bytes_per_s
                free_at = max(free_at, loop.time()) + (len(data) / speed if speed else 0.0)
                await pipe.queue.put((free_at + self._relay.delay_s(), data))
        except ConnectionError:
            writer.transport.abort()
        await pipe.queue.put((loop.time() + self._relay.delay_s(), b""))
        await sending

    def _count(self, size: int, *, is_up: bool) -> None:
        if is_up:
            self._relay.counters.bytes_up += size
        else:
            self._relay.counters.bytes_down += size


@dataclass(slots=True)
class _Pipe:
    """One direction: chunks with the time at which each is due; an empty one is the end."""

    writer: asyncio.StreamWriter
    queue: asyncio.Queue[tuple[float, bytes]] = field(default_factory=lambda: asyncio.Queue(_MAX_QUEUED))

    async def run(self) -> None:
        """Deliver in order until the end comes or the receiver is gone."""
        loop = asyncio.get_running_loop()
        is_open = True
        while True:
            due, data = await self.queue.get()
            if not data:
                break
            wait = due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            if is_open:
                is_open = await self._deliver(data)
        if is_open and self.writer.can_write_eof():
            try:
                self.writer.write_eof()
            except OSError:
                self.writer.transport.abort()

    async def _deliver(self, data: bytes) -> bool:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            return False
        return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a relay until interrupted; prints the port that it listens on."""
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.relay", description="a TCP relay with delay")
    parser.add_argument("--to", default="127.0.0.1:8765", metavar="HOST:PORT", help="where the server listens")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--rtt", type=float, default=0.0, metavar="MS", help="added round trip time")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="MS", help="largest extra delay, one way")
    parser.add_argument("--uptime", type=float, metavar="S", help="mean time between forced drops")
    wishes = parser.parse_args(arguments)
    host, _, port = wishes.to.rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"expected --to HOST:PORT, got {wishes.to!r}")
    settings = RelaySettings(wishes.rtt / 1e3, wishes.jitter / 1e3, mean_uptime_s=wishes.uptime)

    async def serve() -> None:
        relay = Relay(host, int(port), settings)
        await relay.start(wishes.port)
        print(f"listening on 127.0.0.1:{relay.port}", flush=True)
        await asyncio.Event().wait()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()

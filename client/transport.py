"""The client's way to its servers: one link at a time, restored with back-off and jitter, shared by generations.

A *port* is what one generation hears: messages, that the link is lost, that another one stands, or that it is over. A
generation number is never used twice, so nothing late can be taken for something new. Only the event loop's thread
comes here.

Not here: the websocket itself (``link``), what a generation does with all this (``stream``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.client.address import ServerAddress
from paceline.client.faults import error_from_fault
from paceline.client.link import Link, LinkSettings, Received
from paceline.shared.errors import AuthError, LinkError, ModelError, PacelineError
from paceline.shared.messages import Closing, Commit, Fault, Hello, Opened, Welcome

_LOG = logging.getLogger("paceline.client")


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Waits first_s, doubling up to most_s, each times a random factor in 0.5..1.5; gives up after give_up_s.

    max_losses: a link that a server ended with an error is not restored for the same request again after so many in a
    row without a single commit between them.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    give_up_s: float = 60.0
    max_losses: int = 3

    def wait_s(self, attempt: int, rng: random.Random) -> float:
        """Seconds before attempt number ``attempt``, counted from 0."""
        return float(min(self.most_s, self.first_s * 2.0**attempt) * rng.uniform(0.5, 1.5))


class Port(Protocol):
    """One generation's ear."""

    def on_message(self, received: Received) -> None: ...
    def on_lost(self) -> None: ...
    def on_restored(self, link: Link) -> None: ...
    def on_failed(self, error: PacelineError) -> None: ...


class Uplink:
    """Keeps a link to one of several servers. Use ``start`` and ``close``, or ``async with``."""

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        hello: Hello,
        api_key: str | None = None,
        *,
        link_settings: LinkSettings | None = None,
        retry: RetrySettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._hello = hello
        self._api_key = api_key
        self._link_settings = link_settings or LinkSettings()
        self._retry = retry or RetrySettings()
        self._rng = rng or random.Random()
        self._ports: dict[int, Port] = {}
        self._numbers = itertools.count()
        self._queue: asyncio.Queue[tuple[Link, bytes]] = asyncio.Queue()
        self._link: Link | None = None
        self._welcome: Welcome | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted = asyncio.Event()
        self._turn = 0
        self._num_losses = 0
        self._lost_since = 0.0
        self._lost_by: PacelineError = LinkError("no connection yet")

    @property
    def link(self) -> Link:
        """The present link. Raises ``LinkError`` while there is none."""
        if self._link is None:
            raise LinkError(f"no connection to {self._names()} at the moment")
        return self._link

    @property
    def is_linked(self) -> bool:
        """Whether there is a link now. Without one, whoever registers a port brings it back."""
        return self._link is not None

    @property
    def padding(self) -> int:
        """The unit that frames are padded to now, 0 for none."""
        return 0 if self._link is None else self._link.padding

    @property
    def welcome(self) -> Welcome:
        """What the server said about itself when it was last reached. Raises ``LinkError`` before ``start``."""
        if self._welcome is None:
            raise LinkError(f"no connection to {self._names()} yet")
        return self._welcome

    def _names(self) -> str:
        return ", ".join(address.base for address in self._addresses)

    async def start(self) -> Welcome:
        """Connect to the first server that answers. Raises what the last one said if none does."""
        self._link = await self._connect_any()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._write())]
        return self._link.welcome

    async def close(self) -> None:
        """End everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()
            self._link = None

    def register(self, port: Port) -> int:
        """A fresh generation number, whose messages go to ``port``."""
        number = next(self._numbers)
        self._ports[number] = port
        self._wanted.set()
        return number

    def forget(self, number: int) -> None:
        """No more messages for this generation."""
        self._ports.pop(number, None)
        if not self._ports:
            self._wanted.clear()

    def post(self, data: bytes) -> None:
        """Send an encoded message soon, in order. Without a link it is dropped: generations open again anyway."""
        if self._link is not None:
            self._queue.put_nowait((self._link, data))

    async def _write(self) -> None:
        while True:
            link, data = await self._queue.get()
            if link is not self._link:
                continue
            try:
                await link.send(data)
            except LinkError:
                _LOG.debug("the link was lost while sending; the reader restores it")

    async def _run(self) -> None:
        while True:
            if self._link is not None:
                await self._serve(self._link)
            await self._wanted.wait()
            try:
                self._link = await self._reconnect()
            except PacelineError as error:
                self._num_losses = 0
                for number, port in list(self._ports.items()):
                    self.forget(number)
                    port.on_failed(error)
                continue
            for port in list(self._ports.values()):
                port.on_restored(self._link)

    async def _serve(self, link: Link) -> None:
        """Until the link is lost."""
        try:
            await self._read(link)
        except PacelineError as error:
            _LOG.info("%s", error)
            self._count_loss(error)
        await link.close()
        self._link = None
        for port in list(self._ports.values()):
            port.on_lost()

    def _count_loss(self, error: PacelineError) -> None:
        """Losses in a row, while somebody waits for a commit that does not come."""
        if not self._num_losses:
            self._lost_since = asyncio.get_running_loop().time()
        self._num_losses += bool(self._ports)
        self._lost_by = error

    def _check_losses(self) -> None:
        """Raises what ended the links if opening again and again leads nowhere."""
        if self._num_losses < self._retry.max_losses:
            return
        waited_s = asyncio.get_running_loop().time() - self._lost_since
        if not isinstance(self._lost_by, LinkError) or waited_s >= self._retry.give_up_s:
            raise self._lost_by

    async def _read(self, link: Link) -> None:
        async for received in link.messages():
            match received.message:
                case Opened(generation=number) | Commit(generation=number):
                    self._tell(number, received)
                case Fault(generation=int(number)):
                    self._tell(number, received)
                case Fault():
                    raise error_from_fault(received.message)
                case Closing() if len(self._addresses) > 1:
                    self._turn += 1
                    raise LinkError(f"{link.address.base} drains")
                case _:
                    pass

    def _tell(self, number: int, received: Received) -> None:
        if isinstance(received.message, Commit):
            self._num_losses = 0
        port = self._ports.get(number)
        if port is not None:
            port.on_message(received)

    async def _connect_any(self) -> Link:
        """One round over all servers, beginning with the one that served last."""
        error: PacelineError = LinkError("no server given")
        for offset in range(len(self._addresses)):
            address = self._addresses[(self._turn + offset) % len(self._addresses)]
            try:
                link = await Link.connect(address, self._hello, self._api_key, self._link_settings)
            except PacelineError as failure:
                error = failure
                continue
            self._turn = (self._turn + offset) % len(self._addresses)
            self._welcome = link.welcome
            return link
        raise error

    async def _reconnect(self) -> Link:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry.give_up_s
        self._check_losses()
        for attempt in itertools.count(max(0, self._num_losses - 1)):
            await asyncio.sleep(self._retry.wait_s(attempt, self._rng))
            try:
                return await self._connect_any()
            except (AuthError, ModelError):
                raise
            except PacelineError as error:
                if loop.time() >= deadline:
                    patience = f"{self._retry.give_up_s:g} s"
                    raise LinkError(f"gave up on {self._names()} after {patience}: {error}") from error
        raise AssertionError("unreachable")

"""The client for Python programs.

    async with Client("http://127.0.0.1:8765") as client:
        async for chunk in client.stream("The capital of France is", SamplingParams(max_tokens=32)):
            print(chunk.text, end="")

Not here: the terminal (``commands``), one generation's machinery (``stream``, ``session``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.client.address import parse_addresses
from paceline.client.bundles import OnProgress, Progress, find_local_bundle, find_tokenizer, pull_bundle
from paceline.client.completion import CompletionStream
from paceline.client.drafting.acceptance import Acceptance
from paceline.client.drafting.choice import AUTO, KNOWN, SSM, Bundle, choose_drafters, named_bundle
from paceline.client.drafting.controller import Controller
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.policy import BestFirstPolicy, Policy, StaticPolicy
from paceline.client.history import History
from paceline.client.memory import Memory
from paceline.client.result import Completion
from paceline.client.session import ClientSession, Task
from paceline.client.settings import ClientSettings, make_settings
from paceline.client.stream import GenerationStream
from paceline.client.text import ChatMessage, TextCodec
from paceline.client.trace import Trace
from paceline.client.transport import Uplink
from paceline.client.verifier import pick_verifier
from paceline.models.catalogue import list_bundles
from paceline.shared.detokenize import TextStream
from paceline.shared.errors import BundleError, ContextError, LinkError, ModelError, ParameterError
from paceline.shared.messages import PROTOCOL_VERSION, Hello, Welcome
from paceline.shared.sampling import SEED_BITS, SamplingParams, Verifier

_LOG = logging.getLogger("paceline.client")
Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text as it is, token ids, or a conversation that the model's chat template wraps."""


class Client:
    """A connection to one or several servers, with the drafters that fit what they serve.

    url: a server's URL, or several. drafter: see ``drafting.choice``. Anything else comes from ``settings``.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        api_key: str | None = None,
        drafter: str | None = None,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """Raises ``UsageError`` for a URL that is none, or a key that no header can carry."""
        self.settings = settings or make_settings()
        key = self.settings.api_key
        self._addresses = parse_addresses(url)
        self._api_key = _checked_key(api_key or (key.get_secret_value() if key is not None else None))
        self._drafter_name = drafter or self.settings.drafter
        self._uplink: Uplink | None = None
        self._text: TextCodec | None = None
        self._drafters: tuple[Drafter, ...] = ()
        self._memory: Memory | None = None
        self._acceptance: dict[Verifier, Acceptance] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="paceline-draft")

    async def __aenter__(self) -> Self:
        """Connect. Raises ``LinkError``, ``AuthError``, ``ModelError`` and the like."""
        hello = Hello(PROTOCOL_VERSION, "paceline", padding=self.settings.padding)
        uplink = Uplink(
            self._addresses, hello, self._api_key, link_settings=self.settings.link, retry=self.settings.retry
        )
        await uplink.start()
        self._uplink = uplink
        try:
            await self._prepare(uplink.welcome)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and free the drafters."""
        if self._uplink is not None:
            await self._uplink.close()
            self._uplink = None
        self._memory = None
        self._pool.shutdown(wait=True)  # what is to be remembered is written before
        for drafter in self._drafters:
            drafter.close()
        self._drafters = ()

    @property
    def welcome(self) -> Welcome:
        """What the server said about itself. Raises ``LinkError`` without a connection."""
        return self._link_of().welcome

    @property
    def text(self) -> TextCodec:
        """The target's tokenizer. Raises ``ModelError`` if none was found."""
        if self._text is None:
            model = self.welcome.model
            raise ModelError(f"no tokenizer for {model!r} on this machine: pass --tokenizer, or pull its draft bundle")
        return self._text

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters in use."""
        return tuple(drafter.name for drafter in self._drafters)

    def _link_of(self) -> Uplink:
        if self._uplink is None:
            raise LinkError("the client is not connected: use `async with Client(...)`")
        return self._uplink

    async def _prepare(self, welcome: Welcome) -> None:
        """Find tokenizer and drafters; files are read and models loaded off the event loop."""
        loop = asyncio.get_running_loop()
        wanted = self._drafter_name
        bundle = None if wanted in KNOWN else named_bundle(wanted)
        if bundle is None:
            bundle = await loop.run_in_executor(self._pool, find_local_bundle, welcome)
            if bundle is None and self.settings.pull:
                bundle = await self._pull(welcome)
        self._text = await loop.run_in_executor(self._pool, self._load_text, welcome, bundle)
        self._drafters = await loop.run_in_executor(self._pool, self._load_drafters, welcome, bundle)
        if self.settings.remember:
            self._memory = await loop.run_in_executor(self._pool, self._load_memory, welcome)

    async def _pull(self, welcome: Welcome) -> Bundle | None:
        address = self._link_of().link.address
        try:
            return await pull_bundle(address, welcome, self._api_key, on_progress=_announced(address.base))
        except (BundleError, LinkError) as error:
            if self._drafter_name == SSM:
                raise
            level = logging.WARNING if isinstance(error, BundleError) else logging.INFO
            _LOG.log(level, "no draft bundle from %s: %s", address.base, error)
            return None

    def _load_text(self, welcome: Welcome, bundle: Bundle | None) -> TextCodec | None:
        path = self.settings.tokenizer or (bundle.folder if bundle else find_tokenizer(welcome))
        if path is None:
            return None
        text = TextCodec.load(path)
        if welcome.tokenizer and text.hash != welcome.tokenizer:
            raise ModelError(f"{path} is not the tokenizer of {welcome.model!r}, which the server has")
        return text

    def _load_drafters(self, welcome: Welcome, bundle: Bundle | None) -> tuple[Drafter, ...]:
        wanted = self._drafter_name
        if wanted == AUTO and bundle is None and (others := [one for one in list_bundles() if one != welcome.model]):
            _LOG.warning(
                "no draft model for %r here, only for %s: drafting from the text alone",
                welcome.model,
                ", ".join(others),
            )
        try:
            return choose_drafters(wanted, welcome, lambda: bundle, self.settings.draft_threads)
        except BundleError as error:
            if wanted != AUTO:
                raise
            _LOG.warning("going on without a draft model, `paceline models pull` fetches it anew: %s", error)
            return choose_drafters(AUTO, welcome, lambda: None, None)

    def _load_memory(self, welcome: Welcome) -> Memory | None:
        tokenizer = welcome.tokenizer or (self._text.hash if self._text is not None else "")
        if not tokenizer:
            _LOG.warning("nothing is remembered: %s does not say which tokenizer its ids belong to", welcome.model)
            return None
        servers = [address.base for address in self._addresses]
        history = History(tokenizer, servers, self.settings.remember_tokens)
        return Memory(history, welcome.vocab_size, self._drafters)

    def _remember(self, tokens: NDArray[np.int32]) -> None:
        if self._memory is not None:
            self._pool.submit(self._memory.add, tokens)

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """int32 ids of a prompt. Raises ``ParameterError`` if it is none, ``ContextError`` if it is too long."""
        if isinstance(prompt, str):
            ids = self.text.encode(prompt)
        elif not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise ParameterError("prompt", f"expected text, token ids or messages, got {type(prompt).__name__}")
        elif messages := [item for item in prompt if isinstance(item, Mapping)]:
            if len(messages) < len(prompt):
                raise ParameterError("prompt", "expected a prompt of messages alone, got other things among them")
            ids = self.text.encode_chat(messages)
        else:
            ids = _checked_ids([item for item in prompt if not isinstance(item, Mapping)], self.welcome.vocab_size)
        if not len(ids):
            raise ParameterError("prompt", "expected a prompt of at least one token, got an empty one")
        limit = self.welcome.limits.max_context
        if len(ids) >= limit:
            raise ContextError(f"expected fewer than max_context={limit} tokens, got a prompt of {len(ids)} tokens")
        return ids

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        verifier: Verifier | str | None = None,
        choice: int = 0,
        trace: Trace | None = None,
    ) -> CompletionStream:
        """Start one generation as soon as it is iterated. trace: gets what the generation does, and when.

        Raises ``ParameterError`` for what cannot be asked, ``ContextError`` for a prompt that leaves no room.
        """
        wanted = sampling or SamplingParams()
        if wanted.seed is None:
            wanted = replace(wanted, seed=secrets.randbits(SEED_BITS))
        uplink = self._link_of()
        welcome = uplink.welcome
        task = Task(self.encode(prompt), wanted, pick_verifier(verifier, wanted), choice=choice)
        controller = Controller(welcome.step_time, welcome.limits, can_switch=not self.settings.always_draft)
        policy: Policy = StaticPolicy(self.settings.expansion) if self.settings.expansion else BestFirstPolicy()
        acceptance = self._acceptance.setdefault(task.verifier, Acceptance())
        session = ClientSession(
            0, task, welcome, self._drafters, policy=policy, acceptance=acceptance, controller=controller
        )
        generation = GenerationStream(session, uplink, self._drafters, self._pool, trace=trace)
        decoder = None if self._text is None else TextStream.of(self._text.decode, wanted, welcome.eos_ids)
        return CompletionStream(generation, decoder, self._remember)

    async def complete(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, verifier: Verifier | str | None = None
    ) -> Completion:
        """One answer, whole."""
        stream = self.stream(prompt, sampling, verifier=verifier)
        async for _ in stream:
            pass
        return stream.completion


def _checked_ids(ids: Sequence[object], vocab_size: int) -> NDArray[np.int32]:
    """int32 ids, each within the target's vocabulary."""
    for token in ids:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ParameterError("prompt", f"expected token ids in 0..{vocab_size - 1} in prompt, got {token!r:.40}")
    return np.array(ids, np.int32)


def _checked_key(key: str | None) -> str | None:
    """The key as it is. Its characters are never repeated."""
    if key is not None and not (key.isprintable() and key.isascii()):
        raise ParameterError("api_key", "expected an API key of printable ASCII characters, got others")
    return key


def _announced(server: str) -> OnProgress:
    """Says once that a pull has begun, which may take a while."""
    said: list[str] = []

    def on_progress(now: Progress) -> None:
        if not said:
            said.append(server)
            _LOG.warning("fetching the draft from %s, once", server)

    return on_progress

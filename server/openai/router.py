"""``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions`` over HTTP, streamed (SSE) or whole.

A stream that has begun ends with exactly one ``[DONE]``, after an error object if something went wrong; everything that
can be refused is refused with a plain status before it begins. Not here: bodies (``schema``), the engine (``logic``).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.server.driver import EngineDriver, Served
from paceline.server.gate import UnreadyError, error_body
from paceline.server.metrics import ServerMetrics
from paceline.server.openai.answer import Answer, ChatAnswer, CompletionAnswer
from paceline.server.openai.logic import Job
from paceline.server.openai.schema import ChatRequest, CompletionRequest, parse
from paceline.server.settings import ServerSettings
from paceline.server.text import TargetText
from paceline.shared.errors import LimitError, ModelError, PacelineError, ParameterError
from paceline.shared.sampling import SamplingParams

KEEP_ALIVE_S = 10.0
"""A comment goes out after so many seconds without a token, so that proxies keep the stream open."""
BODY_S = 60.0
"""Seconds that a client has for a request's body: a slow drip holds no connection for long."""
MAX_CHOICES_PER_REQUEST = 128
_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "connection": "keep-alive"}


class OpenAIRoutes:
    """The handlers."""

    def __init__(self, driver: EngineDriver, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._driver = driver
        self._settings = settings
        self._metrics = metrics
        self._started = int(time.time())

    async def models(self) -> Response:
        """The one model that is served."""
        served = self._served()
        info = served.engine.target.info
        entry = {
            "id": info.name,
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": served.engine.rules.max_context,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        body = parse(CompletionRequest, await self._body(request))
        served, text = self._for_model(body.model)
        sampling = body.to_sampling()
        context = served.engine.rules.max_context
        prompts = body.prompts()
        if len(prompts) * sampling.n > MAX_CHOICES_PER_REQUEST:
            raise ParameterError("n", f"expected at most {MAX_CHOICES_PER_REQUEST} choices in all")
        ids = [
            await asyncio.to_thread(text.encode, prompt, context) if isinstance(prompt, str) else _checked(prompt)
            for prompt in prompts
        ]
        answer = CompletionAnswer(f"cmpl-{secrets.token_hex(12)}", served.engine.target.info.name, text)
        return await self._run(request, ids, sampling, answer, body.stream, body.wants_usage_chunk)

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        body = parse(ChatRequest, await self._body(request))
        served, text = self._for_model(body.model)
        sampling = body.to_sampling()
        messages = [message.plain() for message in body.messages]
        ids = await asyncio.to_thread(text.encode_chat, messages, served.engine.rules.max_context)
        answer = ChatAnswer(f"chatcmpl-{secrets.token_hex(12)}", served.engine.target.info.name, text)
        return await self._run(request, [ids], sampling, answer, body.stream, body.wants_usage_chunk)

    async def _run(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        answer: Answer,
        stream: bool | None,
        usage_chunk: bool,
    ) -> Response:
        job = Job(self._driver, answer.text, prompts, sampling)
        if stream:
            await job.__aenter__()
            return _JobResponse(job, self._events(job, answer, usage_chunk))
        gone = asyncio.create_task(_until_gone(request))
        work = asyncio.create_task(self._collect(job, answer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            return JSONResponse(await work)
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _collect(self, job: Job, answer: Answer) -> dict[str, Any]:
        async with job:
            async for delta in job.deltas(KEEP_ALIVE_S):
                if delta is not None:
                    answer.add(delta)
        self._observe(job)
        return answer.whole(job.num_choices, job.usage)

    async def _events(self, job: Job, answer: Answer, usage_chunk: bool) -> AsyncIterator[bytes]:
        try:
            for chunk in answer.opening(job.num_choices, usage_chunk):
                yield _event(chunk)
            async for delta in job.deltas(KEEP_ALIVE_S):
                if delta is None:
                    yield b": keep-alive\n\n"
                    continue
                for chunk in answer.chunks(delta, job.usage, usage_chunk):
                    yield _event(chunk)
            if usage_chunk:
                yield _event(answer.usage_chunk(job.usage))
            self._observe(job)
            yield b"data: [DONE]\n\n"
        except PacelineError as error:
            yield _event(error_body(error))
            yield b"data: [DONE]\n\n"

    def _observe(self, job: Job) -> None:
        if job.usage.first_at is not None:
            self._metrics.ttft.observe(job.usage.first_at - job.usage.began_at)

    async def _body(self, request: Request) -> bytes:
        """The body, refused as soon as it is known to be too long, with a length header or without."""
        limit = self._settings.max_body
        declared = request.headers.get("content-length", "0")
        data = bytearray()
        if not declared.isdigit() or int(declared) > limit:
            raise LimitError(f"expected a body of at most {limit} bytes, got {declared[:20]}")
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    data += piece
                    if len(data) > limit:
                        raise LimitError(f"expected a body of at most {limit} bytes, got more")
        except TimeoutError:
            raise LimitError(f"expected the whole body within {BODY_S:g} s, got {len(data)} bytes") from None
        return bytes(data)

    def _served(self) -> Served:
        if self._driver.served is None:
            raise UnreadyError("expected a server that is ready, but the model loads", 5.0)
        return self._driver.served

    def _for_model(self, name: str | None) -> tuple[Served, TargetText]:
        served = self._served()
        if name is not None and name != served.engine.target.info.name:
            raise ModelError(f"expected the model {served.engine.target.info.name}, got {name[:80]}")
        if served.text is None:
            raise ModelError("expected a model with a tokenizer, got one without: use /v1/stream with token ids")
        return served, served.text


class _JobResponse(StreamingResponse):
    """Streams a job's events and frees it whatever happens: a client may be gone before the first one is asked for."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_SSE_HEADERS)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._job.__aexit__()


def make_openai_router(driver: EngineDriver, settings: ServerSettings, metrics: ServerMetrics) -> APIRouter:
    """The three routes."""
    routes = OpenAIRoutes(driver, settings, metrics)
    router = APIRouter()
    table: list[tuple[str, str, Callable[..., Any]]] = [
        ("/v1/models", "GET", routes.models),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/chat/completions", "POST", routes.chat),
    ]
    for path, method, handler in table:
        router.add_api_route(path, handler, methods=[method], response_model=None)
    return router


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _checked(ids: Sequence[int]) -> Sequence[int]:
    """Ids that fit an int32; whether they are in the vocabulary is the engine's to say."""
    if any(not -(2**31) <= token < 2**31 for token in ids):
        raise ParameterError("prompt", "expected token ids of the model's vocabulary")
    return ids


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

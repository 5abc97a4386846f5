"""The client over real websockets: a scripted server in this process that drops, refuses, stalls and drains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus

import pytest
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from paceline.client.address import ServerAddress, parse_address, parse_addresses
from paceline.client.api import Client
from paceline.client.bundles import list_remote
from paceline.client.history import forget
from paceline.client.settings import make_settings
from paceline.models.manifest import Manifest, TargetEntry, save_manifest
from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan
from paceline.server.scripted import ScriptedTarget, markov
from paceline.shared.errors import (
    AuthError,
    BusyError,
    ContextError,
    LinkError,
    ParameterError,
    RemoteError,
    UsageError,
)
from paceline.shared.messages import Cancel, Closing, Commit, Fault, Grow, Hello, Limits, Open, StepTime, Welcome
from paceline.shared.sampling import SamplingParams
from paceline.shared.wire import decode, encode

VOCAB = 32
PROMPT = [3, 1, 4, 1, 5]


class ScriptedServer:
    """Serves one scripted target. drop_after: commits after which a connection is cut, once for each entry."""

    def __init__(self, *, key=None, drop_after=(), step_s=0.001, max_context=512, is_draining=False, rejects=False):
        self.target = ScriptedTarget(markov(VOCAB, 0), VOCAB, max_context=max_context)
        self.step_time = StepTime(step_s, step_s / 50)
        limits = Limits(max_context=max_context)
        self.engine = Engine(self.target, EngineSettings(step_time=self.step_time, limits=limits, patience_s=0.0))
        self.welcome = Welcome(1, "scripted", "", VOCAB, (), None, limits, self.step_time, "")
        self.key, self.drops, self.step_s, self.is_draining = key, list(drop_after), step_s, is_draining
        self.sockets, self.num_connections, self.grows = {}, 0, 0
        self.active_at_end = None
        self.rejects, self.refusal = rejects, None

    async def __aenter__(self):
        self.server = await serve(self.serve_one, "127.0.0.1", 0, process_request=self.check, compression=None)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.stepper = asyncio.create_task(self.steps())
        return self

    async def __aexit__(self, *_):
        self.stepper.cancel()
        self.server.close()
        await self.server.wait_closed()

    def check(self, connection, request):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no\n")
        if self.refusal is not None:
            return connection.respond(self.refusal, '{"error": {"message": "come back later"}}')
        if request.path != "/v1/stream":
            return connection.respond(HTTPStatus.NOT_FOUND, "no\n")
        return None

    async def serve_one(self, socket):
        number = self.num_connections
        self.num_connections += 1
        self.sockets[number] = socket
        try:
            assert isinstance(decode(await socket.recv()), Hello)
            await socket.send(encode(self.welcome))
            if self.is_draining:
                await socket.send(encode(Closing(1.0)))
            async for data in socket:
                if self.rejects:
                    await socket.send(encode(Fault("malformed", "malformed by decree")))
                    await socket.close(1007)
                self.feed(number, decode(data))
        except ConnectionClosed:
            pass
        finally:
            self.engine.disconnect(number)
            del self.sockets[number]

    def feed(self, number, message):
        key, now = (number, message.generation), asyncio.get_running_loop().time()
        try:
            if isinstance(message, Open):
                self.engine.open(key, message, now)
            elif isinstance(message, Grow):
                self.grows += 1
                self.engine.grow(key, message, now)
            elif isinstance(message, Cancel):
                self.engine.cancel(key)
        except (ParameterError, ContextError) as error:
            fault = Fault(error.code, str(error), message.generation, getattr(error, "param", ""))
            asyncio.get_running_loop().create_task(self.sockets[number].send(encode(fault)))

    async def steps(self):
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self.step_s)
            plan = self.engine.next_step(clock())
            messages = self.engine.take_messages()
            if isinstance(plan, StepPlan):
                messages += self.engine.finish(plan, self.target.forward(plan.batch), clock())
            for (number, _), message in messages:
                await self.send(number, message)

    async def send(self, number, message):
        socket = self.sockets.get(number)
        if socket is None:
            return
        if isinstance(message, Commit) and self.drops:
            self.drops[0] -= 1
            if self.drops[0] < 0:
                self.drops.pop(0)
                socket.transport.abort()
                return
        try:
            await socket.send(encode(message))
        except ConnectionClosed:
            pass


def client(url, **given):
    drafter = given.pop("drafter", "ngram")
    return Client(url, given.pop("api_key", None), drafter, settings=make_settings(pull=False, **given))


async def ids_of(one, prompt=PROMPT, **sampling):
    sampling = {"max_tokens": 40, **sampling}
    return [token async for chunk in one.stream(prompt, SamplingParams(**sampling)) for token in chunk.token_ids]


@pytest.mark.parametrize("drafter", ["none", "ngram", "wrong", "auto"])
async def test_stream_gives_the_targets_tokens(drafter):
    async with ScriptedServer() as server, client(server.url, drafter=drafter) as one:
        stream = one.stream(PROMPT, SamplingParams(max_tokens=40))
        chunks = [chunk async for chunk in stream]
        done = stream.completion
    assert list(done.token_ids) == server.target.greedy(PROMPT, 40)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length"
    assert all(len(chunk.token_ids) == len(chunk.drafted) for chunk in chunks)
    assert sum(sum(chunk.drafted) for chunk in chunks) == done.stats.accepted
    assert done.stats.bytes_up > 0
    assert done.stats.bytes_down > 0
    assert 0 < done.stats.ttft_s <= done.stats.total_s
    assert done.stats.tokens_per_step == 40 / done.stats.verify_steps
    if drafter == "none":
        assert (done.stats.drafted, done.stats.verify_steps) == (0, 40)


async def test_dropped_links_lose_and_double_nothing():
    async with ScriptedServer(drop_after=[3, 0, 7, 2]) as server, client(server.url, drafter="auto") as one:
        plain = await ids_of(one, max_tokens=120)
        assert server.num_connections >= 4
        sampled = await ids_of(one, max_tokens=60, temperature=1.0, seed=7)
    async with ScriptedServer() as calm, client(calm.url, drafter="none") as other:
        assert plain == calm.target.greedy(PROMPT, 120)
        assert sampled == await ids_of(other, max_tokens=60, temperature=1.0, seed=7)


async def test_killed_server_is_replaced_by_the_next_of_the_list():
    async with ScriptedServer() as second:
        async with ScriptedServer(step_s=0.005) as first:
            one = client([first.url, second.url])
            await one.__aenter__()
            received = []
            async for chunk in one.stream(PROMPT, SamplingParams(max_tokens=100)):
                received += chunk.token_ids
                if len(received) > 20 and first.num_connections == 1 and not second.num_connections:
                    first.server.close()
                    for socket in list(first.sockets.values()):
                        socket.transport.abort()
        await one.close()
        assert second.num_connections == 1
        assert received == second.target.greedy(PROMPT, 100)


async def test_draining_server_is_left_for_another():
    async with (
        ScriptedServer(is_draining=True) as first,
        ScriptedServer() as second,
        client(f"{first.url},{second.url}") as one,
    ):
        assert await ids_of(one, max_tokens=60) == second.target.greedy(PROMPT, 60)
        assert second.num_connections == 1


async def test_several_generations_share_a_connection_and_keep_their_own_answers():
    async with ScriptedServer() as server, client(server.url) as one:
        prompts = [[place, 2, 3] for place in range(5)]
        answers = await asyncio.gather(*(ids_of(one, prompt) for prompt in prompts))
        assert server.num_connections == 1
    assert answers == [server.target.greedy(prompt, 40) for prompt in prompts]


async def test_leaving_a_stream_early_frees_the_generation():
    async with ScriptedServer() as server, client(server.url) as one:
        stream = one.stream(PROMPT, SamplingParams(max_tokens=400)).chunks()
        await anext(stream)
        await stream.aclose()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if server.engine.is_idle:
                break
        assert server.engine.is_idle
        assert await ids_of(one) == server.target.greedy(PROMPT, 40)


@pytest.mark.parametrize("prompt", [None, 5, b"ab", [], [1.5], [-1], [VOCAB], [2**40], [1, "a"], [{"role": "user"}, 1]])
async def test_what_is_no_prompt_is_refused_before_anything_is_sent(prompt):
    async with ScriptedServer() as server, client(server.url) as one:
        with pytest.raises(ParameterError, match="expected") as refused:
            one.stream(prompt)
        assert refused.value.param == "prompt"
        assert one.drafter_names == ("ngram",)
        assert len(await ids_of(one)) > 0


async def test_refused_connection_wrong_key_and_missing_route_are_told_apart():
    with pytest.raises(LinkError, match=r"cannot connect to http://127.0.0.1:9: connection refused"):
        await client("http://127.0.0.1:9").__aenter__()
    async with ScriptedServer(key="secret") as server:
        with pytest.raises(AuthError, match="PACELINE_API_KEY"):
            await client(server.url).__aenter__()
        with pytest.raises(AuthError, match="PACELINE_API_KEY"):
            await list_remote(parse_address(server.url))
        for key in ("sec\nret", "geheim\u00e4"):
            with pytest.raises(ParameterError, match="printable ASCII") as refused:
                client(server.url, api_key=key)
            assert key not in str(refused.value)
        async with client(server.url, api_key="secret") as one:
            assert one.welcome.model == "scripted"
        server.refusal = HTTPStatus.TOO_MANY_REQUESTS
        with pytest.raises(BusyError, match="HTTP 429: come back later"):
            await client(server.url, api_key="secret").__aenter__()
        server.refusal = HTTPStatus.FORBIDDEN
        with pytest.raises(AuthError, match="refused the connection"):
            await client(server.url, api_key="secret").__aenter__()
        server.refusal = None
        with pytest.raises(LinkError, match="HTTP 404"):
            await client(server.url + "/elsewhere", api_key="secret").__aenter__()


async def test_request_that_the_server_refuses_is_a_typed_error_and_others_go_on():
    async with ScriptedServer(max_context=64) as server, client(server.url) as one:
        with pytest.raises(ContextError, match="64"):
            await ids_of(one, list(range(30)) * 3)
        with pytest.raises(ParameterError, match="prompt"):
            await ids_of(one, [])
        assert await ids_of(one, max_tokens=5) == server.target.greedy(PROMPT, 5)


async def test_request_that_ends_every_link_is_given_up_with_the_servers_words():
    async with ScriptedServer(rejects=True) as server, client(server.url) as one:
        with pytest.raises(RemoteError, match="malformed by decree"):
            await ids_of(one, max_tokens=5)
        assert server.num_connections == 3


async def test_server_that_never_comes_back_ends_the_stream_with_one_sentence():
    async with ScriptedServer(step_s=0.005) as server:
        one = client(server.url, reconnect_timeout=0.3)
        await one.__aenter__()
        with pytest.raises(LinkError, match="gave up on"):
            async for _ in one.stream(PROMPT, SamplingParams(max_tokens=400)):
                server.server.close()
                for socket in list(server.sockets.values()):
                    socket.transport.abort()
        await one.close()


async def test_user_mistakes_are_refused_before_anything_is_sent():
    async with ScriptedServer() as server, client(server.url) as one:
        with pytest.raises(ParameterError, match="greedy, coupled, mss, naive"):
            one.stream(PROMPT, verifier="nosuch")
        with pytest.raises(ParameterError, match="temperature 0"):
            one.stream(PROMPT, SamplingParams(temperature=1.0), verifier="greedy")
        with pytest.raises(ParameterError, match="auto, ssm, ngram, none, wrong"):
            await client(server.url, drafter="nosuch").__aenter__()


@pytest.mark.parametrize(
    ("text", "base", "stream"),
    [
        ("http://127.0.0.1:8765", "http://127.0.0.1:8765", "ws://127.0.0.1:8765/v1/stream"),
        ("https://host/", "https://host", "wss://host/v1/stream"),
        ("wss://host:1/pre/v1/stream", "https://host:1/pre", "wss://host:1/pre/v1/stream"),
        ("host:8765", "http://host:8765", "ws://host:8765/v1/stream"),
        ("http://[::1]:8765", "http://[::1]:8765", "ws://[::1]:8765/v1/stream"),
    ],
)
def test_addresses_are_read_as_people_write_them(text, base, stream):
    address = parse_address(text)
    assert (address.base, address.stream_url) == (base, stream)


@pytest.mark.parametrize("text", ["", "not a url", "ftp://host", "http://", "http://host:99999"])
def test_text_that_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="server URL"):
        parse_addresses(text)


def test_loopback_is_known():
    assert ServerAddress("http://[::1]:1").is_loopback
    assert not ServerAddress("http://example.org").is_loopback


async def remembering(server, **settings):
    """One generation by a client of its own: its ids, and how many earlier tokens its drafter knew."""
    server.welcome = replace(server.welcome, tokenizer="of-the-script")
    async with client(server.url, **settings) as one:
        earlier = one._drafters[0].earlier
        return await ids_of(one), 0 if earlier is None else earlier.num_tokens


async def test_client_keeps_and_reads_no_conversation_unless_asked_to(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    async with ScriptedServer() as server:
        await remembering(server)
        assert not (tmp_path / "history").exists()
        await remembering(server, remember=True)
        kept = {path.name: path.read_bytes() for path in (tmp_path / "history").iterdir()}
        assert len(kept) == 2, "the history and its lock"
        assert await remembering(server) == (server.target.greedy(PROMPT, 40), 0)
        assert {path.name: path.read_bytes() for path in (tmp_path / "history").iterdir()} == kept


async def test_remembered_conversation_is_known_to_the_next_client_and_changes_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    async with ScriptedServer() as server, ScriptedServer() as another:
        expected = server.target.greedy(PROMPT, 40)
        assert await remembering(server, remember=True) == (expected, 0)
        assert await remembering(server, remember=True) == (expected, len(PROMPT) + 40)
        assert await remembering(another, remember=True) == (expected, 0), (
            "nothing goes to a server that did not see it"
        )
        assert forget() == 2
        assert await remembering(server, remember=True) == (expected, 0)


async def test_conversation_is_known_to_the_same_client_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    async with ScriptedServer() as server:
        server.welcome = replace(server.welcome, tokenizer="of-the-script")
        async with client(server.url, remember=True) as one:
            for length in (20, 30):
                await ids_of(one, max_tokens=length)
                await asyncio.wrap_future(one._pool.submit(int))
                assert one._drafters[0].earlier.num_tokens == len(PROMPT) + length


async def test_folder_that_cannot_be_written_costs_a_warning_and_no_answer(monkeypatch, tmp_path, caplog):
    (tmp_path / "history").write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    async with ScriptedServer() as server:
        ids, _ = await remembering(server, remember=True)
        assert ids == server.target.greedy(PROMPT, 40)
    assert "not remembered" in caplog.text


async def test_ids_of_an_unknown_tokenizer_are_not_remembered(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    async with ScriptedServer() as server, client(server.url, remember=True) as one:
        await ids_of(one)
    assert "nothing is remembered" in caplog.text
    assert not (tmp_path / "history").exists()


def test_remembering_is_off_by_default_and_has_an_environment_twin(monkeypatch):
    assert make_settings().remember is False
    monkeypatch.setenv("PACELINE_REMEMBER", "1")
    assert make_settings().remember is True


async def test_drafts_of_other_models_are_named_once_and_the_text_is_written_without_them(
    monkeypatch, tmp_path, caplog
):
    """U033."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    manifest = Manifest("another", TargetEntry("another", "f" * 64, 32), "t" * 64, (), {}, "Apache-2.0")
    (tmp_path / "drafts" / "another").mkdir(parents=True)
    save_manifest(tmp_path / "drafts" / "another", manifest)
    async with ScriptedServer() as server:
        server.welcome = replace(server.welcome, tokenizer="of-the-script")
        async with client(server.url, drafter="auto") as one:
            assert one.drafter_names == ("ngram",)
            for _ in range(2):
                assert await ids_of(one) == server.target.greedy(PROMPT, 40)
        assert caplog.text.count("no draft model for 'scripted' here, only for another") == 1


@pytest.mark.parametrize("context", [3, 20])
async def test_text_goes_on_past_the_drafts_context_and_the_drafter_that_stopped_is_named(context):
    """U087."""
    async with ScriptedServer() as server, client(server.url) as one:
        one._drafters[0].max_context = context
        completion = await one.complete(PROMPT, SamplingParams(max_tokens=40))
        assert list(completion.token_ids) == server.target.greedy(PROMPT, 40)
        assert f"ngram stopped at its context of {context} tokens" in completion.explanation
        one._drafters[0].max_context = 1000
        assert "stopped" not in (await one.complete(PROMPT, SamplingParams(max_tokens=40))).explanation

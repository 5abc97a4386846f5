"""What stands in front of the routes, and the routes for probes, metrics and drafts."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from paceline.models.manifest import (
    DrafterEntry,
    Manifest,
    TargetEntry,
    describe_files,
    save_manifest,
)
from paceline.server import serving
from paceline.server.serving import bind
from paceline.server.settings import make_settings
from paceline.shared.errors import UsageError

KEY = "correct-horse-battery"
BODY = {"prompt": "SECRETMARKER", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}\n", encoding="utf-8")
    return str(file)


async def status_of(server: Any, headers: dict[str, str]) -> int:
    """Status of a websocket upgrade: 101, or the refusal's."""
    try:
        async with server.connect(additional_headers=headers):
            return 101
    except websockets.InvalidStatus as error:
        return int(error.response.status_code)


async def test_keys_guard_http_and_websocket_before_anything_else(serve: Any, key_file: str) -> None:
    async with serve(api_key_file=key_file) as server, server.http() as client:
        for header, status in (({}, 401), ({"Authorization": "Bearer wrong-wrong"}, 401)):
            for path in ("/v1/models", "/metrics", "/v1/drafts", "/nope"):
                response = await client.get(path, headers=header)
                assert response.status_code == status, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "unauthorized"
            assert await status_of(server, header) == status
        good = {"Authorization": f"Bearer {KEY}"}
        assert (await client.get("/v1/models", headers=good)).status_code == 200
        assert await status_of(server, good) == 101
        for path in ("/livez", "/readyz", "/health"):
            assert (await client.get(path)).status_code == 200


async def test_other_hosts_and_origins_are_refused_on_http_and_websocket(serve: Any) -> None:
    """U071."""
    async with serve() as server, server.http() as client:
        assert (await client.get("/v1/models", headers={"Host": "example.com"})).status_code == 403
        assert (await client.get("/livez", headers={"Host": "example.com"})).status_code == 403
        evil = {"Origin": "https://evil.example"}
        assert (await client.get("/v1/models", headers=evil)).status_code == 403
        assert await status_of(server, evil) == 403
        own = {"Origin": server.url}
        assert await status_of(server, own) == 101
        assert await status_of(server, {}) == 101


async def test_cors_is_opened_by_the_operator(serve: Any) -> None:
    page = {"Origin": "https://app.example"}
    async with serve(cors_origins="https://app.example,localhost") as server, server.http() as client:
        asking = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        response = await client.options("/v1/completions", headers=asking)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        response = await client.post("/v1/completions", json=BODY, headers=page)
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert await status_of(server, page) == 101
        assert (await client.get("/v1/models", headers={"Origin": "http://localhost:3000"})).status_code == 200
        assert (await client.get("/v1/models", headers={"Origin": "https://evil.example"})).status_code == 403


async def test_refused_websocket_is_no_fault_in_the_log(
    serve: Any, key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(api_key_file=key_file) as server:
        assert await status_of(server, {}) == 401
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_logs_hold_no_prompt_no_output_and_no_key(
    serve: Any, key_file: str, caplog: pytest.LogCaptureFixture, byte_text: Any
) -> None:
    """U074."""
    caplog.set_level(logging.DEBUG)
    async with serve(api_key_file=key_file) as server, server.http() as client:
        answer = await client.post(
            "/v1/completions", json={**BODY, "max_tokens": 30}, headers={"Authorization": f"Bearer {KEY}"}
        )
        text = answer.json()["choices"][0]["text"]
        await client.get("/v1/models", headers={"Authorization": "Bearer SECRETMARKER-key"})
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "SECRETMARKER" not in logged
    assert KEY not in logged
    assert text not in logged


async def test_metrics_count_what_happened(serve: Any) -> None:
    async with serve() as server, server.http() as client:
        await client.post("/v1/completions", json={**BODY, "max_tokens": 7})
        lines = dict(
            line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")
        )
        assert float(lines["paceline_generation_tokens_total"]) == 7
        assert float(lines["paceline_prompt_tokens_total"]) == 12
        assert float(lines["paceline_requests_running"]) == 0
        assert float(lines["paceline_kv_blocks_used"]) == 0
        assert float(lines["paceline_requests_finished_total"]) == 1
        assert float(lines["paceline_ready"]) == 1


async def test_unknown_routes_and_methods_have_openais_shape(serve: Any) -> None:
    async with serve() as server, server.http() as client:
        for method, path, status in (("GET", "/v1/nope", 404), ("GET", "/v1/completions", 405), ("GET", "/docs", 404)):
            response = await client.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_request_id_is_echoed_if_it_is_harmless(serve: Any) -> None:
    async with serve() as server, server.http() as client:
        response = await client.get("/livez", headers={"x-request-id": "abc-123"})
        assert response.headers["x-request-id"] == "abc-123"
        response = await client.get("/livez", headers={"x-request-id": "a" * 500})
        assert response.headers["x-request-id"].startswith("req-")


async def test_slow_headers_are_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """U072: a byte now and then does not hold a connection."""
    monkeypatch.setattr(serving, "HEADER_S", 0.3)
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        began = time.monotonic()
        writer.write(b"GET /livez HTTP/1.1\r\nHost: local")
        await writer.drain()
        for _ in range(100):
            try:
                writer.write(b"x")
                await writer.drain()
            except ConnectionError:
                break
            if reader.at_eof():
                break
            await asyncio.sleep(0.05)
        assert time.monotonic() - began < 4
        writer.close()
        async with server.http() as client:
            assert (await client.get("/livez")).status_code == 200


async def test_headers_that_are_too_long_are_refused(serve: Any) -> None:
    async with serve() as server, server.http() as client:
        try:
            response = await client.get("/livez", headers={"x-big": "a" * 1_000_000})
        except httpx.TransportError:
            pass  # the server hung up while the header was still on its way
        else:
            assert response.status_code in {400, 431}
        assert (await client.get("/livez")).status_code == 200


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "ssm-0.onnx").write_bytes(bytes(range(256)) * 8)
    (folder / "secret.txt").write_text("not listed", encoding="utf-8")
    files = describe_files(folder, ["ssm-0.onnx"])
    drafter = DrafterEntry("ssm-0", "ssm-0.onnx", 1, 1, 8, 16, 258, 128, 8)
    target = TargetEntry("scripted", "fingerprint", 258)
    save_manifest(folder, Manifest("tiny", target, "0" * 64, (drafter,), files, "Apache-2.0"))
    return folder


async def test_drafts_are_listed_and_served_by_hash_with_ranges(serve: Any, bundle: Path) -> None:
    data = (bundle / "ssm-0.onnx").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    async with serve(draft=[str(bundle)]) as server, server.http() as client:
        listing = (await client.get("/v1/drafts")).json()["data"]
        assert listing[0]["name"] == "tiny"
        assert (await client.get(listing[0]["manifest"])).json()["name"] == "tiny"
        whole = await client.get("/v1/drafts/tiny/ssm-0.onnx")
        assert whole.content == data
        assert whole.headers["etag"] == f'"{digest}"'
        part = await client.get("/v1/drafts/tiny/ssm-0.onnx", headers={"Range": "bytes=2000-"})
        assert (part.status_code, part.content) == (206, data[2000:])
        known = await client.get("/v1/drafts/tiny/ssm-0.onnx", headers={"If-None-Match": f'"{digest}"'})
        assert (known.status_code, known.content) == (304, b"")
        stale = {"Range": "bytes=10-", "If-Range": '"other"'}
        assert (await client.get("/v1/drafts/tiny/ssm-0.onnx", headers=stale)).status_code == 200
        for path in ("tiny/secret.txt", "tiny/..%2Fkeys", "other/ssm-0.onnx", "tiny/%2Fetc%2Fpasswd"):
            assert (await client.get(f"/v1/drafts/{path}")).status_code == 404


def test_port_in_use_is_one_sentence() -> None:
    listener = bind(make_settings(port=0))
    listener.listen()
    port = listener.getsockname()[1]
    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
        bind(make_settings(port=port))
    listener.close()


def test_settings_take_units_lists_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_QUEUE", "7")
    monkeypatch.setenv("PACELINE_CORS_ORIGINS", "https://a.example, localhost")
    settings = make_settings(kv_memory="1.5GiB", patience="auto", max_running=3)
    assert settings.kv_memory == 3 << 29
    assert settings.max_queue == 7
    assert settings.cors_origins == ("https://a.example", "localhost")
    assert settings.patience is None
    assert make_settings(patience="0").patience == 0.0
    for wrong in ({"port": 70_000}, {"kv_memory": "lots"}, {"patience": "soon"}, {"max_running": 0}):
        with pytest.raises(UsageError, match="expected a valid --"):
            make_settings(**wrong)

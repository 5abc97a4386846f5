"""Draft bundles: found, pulled from a real drafts route, resumed, verified, refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
import uvicorn
from fastapi import FastAPI

from paceline.client.address import parse_address
from paceline.client.bundles import find_local_bundle, list_remote, pull_bundle, pull_manifest
from paceline.client.drafting.choice import choose_drafters, named_bundle
from paceline.models.catalogue import bundle_folder
from paceline.models.manifest import Manifest, TargetEntry, describe_files, save_manifest
from paceline.server.drafts import DraftShelf, make_drafts_router, own_bundle
from paceline.shared.cli import main
from paceline.shared.errors import BundleError, LinkError, ModelError, ParameterError
from paceline.shared.messages import Limits, StepTime, Welcome

PAYLOAD = bytes(range(256)) * 4000


def welcome(**changes):
    fields = {"model": "toy", "tokenizer": "t" * 64, "fingerprint": "f" * 64, **changes}
    return Welcome(
        1, fields["model"], fields["tokenizer"], 32, (), None, Limits(), StepTime(0.1, 0.0), fields["fingerprint"]
    )


def make_bundle(folder):
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(PAYLOAD)
    files = describe_files(folder, ["weights.bin"])
    manifest = Manifest("toy", TargetEntry("toy", "f" * 64, 32), "t" * 64, (), files, "Apache-2.0")
    save_manifest(folder, manifest)
    return manifest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server(tmp_path, cache):
    """A drafts route on loopback, in a thread."""
    make_bundle(tmp_path / "shelf" / "toy")
    app = FastAPI()
    app.include_router(make_drafts_router(DraftShelf([str(tmp_path / "shelf" / "toy")])))
    runner = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve()), daemon=True)
    thread.start()
    while not runner.started:
        thread.join(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    yield parse_address(f"http://127.0.0.1:{port}")
    runner.should_exit = True
    thread.join()


async def test_bundle_is_pulled_verified_and_then_found_here(server):
    assert find_local_bundle(welcome()) is None
    seen = []
    bundle = await pull_bundle(server, welcome(), on_progress=seen.append)
    assert (bundle.folder / "weights.bin").read_bytes() == PAYLOAD
    assert seen[-1].num_bytes == seen[-1].total_bytes == len(PAYLOAD)
    assert find_local_bundle(welcome()).folder == bundle.folder
    assert [manifest.name for manifest in await list_remote(server)] == ["toy"]


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
async def test_damaged_bundle_here_is_left_out_aloud_and_pulled_anew(server, caplog, damage):
    folder = (await pull_bundle(server, welcome())).folder
    weights, manifest = folder / "weights.bin", folder / "manifest.json"
    if damage == "cut":
        weights.write_bytes(PAYLOAD[:1000])
    elif damage == "gone":
        weights.unlink()
    else:
        manifest.write_text("{", encoding="utf-8")
    assert find_local_bundle(welcome()) is None
    assert "leaving out the draft bundle toy: " in caplog.text
    assert (await pull_bundle(server, welcome())).folder == folder
    assert find_local_bundle(welcome()).folder == folder


def test_server_that_is_told_of_no_bundle_offers_the_one_built_for_its_target(cache, caplog):
    assert own_bundle("toy") == ()
    make_bundle(bundle_folder("toy"))
    for model in ("toy", "./models/toy", "someone/toy"):
        assert [entry["name"] for entry in DraftShelf(own_bundle(model)).listing()] == ["toy"]
    assert not caplog.text
    (bundle_folder("toy") / "manifest.json").write_text("{", encoding="utf-8")
    assert own_bundle("toy") == ()
    assert "no draft is offered" in caplog.text


async def test_interrupted_pull_goes_on_where_it_stopped(server):
    partial = bundle_folder("toy").with_name("toy.partial")
    partial.mkdir(parents=True)
    (partial / "weights.bin").write_bytes(PAYLOAD[:700_000])
    seen = []
    await pull_bundle(server, welcome(), on_progress=seen.append)
    assert seen[0].num_bytes > 700_000


async def test_damaged_rest_is_refused_and_the_next_pull_starts_afresh(server):
    partial = bundle_folder("toy").with_name("toy.partial")
    partial.mkdir(parents=True)
    (partial / "weights.bin").write_bytes(b"x" * 1000)
    with pytest.raises(BundleError, match="sha-256"):
        await pull_bundle(server, welcome())
    assert find_local_bundle(welcome()) is None
    assert await pull_bundle(server, welcome()) is not None


async def test_bundle_for_another_target_is_not_offered_and_no_server_is_one_sentence(server):
    assert await pull_bundle(server, welcome(fingerprint="0" * 64)) is None
    with pytest.raises(LinkError, match="cannot read"):
        await pull_bundle(parse_address("http://127.0.0.1:9"), welcome())


def test_named_bundle_of_another_target_is_refused_with_both_names(cache, tmp_path):
    make_bundle(tmp_path / "mine")
    with pytest.raises(BundleError, match=r"'toy'.*'other'"):
        choose_drafters(str(tmp_path / "mine"), welcome(model="other", tokenizer="0" * 64), lambda: None, None)
    with pytest.raises(ParameterError, match="nosuch"):
        named_bundle("nosuch")
    with pytest.raises(ModelError, match="no draft model for 'toy'"):
        choose_drafters("ssm", welcome(), lambda: None, None)


@pytest.mark.parametrize(
    ("wanted", "names"), [("none", []), ("ngram", ["ngram"]), ("wrong", ["wrong"]), ("auto", ["ngram"])]
)
def test_drafters_are_chosen_by_name(cache, wanted, names):
    assert [drafter.name for drafter in choose_drafters(wanted, welcome(), lambda: None, None)] == names


async def test_bundles_are_pulled_by_name_whatever_their_target(server):
    (manifest,) = await list_remote(server)
    bundle = await pull_manifest(server, manifest)
    assert (bundle.folder / "weights.bin").read_bytes() == PAYLOAD


async def test_command_pulls_everything_and_refuses_unknown_names(server, capsys):
    assert await asyncio.to_thread(main, ["models", "pull", server.base]) == 0
    assert str(bundle_folder("toy")) in capsys.readouterr().out.replace("\n", "")
    assert await asyncio.to_thread(main, ["models", "pull", server.base, "--name", "other"]) == 2
    assert "expected one of toy" in capsys.readouterr().err

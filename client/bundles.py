"""Draft bundles: the one on this machine that fits a server's target, or the one that the server offers.

A server lists its bundles at ``/v1/drafts`` and serves their files at ``/v1/drafts/NAME/FILE``, with range requests.
A pull writes into a folder beside the final one, goes on where an interrupted pull stopped, checks size and sha-256 of
every file, and appears under its final name only when it is whole. Nothing pulled is ever executed or unpickled.

Not here: what is in a bundle (``paceline.models.manifest``), loading a draft model (``drafting``).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from paceline.client.address import ServerAddress
from paceline.client.drafting.choice import Bundle
from paceline.models.catalogue import bundle_folder, ensure_private, list_bundles, target_folder
from paceline.models.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    check_files,
    load_manifest,
    save_manifest,
    verify_bundle,
)
from paceline.models.store import sha256_file
from paceline.shared.errors import AuthError, BundleError, LinkError, PacelineError
from paceline.shared.messages import Welcome

_LOG = logging.getLogger("paceline.client")
DRAFTS_PATH = "/v1/drafts"
_TIMEOUT_S = 30.0
_MAX_LISTING_BYTES = 1 << 20
_MAX_BUNDLE_BYTES = 16 << 30
_CHUNK_BYTES = 1 << 18
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is, in bytes of one file."""

    file: str
    num_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


def fits(manifest: Manifest, welcome: Welcome) -> bool:
    """Whether a bundle was made for the target that a server has; one that says nothing of itself has no bundle."""
    if welcome.tokenizer and manifest.tokenizer_hash != welcome.tokenizer:
        return False
    if welcome.fingerprint:
        return manifest.target.fingerprint == welcome.fingerprint
    return bool(welcome.tokenizer)


def find_local_bundle(welcome: Welcome) -> Bundle | None:
    """The bundle of this machine that fits, the one named like the model first. Broken ones are passed over, aloud."""
    names = sorted(list_bundles(), key=lambda name: (name != welcome.model, name))
    for name in names:
        try:
            manifest = load_manifest(bundle_folder(name))
            if not fits(manifest, welcome):
                continue
            check_files(bundle_folder(name), manifest, reads=False)  # a pull and `models build` read them
        except BundleError as error:
            _LOG.warning("leaving out the draft bundle %s: %s", name, error)
            continue
        return Bundle(bundle_folder(name), manifest)
    return None


def find_tokenizer(welcome: Welcome) -> Path | None:
    """The folder of a target of that name on this machine, if it has a tokenizer."""
    folder = target_folder(welcome.model)
    return folder if (folder / TOKENIZER_NAME).is_file() else None


def _client(address: ServerAddress, api_key: str | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=address.base, headers=headers, timeout=_TIMEOUT_S, trust_env=not address.is_loopback
    )


async def list_remote(address: ServerAddress, api_key: str | None = None) -> tuple[Manifest, ...]:
    """The bundles that a server offers. Raises ``LinkError`` or ``BundleError``."""
    async with _client(address, api_key) as client:
        return await _list(client, address)


async def _list(client: httpx.AsyncClient, address: ServerAddress) -> tuple[Manifest, ...]:
    values = await _get_json(client, DRAFTS_PATH)
    entries = values.get("data") if isinstance(values, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BundleError(f"expected a list of drafts from {address.base}, got {type(values).__name__}")
    names = [str(entry.get("name")) for entry in entries]
    return tuple([Manifest.from_json(await _get_json(client, _file_path(name, MANIFEST_NAME))) for name in names])


def _file_path(bundle: str, file: str) -> str:
    return f"{DRAFTS_PATH}/{quote(bundle, safe='')}/{quote(file, safe='')}"


async def _get_json(client: httpx.AsyncClient, path: str) -> Any:
    try:
        response = await client.get(path)
        response.raise_for_status()
        return response.json() if len(response.content) <= _MAX_LISTING_BYTES else None
    except httpx.HTTPStatusError as error:
        raise _refusal(f"{client.base_url}{path}", error.response.status_code) from error
    except (httpx.HTTPError, ValueError) as error:
        raise LinkError(f"cannot read {path} from {client.base_url}: {error}") from error


def _refusal(url: str, status: int) -> PacelineError:
    if status == 401:
        return AuthError(f"{url} refused the API key (HTTP 401); set --api-key or PACELINE_API_KEY")
    return LinkError(f"{url} answered HTTP {status}")


async def pull_bundle(
    address: ServerAddress,
    welcome: Welcome,
    api_key: str | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> Bundle | None:
    """The server's own bundle for its target, fetched into the user's cache; None if it offers none that fits.

    Raises ``LinkError`` if the transfer breaks (call again to go on), ``BundleError`` for files that are not what the
    manifest says.
    """
    async with _client(address, api_key) as client:
        manifest = next((entry for entry in await _list(client, address) if fits(entry, welcome)), None)
        return None if manifest is None else await _pull(client, manifest, on_progress)


async def pull_manifest(
    address: ServerAddress, manifest: Manifest, api_key: str | None = None, *, on_progress: OnProgress | None = None
) -> Bundle:
    """One of the bundles that ``list_remote`` named, whatever its target. Raises as ``pull_bundle``."""
    async with _client(address, api_key) as client:
        return await _pull(client, manifest, on_progress)


async def _pull(client: httpx.AsyncClient, manifest: Manifest, on_progress: OnProgress | None) -> Bundle:
    if sum(entry.bytes for entry in manifest.files.values()) > _MAX_BUNDLE_BYTES:
        raise BundleError(f"expected a bundle of at most {_MAX_BUNDLE_BYTES >> 30} GiB, got a larger one")
    if not _SAFE_NAME.fullmatch(manifest.name):
        raise BundleError(f"expected a plain bundle name, got {manifest.name!r}")
    final = bundle_folder(manifest.name)
    partial = ensure_private(final.with_name(final.name + ".partial"))
    for name, entry in manifest.files.items():
        await _fetch(client, _file_path(manifest.name, name), partial / name, entry, on_progress)
    save_manifest(partial, manifest)
    verify_bundle(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return Bundle(final, manifest)


async def _fetch(
    client: httpx.AsyncClient, url: str, path: Path, entry: FileEntry, on_progress: OnProgress | None
) -> None:
    """One file, from where an earlier attempt stopped."""
    have = await asyncio.to_thread(_usable_bytes, path, entry)
    if have < entry.bytes or not entry.bytes:
        await _download(client, url, path, entry, have, on_progress)
    await asyncio.to_thread(_check, path, entry)


async def _download(
    client: httpx.AsyncClient, url: str, path: Path, entry: FileEntry, have: int, on_progress: OnProgress | None
) -> None:
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        async with client.stream("GET", url, headers=headers) as response:
            response.raise_for_status()
            resumes = have > 0 and response.status_code == httpx.codes.PARTIAL_CONTENT
            count = have if resumes else 0
            with path.open("ab" if resumes else "wb") as file:
                async for data in response.aiter_bytes(_CHUNK_BYTES):
                    count += len(data)
                    if count > entry.bytes:
                        raise BundleError(f"expected {entry.bytes} bytes of {path.name}, got more")
                    file.write(data)
                    if on_progress is not None:
                        on_progress(Progress(path.name, count, entry.bytes))
    except httpx.HTTPStatusError as error:
        raise _refusal(f"{client.base_url}{url}", error.response.status_code) from error
    except httpx.HTTPError as error:
        raise LinkError(f"the pull of {path.name} broke off, pull again to go on: {error}") from error


def _usable_bytes(path: Path, entry: FileEntry) -> int:
    """How much of a file an earlier attempt left."""
    have = path.stat().st_size if path.is_file() else 0
    return have if have <= entry.bytes else 0


def _check(path: Path, entry: FileEntry) -> None:
    if path.stat().st_size != entry.bytes:
        raise LinkError(f"the pull of {path.name} broke off, pull again to go on")
    if sha256_file(path) != entry.sha256:
        path.unlink()
        raise BundleError(f"{path.name} arrived with another sha-256 than its manifest says: pull again")

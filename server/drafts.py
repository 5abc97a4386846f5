"""``/v1/drafts``: the draft bundles that go with this server's target, for clients to pull.

A file is named by what its manifest says of it: the sha-256 is its ETag, so a client that has it asks for nothing,
and a broken download goes on with a range. Only files that a manifest lists are ever opened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from paceline.models.catalogue import bundle_folder, find_bundle
from paceline.models.manifest import MANIFEST_NAME, Manifest, load_manifest
from paceline.models.store import sha256_file
from paceline.shared.errors import BundleError, ModelError

log = logging.getLogger("paceline.server")


def own_bundle(model: str) -> tuple[str, ...]:
    """The bundle that the cache holds under a target's name, for a server that is told of none; it may be none."""
    folder = bundle_folder(Path(model).name)
    if not (folder / MANIFEST_NAME).is_file():
        return ()
    try:
        load_manifest(folder)
    except BundleError as error:
        log.warning("no draft is offered, see --draft: %s", error)
        return ()
    return (str(folder),)


class DraftShelf:
    """The bundles on offer, by name. Manifests and the manifest files' own hashes are read once, at start."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: of built bundles, or folders. Raises ``ModelError`` or ``BundleError``."""
        self._folders: dict[str, Path] = {}
        self._manifests: dict[str, Manifest] = {}
        self._digests: dict[tuple[str, str], str] = {}
        for name in names:
            folder = find_bundle(name)
            manifest = load_manifest(folder)
            self._folders[manifest.name] = folder
            self._manifests[manifest.name] = manifest
            self._digests[manifest.name, MANIFEST_NAME] = sha256_file(folder / MANIFEST_NAME)
            for file, entry in manifest.files.items():
                self._digests[manifest.name, file] = entry.sha256

    def listing(self) -> list[dict[str, object]]:
        """For each bundle its name, what it is for, and its manifest's address."""
        return [
            {
                "name": name,
                "target": manifest.target.name,
                "fingerprint": manifest.target.fingerprint,
                "tokenizer": manifest.tokenizer_hash,
                "manifest": f"/v1/drafts/{name}/{MANIFEST_NAME}",
                "bytes": sum(entry.bytes for entry in manifest.files.values()),
            }
            for name, manifest in self._manifests.items()
        ]

    def find(self, bundle: str, file: str) -> tuple[Path, str]:
        """A listed file's path and sha-256. Raises ``ModelError``."""
        digest = self._digests.get((bundle, file))
        if digest is None:
            raise ModelError(f"expected a draft bundle and one of its files, got {bundle!r} and {file!r}")
        return self._folders[bundle] / file, digest


def make_drafts_router(shelf: DraftShelf) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/drafts")
    async def list_drafts() -> Response:
        return JSONResponse({"object": "list", "data": shelf.listing()})

    @router.api_route("/v1/drafts/{bundle}/{file}", methods=["GET", "HEAD"])
    async def get_draft(bundle: str, file: str, request: Request) -> Response:
        path, digest = shelf.find(bundle, file)
        headers = {"etag": f'"{digest}"', "cache-control": "public, max-age=0, must-revalidate"}
        wanted = [
            tag.strip().removeprefix("W/").strip('"') for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if digest in wanted or "*" in wanted:
            return Response(status_code=304, headers=headers)
        return FileResponse(path, headers=headers)

    return router

"""Pulls draft bundles from a server into the cache, by name. The transfer itself is the client's.

Not for: the bundle that a client fetches by itself when it connects (`paceline.client.bundles`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from paceline.shared.errors import BundleError

OnBytes = Callable[[str, str, int, int], None]


def pull_bundles(
    server: str,
    name: str | None = None,
    api_key: str | None = None,
    on_bytes: OnBytes = lambda bundle, file, done, of: None,
) -> list[Path]:
    """Folders of the server's bundles, or of the one called `name`.

    on_bytes(bundle, file, bytes done, of): called as bytes arrive. Raises: LinkError when the transfer breaks (call
    again to go on), BundleError for a name that the server does not offer or files that are not what they should be.
    """
    return asyncio.run(_pull(server, name, api_key, on_bytes))


async def _pull(server: str, name: str | None, api_key: str | None, on_bytes: OnBytes) -> list[Path]:
    from paceline.client.address import parse_address
    from paceline.client.bundles import Progress, list_remote, pull_manifest

    address = parse_address(server)
    offered = {manifest.name: manifest for manifest in await list_remote(address, api_key)}
    if not offered:
        raise BundleError(f"{address.base} offers no draft bundle")
    if name is not None and name not in offered:
        raise BundleError(f"{address.base} offers no draft bundle {name!r}, expected one of {', '.join(offered)}")
    folders = []
    for bundle in offered if name is None else [name]:

        def on_progress(now: Progress, bundle: str = bundle) -> None:
            on_bytes(bundle, now.file, now.num_bytes, now.total_bytes)

        made = await pull_manifest(address, offered[bundle], api_key, on_progress=on_progress)
        folders.append(made.folder)
    return folders

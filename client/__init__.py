"""The client: drafts on this machine, verifies on a server. ``Client`` is the way in.

It is imported when first asked for, so that the sans-IO parts need numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.client.api import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from paceline.client.api import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

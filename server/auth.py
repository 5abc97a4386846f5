"""Who may come in: API keys, and the Host and Origin headers that tell a browser's page from a program.

Everything is decided before a websocket is accepted and before a body is read. Keys come from a file, one ``name:key``
a line; only the name is ever logged. Not here: limits on what a caller may do once inside.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.server.settings import LOOPBACK
from paceline.shared.errors import AuthError, UsageError

MIN_KEY_LEN = 8


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """name -> digest of its key. Empty: everybody may come in."""

    digests: Mapping[str, bytes]

    @classmethod
    def load(cls, path: Path | None) -> KeyRing:
        """Reads ``name:key`` lines; empty lines and those that start with # are skipped.

        Raises ``UsageError`` for a file that cannot be read, has no key, or a line that is not ``name:key``. No message
        holds any part of a key.
        """
        if path is None:
            return cls({})
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not utf-8"
            raise UsageError(f"cannot read --api-key-file {path}: {reason}") from None
        digests: dict[str, bytes] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, _, key = (part.strip() for part in line.partition(":"))
            if not name or len(key) < MIN_KEY_LEN or name in digests:
                wanted = f"name:key with a new name and a key of at least {MIN_KEY_LEN} characters"
                raise UsageError(f"expected {wanted} on line {number} of {path}")
            digests[name] = _digest(key)
        if not digests:
            raise UsageError(f"expected at least one name:key line in {path}, got none")
        return cls(digests)

    def check(self, authorization: str | None) -> str:
        """The caller's name for an ``Authorization`` header, or "" where no keys are asked for.

        Every key is compared in constant time. Raises ``AuthError``.
        """
        if not self.digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthError("expected an Authorization header with a bearer key, got none")
        given = _digest(key.strip())
        # No early exit: the time taken says nothing about which key was close.
        names = [name for name, digest in self.digests.items() if hmac.compare_digest(given, digest)]
        if not names:
            raise AuthError("expected a known API key, got another")
        return names[0]


@dataclass(frozen=True, slots=True)
class Doorkeeper:
    """Host and Origin checks: against DNS rebinding and against pages of other sites (which send an Origin).

    hosts: names that a Host header may carry; None accepts any. origins: web origins that are let in besides our own;
    ``*`` lets every one in, ``localhost`` those of this machine.
    """

    hosts: frozenset[str] | None
    origins: tuple[str, ...]

    @classmethod
    def of(cls, host: str, allowed_hosts: Sequence[str], origins: Sequence[str]) -> Doorkeeper:
        """A server on loopback answers to loopback names; elsewhere the operator may list names."""
        if "*" in allowed_hosts:
            return cls(None, tuple(origins))
        if host in LOOPBACK or allowed_hosts:
            return cls(frozenset({*LOOPBACK, host, *(name.lower() for name in allowed_hosts)}), tuple(origins))
        return cls(None, tuple(origins))

    def admits_host(self, header: str | None) -> bool:
        """Whether the Host header names this server."""
        if self.hosts is None or header is None:
            return True
        return _without_port(header).lower() in self.hosts

    def admits_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether a request with this Origin may come in. Programs send none; a page of ours sends our own host."""
        if origin is None or "*" in self.origins or origin in self.origins:
            return True
        name = urlsplit(origin).netloc
        if name and host is not None and name.lower() == host.lower():
            return True
        return "localhost" in self.origins and _without_port(name).lower() in LOOPBACK


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]

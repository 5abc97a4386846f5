"""Earlier conversations on this machine, as token ids in one small file, for who asked for it (``remember``).

Off by default. A file belongs to one tokenizer and one set of servers: what was said to a server is proposed to that
server and to no other, and nothing of it goes anywhere except as drafts. Only its owner can read it, it holds at most
so many tokens (the oldest conversations go first), and ``paceline forget`` deletes it.

File: a line with the format, the sha-256 of what follows, then int32 little-endian: conversations, each followed by
``END``. It is replaced as a whole, under a lock that all processes share; a file that is none of ours is left out.
Not here: finding what to propose (``drafting.history_index``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.models.catalogue import cache_dir, ensure_private
from paceline.models.store import write_bytes

_LOG = logging.getLogger("paceline.client")
END = -1
_FORMAT = b"paceline history 1\n"
_DIGEST_BYTES = 32
_SUFFIX = ".tokens"
_MAX_FILE_BYTES = 1 << 26
_LOCK_NAME = ".lock"
_LOCK_TIMEOUT_S = 2.0
_LOCK_RETRY_S = 0.02
_NUM_RECENT = 32
"""Conversations that a new one may go on from."""
_RETOKENIZED = 2
"""Tokens at the end of an earlier turn that may read otherwise when its conversation goes on."""

Tokens = NDArray[np.int32]


def history_folder() -> Path:
    """Where all histories of this user are."""
    return cache_dir() / "history"


class History:
    """The conversations with one set of servers in one tokenizer, oldest first."""

    def __init__(self, tokenizer: str, servers: Sequence[str], max_tokens: int, folder: Path | None = None) -> None:
        """tokenizer: its hash. servers: base URLs. max_tokens: most that the file holds."""
        scope = "\n".join([tokenizer, *sorted(set(servers))])
        self._folder = folder or history_folder()
        self.path = self._folder / (hashlib.sha256(scope.encode()).hexdigest()[:32] + _SUFFIX)
        self._max_tokens = max_tokens
        self._complaint = ""

    def load(self) -> list[Tokens]:
        """What is kept; nothing, with a warning, if the file is damaged."""
        try:
            if not self.path.is_file():
                return []
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"more than {_MAX_FILE_BYTES >> 20} MiB")
            return _bounded(_parse(self.path.read_bytes()), self._max_tokens)
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:  # once, though every conversation that ends reads it again
                self._complaint = str(error)
                _LOG.warning(
                    "leaving out earlier conversations, %s is not a history that can be read: %s", self.path, error
                )
            return []

    def add(self, tokens: Tokens) -> list[Tokens]:
        """Keep one more conversation; returns all that are kept now. One that goes on from an earlier one replaces it.

        Raises: OSError when the folder cannot be written, TimeoutError when another process keeps the lock.
        """
        ensure_private(self._folder)
        with _locked(self._folder):
            kept = _bounded([*_without_beginnings(self.load(), tokens), tokens], self._max_tokens)
            write_bytes(self.path, _bytes(kept), mode=0o600)
        return kept


def forget(folder: Path | None = None) -> int:
    """Delete every history of this user; returns how many there were. Raises: OSError, TimeoutError."""
    folder = folder or history_folder()
    if not folder.is_dir():
        return 0
    with _locked(folder):
        paths = list(folder.glob("*" + _SUFFIX))
        for path in [*paths, *folder.glob("*.part")]:
            path.unlink(missing_ok=True)
    return len(paths)


def _parse(data: bytes) -> list[Tokens]:
    """Raises: ValueError for anything but a whole file of this format."""
    head = len(_FORMAT) + _DIGEST_BYTES
    if not data.startswith(_FORMAT) or len(data) < head or (len(data) - head) % 4:
        raise ValueError("expected another format")
    if hashlib.sha256(data[head:]).digest() != data[len(_FORMAT) : head]:
        raise ValueError("its checksum differs")
    flat = np.frombuffer(data, "<i4", offset=head).astype(np.int32)
    ends = np.flatnonzero(flat == END)
    if len(flat) and (flat.min() < END or not len(ends) or ends[-1] != len(flat) - 1):
        raise ValueError("expected token ids")
    return [part[:-1] for part in np.split(flat, ends + 1)[:-1]]


def _bytes(conversations: Sequence[Tokens]) -> bytes:
    flat = np.concatenate([part for tokens in conversations for part in (tokens, [END])] or [np.zeros(0, np.int32)])
    payload = flat.astype("<i4").tobytes()
    return _FORMAT + hashlib.sha256(payload).digest() + payload


def _bounded(conversations: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    """The latest ones, of the earliest of them the end."""
    kept: list[Tokens] = []
    room = max_tokens
    for tokens in reversed(conversations):
        if room <= 0:
            break
        kept.append(tokens[-room:])
        room -= len(tokens)
    return kept[::-1]


def _without_beginnings(conversations: list[Tokens], tokens: Tokens) -> list[Tokens]:
    """Without those that ``tokens`` goes on from, or repeats."""
    older, recent = conversations[:-_NUM_RECENT], conversations[-_NUM_RECENT:]
    return [*older, *(one for one in recent if not _begins(one, tokens))]


def _begins(earlier: Tokens, tokens: Tokens) -> bool:
    needed = max(1, len(earlier) - _RETOKENIZED)
    return needed <= len(tokens) and np.array_equal(earlier[:needed], tokens[:needed])


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. The lock's file stays: a deleted one would be another one to who waits for it."""
    descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process keeps {folder / _LOCK_NAME}")
            time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

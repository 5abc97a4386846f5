"""Which KV blocks are free, held or cached: reference counts, the prefix cache's index and its LRU order.

Bookkeeping only: no tensors (``pool``) and no generations (they hold lists of block numbers). A block is

    free      nobody holds it and its content means nothing
    held      one or more live generations hold it (a shared prefix is held several times)
    cached    nobody holds it, but its content is published under a hash; evicted least recently used first

A held block may be published too. Published content is never written again: who wants to write takes a copy.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROOT_HASH = b""
"""The hash before a sequence's first block."""

_HEADROOM_PARTS = 8


def chain_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Names a full block by everything that its KV depends on: the block's tokens and all tokens before it."""
    return hashlib.blake2b(parent + np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=16).digest()


class BlockTable:
    """States and reference counts of ``num_blocks`` blocks.

    Allocation prefers the block right after the caller's last one, so that a generation's slots stay contiguous and
    attention can use views; a new run starts where it has the most room to grow.
    """

    def __init__(self, num_blocks: int) -> None:
        self._refs = np.zeros(num_blocks, np.int32)
        self._free = np.ones(num_blocks, np.bool_)
        self._num_free = num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Published blocks that nobody holds."""
        return len(self._unheld)

    @property
    def num_held(self) -> int:
        """Blocks that live generations hold."""
        return len(self._free) - self._num_free - len(self._unheld)

    def free_blocks(self) -> NDArray[np.int64]:
        """int64[num_free], ascending."""
        return np.flatnonzero(self._free)

    def is_writable(self, block: int) -> bool:
        """Whether its only holder may write to it: held once and not published."""
        return bool(self._refs[block] == 1) and block not in self._hash_of

    def find(self, block_hash: bytes) -> int | None:
        """The block that is published under the hash."""
        return self._block_of.get(block_hash)

    def hold(self, block: int) -> None:
        """One more holder of a published block."""
        self._refs[block] += 1
        self._unheld.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Published blocks stay cached; the deepest are evicted first.

        A prefix is only of use as long as all blocks before it are there, so ends age before beginnings.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._unheld[block] = None
                else:
                    self._set_free(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Enters a full block into the prefix cache, unless another block has the same content or it is entered."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def allocate(self, after: int | None, count: int = 1) -> int:
        """A block to write, held once: ``after + 1`` if free, else the start of the roomiest free run.

        count: blocks that the caller will ask for in a row. It has checked that ``num_free + num_cached`` is enough.
        """
        if after is not None and after + 1 < len(self._free) and self._free[after + 1]:
            return self._take(after + 1)
        self._make_headroom(count + len(self._free) // _HEADROOM_PARTS)
        return self._take(self._roomiest_start(count))

    def allocate_run(self, count: int) -> list[int] | None:
        """``count`` consecutive blocks, each held once, or None if no free run is that long."""
        start = self._roomiest_start(count)
        if start + count > len(self._free) or not self._free[start : start + count].all():
            return None
        return [self._take(block) for block in range(start, start + count)]

    def clear_cache(self) -> None:
        """Forgets all published content: blocks that nobody holds become free."""
        while self._unheld:
            self._evict()
        self._hash_of.clear()
        self._block_of.clear()

    def _roomiest_start(self, count: int) -> int:
        """Where a new run of ``count`` begins: in the longest free run, half way in if a held block before it may
        still grow and the second half is enough.
        """
        edges = np.diff(np.concatenate(([0], self._free.view(np.int8), [0])))
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if not len(starts):
            return len(self._free)
        longest = int(np.argmax(ends - starts))
        start, end = int(starts[longest]), int(ends[longest])
        grows_into_it = start > 0 and self._refs[start - 1] > 0
        half = (end - start) // 2
        return start + half if grows_into_it and end - start - half >= count else start

    def _make_headroom(self, wanted: int) -> None:
        """Evicts old content until ``wanted`` blocks are free, as far as there is any.

        Callers want more than they take: block by block would scatter every new run over single gaps.
        """
        while self._num_free < wanted and self._unheld:
            self._evict()

    def _take(self, block: int) -> int:
        self._free[block] = False
        self._num_free -= 1
        self._refs[block] = 1
        return block

    def _evict(self) -> None:
        block, _ = self._unheld.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = True
        self._num_free += 1

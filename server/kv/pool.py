"""The KV pool: one buffer of fixed-size blocks for all generations, with a prefix cache and tree rollback.

Vocabulary, from small to large: a *slot* holds one token's keys and values of every layer; a *block* is ``block_size``
consecutive slots; a generation's *block table* lists its blocks in token order, so that its token i lives in block
``table[i // block_size]``. Behind its committed tokens a generation has a *speculative tail*: the slots where a step
writes the nodes of its tree. ``commit`` keeps the accepted ones; everything else is forgotten by not counting it.

Not here: who runs when (scheduler), how KV is computed and read (attention).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.server.kv.blocks import ROOT_HASH, BlockTable, chain_hash

BLOCK_SIZE = 16
"""Slots in a block of the pools that serve."""


@dataclass(slots=True)
class _Sequence:
    """One live generation: ``length`` tokens have KV; ``hashes`` name its first blocks, those published or found."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    contiguous: bool = True
    hashes: list[bytes] = field(default_factory=list)

    @property
    def last_hash(self) -> bytes:
        """What the next block's hash is chained to."""
        return self.hashes[-1] if self.hashes else ROOT_HASH


class KVPool:
    """Keys and values of all live generations and of the prefix cache.

    data: [num_layers, 2, num_kv_heads, num_slots, head_dim], keys at index 0 and values at 1. Heads come before slots:
    a generation whose blocks are contiguous is then one plain matrix per head. ``num_kv_heads`` counts the heads of
    this process (a tensor-parallel rank has some of them).

    Blocks are allocated ahead of use but their content is undefined until written; attention reads slots below the
    valid length only, so freed blocks may hold anything (``poison_free_blocks`` proves it).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim)
        self.data = _blank(shape, dtype, torch.device(device))
        self._layers = [(layer[0], layer[1]) for layer in self.data]
        self._table = BlockTable(num_blocks)
        self._sequences: dict[int, _Sequence] = {}

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one slot takes in all layers, keys and values."""
        return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        return self.data.nbytes // (self.num_blocks * self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._table.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live generations hold."""
        return self._table.num_held

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds; they make room when it is needed."""
        return self._table.num_cached

    @property
    def num_slots(self) -> int:
        """Slots in all: the longest generation that could ever fit, tail included."""
        return self.num_blocks * self.block_size

    def length(self, sequence: int) -> int:
        """Number of tokens at the front of the generation whose KV is in the pool."""
        return self._sequences[sequence].length

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: two views [num_kv_heads, num_slots, head_dim]."""
        return self._layers[index]

    def open(self, sequence: int, token_ids: NDArray[np.int32]) -> int:
        """Registers a generation and attaches the cached blocks of its longest known prefix.

        token_ids: int32[n], n >= 1, the tokens known so far (prompt and what is committed already). Returns the number
        of leading tokens whose KV was found, at most n - 1: the last one must be computed, for its logits.
        Raises ``ValueError`` if the handle is in use.
        """
        if sequence in self._sequences:
            raise ValueError(f"expected a new sequence handle, got {sequence}, which is in use")
        state = _Sequence()
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block_hash = chain_hash(state.last_hash, token_ids[end - self.block_size : end])
            block = self._table.find(block_hash)
            if block is None:
                break
            self._table.hold(block)
            self._append(state, block)
            state.hashes.append(block_hash)
        state.length = min(len(state.blocks) * self.block_size, len(token_ids) - 1)
        self._sequences[sequence] = state
        return state.length

    def reserve(self, sequence: int, num_slots: int) -> bool:
        """Makes exactly the blocks for ``num_slots`` slots (committed and speculative) belong to the generation.

        Evicts least recently used cached blocks when nothing is free, copies a shared or published block that the next
        step would write (copy-on-write), and gives back blocks beyond the need. False, with nothing changed, if there
        is no room.
        """
        state = self._sequences[sequence]
        needed = -(-max(num_slots, state.length) // self.block_size)
        first_written = state.length // self.block_size
        copies = [i for i in range(first_written, len(state.blocks)) if not self._table.is_writable(state.blocks[i])]
        copies = [i for i in copies if i < needed]
        if max(needed - len(state.blocks), 0) + len(copies) > self._table.num_free + self._table.num_cached:
            return False
        if self._wants_compaction(state, needed) and self._compact(state, needed):
            return True
        if needed < len(state.blocks):
            self._table.release(state.blocks[needed:])
            del state.blocks[needed:]
            state.contiguous = self._is_contiguous(state.blocks)
        for index in copies:
            self._copy_on_write(state, index)
        while len(state.blocks) < needed:
            last = state.blocks[-1] if state.blocks else None
            self._append(state, self._table.allocate(last, needed - len(state.blocks)))
        return True

    def commit(self, sequence: int, base_len: int, rows: Sequence[int]) -> int:
        """Keeps exactly ``rows`` of a step that wrote at slots ``base_len``, ``base_len + 1``, ...

        rows: increasing indices relative to ``base_len``. Row i of the kept ones belongs at slot ``base_len + i``;
        those that are not there already are moved, in one gather for all layers. The length becomes
        ``base_len + len(rows)``; everything behind it is rolled back by that alone. Returns the bytes moved.
        """
        state = self._sequences[sequence]
        if not rows or rows[-1] == len(rows) - 1:
            state.length = base_len + len(rows)
            return 0
        source = np.asarray(rows, np.int64)
        moved = np.flatnonzero(source != np.arange(len(source)))
        if len(moved):
            from_slots = torch.from_numpy(self._slots(state, base_len + source[moved])).to(self.data.device)
            to_slots = torch.from_numpy(self._slots(state, base_len + moved)).to(self.data.device)
            # index_select copies before anything is written, so overlapping moves are safe.
            self.data.index_copy_(3, to_slots, self.data.index_select(3, from_slots))
        state.length = base_len + len(source)
        return len(moved) * self.slot_bytes

    def publish(self, sequence: int, token_ids: NDArray[np.int32]) -> None:
        """Enters full blocks into the prefix cache, up to the delivered boundary.

        token_ids: int32[n], the prompt and the delivered output so far; only tokens that reached the client may be
        named here, so that no rejected or undelivered token is ever found by somebody else.
        """
        state = self._sequences[sequence]
        num_full = min(len(token_ids), state.length) // self.block_size
        for index in range(len(state.hashes), num_full):
            start = index * self.block_size
            state.hashes.append(chain_hash(state.last_hash, token_ids[start : start + self.block_size]))
            self._table.publish(state.blocks[index], state.hashes[-1])

    def free(self, sequence: int) -> None:
        """Ends the generation; its published blocks stay cached until room is needed. Unknown handles are ignored."""
        state = self._sequences.pop(sequence, None)
        if state is not None:
            self._table.release(state.blocks)

    def clear_cache(self) -> None:
        """Empties the prefix cache."""
        self._table.clear_cache()

    def first_slot(self, sequence: int) -> int | None:
        """Where the generation's slots start if they are contiguous, else None."""
        state = self._sequences[sequence]
        return state.blocks[0] * self.block_size if state.blocks and state.contiguous else None

    def slots(self, sequence: int, start: int, stop: int) -> NDArray[np.int64]:
        """int64[stop - start]: the pool slots of the generation's token positions ``start..stop-1``."""
        return self._slots(self._sequences[sequence], np.arange(start, stop, dtype=np.int64))

    def block_table(self, sequence: int) -> list[int]:
        """The generation's blocks in token order."""
        return list(self._sequences[sequence].blocks)

    def poison_free_blocks(self) -> None:
        """Fills every block without content, and every slot behind a generation's length, with NaN (for diagnosis)."""
        offsets = np.arange(self.block_size)
        slots = (self._table.free_blocks()[:, None] * self.block_size + offsets).reshape(-1)
        tails = [
            self._slots(state, np.arange(state.length, len(state.blocks) * self.block_size))
            for state in self._sequences.values()
            if state.blocks and self._table.is_writable(state.blocks[-1])
        ]
        self.data[:, :, :, torch.from_numpy(np.concatenate([slots, *tails])).to(self.data.device)] = float("nan")

    def _slots(self, state: _Sequence, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if state.contiguous and state.blocks:
            return positions + state.blocks[0] * self.block_size
        blocks = np.asarray(state.blocks, np.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _append(self, state: _Sequence, block: int) -> None:
        state.contiguous = state.contiguous and (not state.blocks or block == state.blocks[-1] + 1)
        state.blocks.append(block)

    def _copy_on_write(self, state: _Sequence, index: int) -> None:
        shared = state.blocks[index]
        own = self._table.allocate(state.blocks[index - 1] if index else None)
        size = self.block_size
        self.data[:, :, :, own * size : (own + 1) * size] = self.data[:, :, :, shared * size : (shared + 1) * size]
        state.blocks[index] = own
        self._table.release([shared])
        state.contiguous = self._is_contiguous(state.blocks)
        # The copy is not the published block: what is written into it must be published anew.
        del state.hashes[index:]

    def _wants_compaction(self, state: _Sequence, needed: int) -> bool:
        """On a CPU scattered blocks are gathered in every layer of every step: one move is cheaper if there is room."""
        return self.data.device.type == "cpu" and not state.contiguous and self._table.num_free >= 2 * needed

    def _compact(self, state: _Sequence, needed: int) -> bool:
        """Moves a generation to ``needed`` consecutive blocks of its own; False if no free run is that long."""
        run = self._table.allocate_run(needed)
        if run is None:
            return False
        positions = np.arange(state.length, dtype=np.int64)
        start = run[0] * self.block_size
        source = torch.from_numpy(self._slots(state, positions))
        self.data[:, :, :, start : start + state.length] = self.data.index_select(3, source)
        self._table.release(state.blocks)
        state.blocks, state.contiguous = run, True
        return True

    @staticmethod
    def _is_contiguous(blocks: list[int]) -> bool:
        return all(second == first + 1 for first, second in pairwise(blocks))


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. In main memory the system hands out zero pages as they are first written: a pool costs what is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)

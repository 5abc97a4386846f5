"""A target without a network: next-token logits are a function of the context. For tests, simulations and demos.

Its KV pool is the real one, and what it writes there is the token and the position of each row. The context of every
row is read back from the pool, so a block table, prefix cache or rollback that goes wrong changes the output or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.server.batch import Batch, Segment
from paceline.server.kv.pool import BLOCK_SIZE, KVPool
from paceline.server.target import TargetInfo
from paceline.shared.tree import ANCHOR

NextLogits = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""int32[n], all tokens up to and with the row's own, to float32[vocab_size]."""


class ScriptedTarget:
    """Implements ``paceline.server.target.Target``. Raises ``ValueError`` from ``forward`` where KV is not in place."""

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        max_context: int = 4096,
        num_blocks: int = 1024,
        block_size: int = BLOCK_SIZE,
        name: str = "scripted",
    ) -> None:
        self._next_logits = next_logits
        self._pool = KVPool(num_blocks, block_size, 1, 1, 1, torch.float32, "cpu")
        self._info = TargetInfo(
            name=name,
            vocab_size=vocab_size,
            max_context=max_context,
            bos_token_id=None,
            eos_token_ids=tuple(eos_token_ids),
            dtype="float32",
            device="cpu",
            tokenizer_path=None,
            chat_template_path=None,
            fingerprint=f"{name}-{vocab_size}",
        )
        self.num_rows: list[int] = []
        """Rows of each step so far, for assertions on batches."""

    @property
    def info(self) -> TargetInfo:
        """What the target is."""
        return self._info

    @property
    def pool(self) -> KVPool:
        """Where its KV lives: keys hold token ids, values hold positions."""
        return self._pool

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Target.forward``."""
        self.num_rows.append(batch.num_rows)
        rows = [row for segment in batch.segments for row in self._run(segment)]
        table = np.stack(rows) if rows else np.zeros((0, self._info.vocab_size), np.float32)
        return torch.from_numpy(table.astype(np.float32, copy=False))

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The target's own greedy output, token by token, ended by an end-of-text id: the oracle of the engine."""
        context = list(prompt)
        for _ in range(max_tokens):
            context.append(int(np.argmax(self._next_logits(np.array(context, np.int32)))))
            if context[-1] in self._info.eos_token_ids:
                break
        return context[len(prompt) :]

    def _run(self, segment: Segment) -> list[NDArray[np.float32]]:
        """Writes the segment's rows and returns the logits of the scored ones."""
        start, num_chain = segment.cached_len, len(segment.token_ids)
        chain_end = start + num_chain
        positions = np.concatenate([np.arange(start, chain_end), chain_end - 1 + segment.tree.depths])
        tokens = np.concatenate([segment.token_ids, segment.tree.tokens])
        slots = torch.from_numpy(self._pool.slots(segment.sequence, 0, start + segment.num_rows))
        keys, values = self._pool.layer(0)
        keys[0, slots[start:], 0] = torch.from_numpy(tokens.astype(np.float32))
        values[0, slots[start:], 0] = torch.from_numpy(positions.astype(np.float32))
        if not segment.wants_logits:
            return []
        found = values[0, slots[:chain_end], 0].numpy()
        if not np.array_equal(found, np.arange(chain_end)):
            wrong = int(np.flatnonzero(found != np.arange(chain_end))[0])
            raise ValueError(f"expected position {wrong} at slot {wrong} of sequence {segment.sequence}")
        context = keys[0, slots[:chain_end], 0].numpy().astype(np.int32)
        contexts = [context]
        for token, parent in zip(segment.tree.tokens, segment.tree.parents.tolist(), strict=True):
            base = context if parent == ANCHOR else contexts[parent + 1]
            contexts.append(np.append(base, token))
        return [self._next_logits(one) for one in contexts]


def markov(vocab_size: int, seed: int, *, order: int = 3, spread: float = 2.0) -> NextLogits:
    """Logits that depend on the last ``order`` tokens, by a seeded random table for each of them."""
    tables = np.random.default_rng(seed).normal(0.0, spread, (order, vocab_size, vocab_size)).astype(np.float32)

    def next_logits(context: NDArray[np.int32]) -> NDArray[np.float32]:
        recent = context[::-1][:order]
        logits: NDArray[np.float32] = tables[np.arange(len(recent)), recent].sum(axis=0)
        return logits

    return next_logits


def recital(texts: Sequence[Sequence[int]], vocab_size: int, eos_token_id: int) -> NextLogits:
    """Continues whichever of ``texts`` the context is a prefix of, and ends the text everywhere else."""
    known = [np.array(text, np.int32) for text in texts]

    def next_logits(context: NDArray[np.int32]) -> NDArray[np.float32]:
        length = len(context)
        matching = (text for text in known if len(text) > length and np.array_equal(text[:length], context))
        text = next(matching, None)
        logits = np.zeros(vocab_size, np.float32)
        logits[eos_token_id if text is None else text[length]] = 10.0
        return logits

    return next_logits

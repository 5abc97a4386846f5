"""The target model as the engine sees it: a packed batch in, logits of the scored rows out.

``HFTarget`` wraps a stock ``transformers`` causal language model. Its attention is ours (``attention``), its KV lives
in our pool (``kv``); nothing else of the model is touched. Finding and loading models is ``loading``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from paceline.server.attention.plan import plan_step
from paceline.server.attention.registry import AttentionBackend, PagedStep
from paceline.server.batch import Batch
from paceline.server.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What clients and the scheduler need to know of a target.

    vocab_size: ids that the tokenizer really has; the model's padded rows above them are cut off the logits.
    max_context: positions that the model can address, prompt and output together.
    eos_token_ids: every id that ends a generation (a model may have several).
    dtype, device: as torch spells them, without its prefix (``float32``, ``cuda:0``).
    tokenizer_path, chat_template_path: files of the model's folder, or None where it has none.
    fingerprint: names the weights and the configuration; a draft is made for one target.
    """

    name: str
    vocab_size: int
    max_context: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    tokenizer_path: Path | None
    chat_template_path: Path | None
    fingerprint: str


class Target(Protocol):
    """What the engine steps. Not thread-safe: one thread owns it and its pool."""

    @property
    def info(self) -> TargetInfo:
        """What the target is."""
        ...

    @property
    def pool(self) -> KVPool:
        """Where its KV lives."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs one packed step and writes its KV at each segment's slots ``cached_len..cached_len + num_rows - 1``.

        Room must have been reserved. Returns logits, float[R, vocab_size], on the device: for each segment that wants
        them, in order, the anchor's row and then its nodes' rows.
        """
        ...


class HFTarget:
    """A ``transformers`` model prepared by ``loading``: attention set to ours, geometry known, pool made."""

    def __init__(self, model: PreTrainedModel, info: TargetInfo, pool: KVPool, backend: AttentionBackend) -> None:
        self._model = model
        self._info = info
        self._pool = pool
        self._backend = backend

    @property
    def info(self) -> TargetInfo:
        """What the target is."""
        return self._info

    @property
    def pool(self) -> KVPool:
        """Where its KV lives."""
        return self._pool

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model."""
        return self._model

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Target.forward``. Only scored rows go through the language model head."""
        plan = plan_step(batch, self._pool)
        arguments: dict[str, Any] = {
            "input_ids": plan.input_ids,
            "position_ids": plan.position_ids,
            "use_cache": False,
            "logits_to_keep": plan.scored,
            "paceline_step": PagedStep(self._backend, plan),
        }
        logits: torch.Tensor = self._model(**arguments).logits
        return logits[0, :, : self._info.vocab_size]

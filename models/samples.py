"""Training rows cut from a corpus: documents packed behind one shared prefix, labels in the draft's vocabulary.

A row is `prefix doc doc …`: every document sees the prefix and itself, and its positions go on from the prefix, exactly
as when it stood alone, so the chat template is computed once a row. Rows of an epoch and their order are a pure
function of (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.conversation import KIND_FORCED, KIND_SAMPLED, KIND_USER
from paceline.models.store import read_json
from paceline.shared.errors import ModelError

HELD_OUT_EVERY = 40


@dataclass(frozen=True, slots=True)
class Corpus:
    """All rounds of a corpus end to end (see `corpus`). offsets int64[documents + 1]."""

    prefix: tuple[int, ...]
    tokens: NDArray[np.int32]
    kinds: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]

    @classmethod
    def load(cls, folder: Path, max_rounds: int | None = None) -> Corpus:
        """Raises: ModelError when the folder holds no round."""
        paths = sorted(folder.glob("round-*.npz"))[:max_rounds]
        if not paths:
            raise ModelError(f"{folder} holds no text: let `paceline models distill` write some there first")
        parts: list[dict[str, NDArray[Any]]] = []
        for path in paths:
            with np.load(path, allow_pickle=False) as arrays:
                parts.append({name: arrays[name] for name in arrays.files})
        sizes = [int(part["offsets"][-1]) for part in parts]
        bases = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        offsets = [part["offsets"][:-1] + base for part, base in zip(parts, bases, strict=True)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "offsets"}
        meta = read_json(folder / "corpus.json")
        return cls(prefix=tuple(meta["prefix"]), offsets=np.concatenate([*offsets, [sum(sizes)]]), **joined)

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def is_held_out(self, document: int) -> bool:
        """Every 40th document is kept for measuring; every 4th of a corpus of a few."""
        every = HELD_OUT_EVERY if self.num_documents >= 4 * HELD_OUT_EVERY else 4
        return document % every == every - 1

    def documents(self, held_out: bool) -> list[int]:
        return [index for index in range(self.num_documents) if self.is_held_out(index) == held_out]

    def span(self, document: int) -> slice:
        return slice(int(self.offsets[document]), int(self.offsets[document + 1]))


def rank_vocabulary(
    corpus: Corpus, vocab_size: int, num_kept: int, special_ids: Sequence[int] = (), num_real: int | None = None
) -> NDArray[np.int64]:
    """The `num_kept` token ids to which the target gives most probability over its own text, sorted by id.

    vocab_size: rows of the embedding. num_real: ids that the tokenizer has; padded rows beyond are never kept.
    Ties, unseen ids too, go to the lower id: byte-pair vocabularies are numbered by falling frequency.
    """
    mass = np.zeros(vocab_size)
    weight = np.where(corpus.kinds >= 2, 1.0, 0.3)
    np.add.at(mass, corpus.top_ids.ravel(), (np.exp(corpus.top_logprobs.astype(np.float32)) * weight[:, None]).ravel())
    mass[list(special_ids)] += 1e9
    mass = mass[:num_real]
    order = np.lexsort((np.arange(len(mass)), -mass))
    return np.sort(order[:num_kept]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, positions int64[B, T]; mask additive float32[B, 1, T, T]; and labels for M of the positions.

    at int64[M] indexes the flattened B*T positions; labels int64[M, K] are rows of the draft's head (0 where the mass
    is 0); masses float32[M, K] the target's probabilities; rest float32[M] what its k most likely tokens leave to all
    others; tails int64[M] the row of the token that the target then drew from those others, -1 for none; weights
    float32[M]; sources int64[M], the labelled tokens' places in the corpus.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    at: torch.Tensor
    labels: torch.Tensor
    masses: torch.Tensor
    rest: torch.Tensor
    tails: torch.Tensor
    weights: torch.Tensor
    sources: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})


class Packer:
    """Packs documents into rows of `row_len` tokens and rows into batches.

    emphasis: float32[tokens of the corpus], a factor on every label's weight, None for none.
    """

    def __init__(
        self,
        corpus: Corpus,
        vocabulary: NDArray[np.int64],
        vocab_size: int,
        row_len: int,
        user_weight: float,
        emphasis: NDArray[np.float32] | None = None,
    ) -> None:
        self.corpus, self.row_len, self.user_weight, self.emphasis = corpus, row_len, user_weight, emphasis
        self._inverse = np.full(vocab_size, -1, np.int64)
        self._inverse[vocabulary] = np.arange(len(vocabulary))

    def rows(self, documents: Sequence[int]) -> list[list[int]]:
        """First fit in the order given; a document longer than a row is cut when it is laid out."""
        room = self.row_len - len(self.corpus.prefix)
        rows: list[list[int]] = []
        free: list[int] = []
        open_rows: list[int] = []
        for document in documents:
            span = self.corpus.span(document)
            length = min(span.stop - span.start, room)
            for index in open_rows:
                if free[index] >= length:
                    break
            else:
                rows.append([])
                free.append(room)
                index = len(rows) - 1
                open_rows.append(index)
            rows[index].append(document)
            free[index] -= length
            open_rows = [row for row in open_rows[-24:] if free[row] >= 24]
        return rows

    def epoch(self, seed: int, epoch: int) -> list[list[int]]:
        """All training rows of an epoch, shuffled."""
        rng = np.random.default_rng([seed, epoch])
        rows = self.rows(rng.permutation(self.corpus.documents(held_out=False)).tolist())
        return [rows[index] for index in rng.permutation(len(rows))]

    def batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        num_rows, length, prefix = len(rows), self.row_len, self.corpus.prefix
        ids = np.zeros((num_rows, length), np.int64)
        positions = np.zeros((num_rows, length), np.int64)
        segments = np.full((num_rows, length), -1, np.int64)
        sources, targets = [], []
        for row, documents in enumerate(rows):
            ids[row, : len(prefix)] = prefix
            positions[row, : len(prefix)] = np.arange(len(prefix))
            segments[row, : len(prefix)] = 0
            at = len(prefix)
            for number, document in enumerate(documents, start=1):
                span = self.corpus.span(document)
                end = min(at + span.stop - span.start, length)
                source = np.arange(span.start, span.start + end - at)
                ids[row, at:end] = self.corpus.tokens[source]
                positions[row, at:end] = len(prefix) + np.arange(end - at)
                segments[row, at:end] = number
                # The first token of a document is predicted at the end of the prefix, which only one document can own.
                sources.append(source[1:])
                targets.append(row * length + np.arange(at, end - 1))
                at = end
        source = np.concatenate(sources)
        top_ids, kinds, tokens = self.corpus.top_ids[source], self.corpus.kinds[source], self.corpus.tokens[source]
        labels = self._inverse[top_ids]
        masses = np.exp(self.corpus.top_logprobs[source].astype(np.float32))
        rest = np.maximum(1 - masses.sum(axis=1), 0)
        masses *= labels >= 0
        in_tail = (kinds == KIND_SAMPLED) & ~(top_ids == tokens[:, None]).any(axis=1)
        tails = np.where(in_tail, self._inverse[tokens], -1)
        weights = np.where((kinds == KIND_FORCED) | (kinds == KIND_USER), self.user_weight, 1.0)
        if self.emphasis is not None:
            weights = weights * self.emphasis[source]
        return Batch(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            mask=_mask(segments),
            at=torch.from_numpy(np.concatenate(targets)),
            labels=torch.from_numpy(np.maximum(labels, 0)),
            masses=torch.from_numpy(masses),
            rest=torch.from_numpy(rest),
            tails=torch.from_numpy(tails),
            weights=torch.from_numpy(weights.astype(np.float32)),
            sources=torch.from_numpy(source),
        )


def _mask(segments: NDArray[np.int64]) -> torch.Tensor:
    """Causal within a document, plus the row's prefix (segment 0); padding (-1) sees itself only."""
    segment = torch.from_numpy(segments)
    same = segment[:, :, None] == segment[:, None, :]
    prefix = (segment[:, None, :] == 0) & (segment[:, :, None] >= 0)
    causal = torch.ones(segments.shape[1], segments.shape[1], dtype=torch.bool).tril()
    visible = (same | prefix) & causal
    return torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[:, None]

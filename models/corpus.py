"""The target writes its own training text: prompts, answers, and its top-k log-probabilities at every position.

No data set is needed: from its chat template onward the target completes a user message (sampled, nucleus 0.95), then
answers it (half of the answers greedily, half at temperature 1). A *round* is one static key-value buffer of `num_rows`
rows and `num_slots` slots: every row starts behind the template's shared prefix, all rows write the same slot at every
step, and a row whose document ends starts another one in the slots that are left. A round is a pure function of
(target, settings, round number), so a killed run goes on with the first round that has no file. Not for: training
(`distill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.conversation import (
    KIND_FORCED,
    KIND_GREEDY,
    KIND_SAMPLED,
    KIND_USER,
    ChatFrame,
    CorpusSettings,
    Document,
    chat_frame,
)
from paceline.models.store import read_json, write_arrays, write_json

ATTENTION_NAME = "paceline_corpus"


class RoundCache:
    """Keys and values [rows, kv heads, slots, head dim] per layer, written one shared slot at a time."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.len = 0
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.len

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [rows, kv heads, n, head dim] at `len` and returns views of everything up to there."""
        if layer_idx not in self._buffers:
            shape = (keys.shape[0], keys.shape[1], self.num_slots, keys.shape[3])
            self._buffers[layer_idx] = (keys.new_empty(shape), values.new_empty(shape))
        key_buffer, value_buffer = self._buffers[layer_idx]
        end = self.len + keys.shape[2]
        key_buffer[:, :, self.len : end] = keys
        value_buffer[:, :, self.len : end] = values
        return key_buffer[:, :, :end], value_buffer[:, :, :end]


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention over views of the round's buffer that never copies keys for the query groups.

    query [B, H, n, D]; key, value [B, Hkv, S, D]; attention_mask additive [B, 1, n, S]; returns [B, n, H, D].
    """
    rows, heads, num_new, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    folded = query.reshape(rows * kv_heads, groups * num_new, dim)
    scores = torch.bmm(folded, key.flatten(0, 1).transpose(1, 2)).mul_(scaling)
    if attention_mask is not None:
        scores = scores.view(rows, kv_heads * groups, num_new, length) + attention_mask
    weights = torch.softmax(scores.view(rows * kv_heads, groups * num_new, length), dim=-1)
    mixed = torch.bmm(weights, value.flatten(0, 1))
    return mixed.view(rows, heads, num_new, dim).transpose(1, 2), None


def choose(
    logprobs: torch.Tensor,
    top_logprobs: torch.Tensor,
    top_ids: torch.Tensor,
    kinds: NDArray[np.int64],
    uniforms: NDArray[np.float64],
    nucleus: float,
) -> list[int]:
    """One token a row: argmax (greedy), the nucleus (user), or the whole distribution (sampled), by inverse CDF.

    logprobs float32[B, V]; top_logprobs, top_ids [B, K] in falling order; kinds, uniforms [B].
    """
    masses = top_logprobs.exp().double().cumsum(-1).numpy()
    ids = top_ids.numpy()
    chosen: list[int] = []
    for row, kind in enumerate(kinds):
        cumulative = masses[row]
        if kind == KIND_SAMPLED:
            mark = uniforms[row]
            if mark >= cumulative[-1]:
                rest = logprobs[row].exp().double()
                rest[top_ids[row]] = 0.0
                tail = rest.cumsum(0)
                spot = torch.searchsorted(
                    tail, torch.tensor((mark - cumulative[-1]) / (1 - cumulative[-1]) * float(tail[-1]))
                )
                chosen.append(min(int(spot), len(tail) - 1))
                continue
        elif kind == KIND_USER:
            width = int(np.searchsorted(cumulative, nucleus)) + 1
            mark = uniforms[row] * cumulative[min(width, len(cumulative)) - 1]
        else:
            mark = 0.0
        chosen.append(int(ids[row, min(int(np.searchsorted(cumulative, mark, side="right")), len(cumulative) - 1)]))
    return chosen


class RoundWriter:
    """Writes rounds of text with one loaded target."""

    def __init__(self, model: Any, tokenizer: Any, settings: CorpusSettings) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, grouped_attention)
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.settings = settings
        stops = self.model.generation_config.eos_token_id
        self.frame = chat_frame(
            tokenizer, frozenset(stops if isinstance(stops, list) else [stops] if stops is not None else [])
        )
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def write(self, round_index: int, on_step: Callable[[int, int], None] | None = None) -> dict[str, NDArray[Any]]:
        """One round as flat arrays: tokens, kinds, offsets (documents), top_ids, top_logprobs.

        Entry i of top_* is the target's distribution for the token at i, given the document before it.
        """
        s, frame = self.settings, self.frame
        rng = np.random.default_rng([s.seed, round_index])
        device = self.model.device
        prefix = torch.tensor(frame.prefix, device=device).expand(s.num_rows, -1)
        first = prefix.shape[1]
        cache = RoundCache(first + s.num_slots)
        mask = torch.zeros(s.num_rows, 1, 1, first + s.num_slots, device=device, dtype=self.model.dtype)
        lowest = torch.finfo(mask.dtype).min
        causal = torch.full((first, first), lowest, device=device, dtype=mask.dtype).triu(1)
        logits = self._forward(prefix, causal.expand(s.num_rows, 1, -1, -1), torch.arange(first, device=device), cache)
        opening = logits[:1]
        rows = [Document(frame, rng, s, self._encode) for _ in range(s.num_rows)]
        starts = [first] * s.num_rows
        finished: list[tuple[Document, int, int]] = []
        top_ids = np.zeros((s.num_slots, s.num_rows, s.top_k), np.int32)
        top_logprobs = np.zeros((s.num_slots, s.num_rows, s.top_k), np.float16)
        for step in range(s.num_slots):
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            values, ids = logprobs.topk(s.top_k)
            top_ids[step], top_logprobs[step] = ids.cpu().numpy(), values.cpu().numpy()
            kinds = np.array([row.next_kind for row in rows])
            choices = choose(logprobs.cpu(), values.cpu(), ids.cpu(), kinds, rng.random(s.num_rows), s.nucleus)
            fed = [row.push(choice) for row, choice in zip(rows, choices, strict=True)]
            if step + 1 == s.num_slots:
                break
            slot = first + step
            positions = torch.tensor([slot - start + first for start in starts], device=device)[:, None]
            batch = torch.tensor(fed, device=device)[:, None]
            logits = self._forward(batch, mask[..., : slot + 1], positions, cache)
            for index, row in enumerate(rows):
                if row.done and s.num_slots - step > s.min_room:
                    finished.append((row, index, starts[index] - first))
                    rows[index], starts[index] = Document(frame, rng, s, self._encode), slot + 1
                    mask[index, ..., first : slot + 1] = lowest
                    logits[index] = opening[0]
            if on_step is not None:
                on_step(step + 1, s.num_slots)
        finished += [(row, index, starts[index] - first) for index, row in enumerate(rows)]
        return _flatten(finished, top_ids, top_logprobs, frame)

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: RoundCache
    ) -> torch.Tensor:
        """Runs [B, n] tokens and returns the last position's logits [B, V]."""
        if positions.ndim == 1:
            positions = positions[None].expand(tokens.shape[0], -1)
        output = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
        )
        cache.len += tokens.shape[1]
        logits: torch.Tensor = output.logits[:, -1]
        return logits.clone()


def _flatten(
    documents: list[tuple[Document, int, int]], top_ids: NDArray[Any], top_logprobs: NDArray[Any], frame: ChatFrame
) -> dict[str, NDArray[Any]]:
    """Documents of a round end to end; what a document wrote after its end (filling a row) is cut off."""
    tokens, kinds, ids, logprobs, offsets = [], [], [], [], [0]
    for document, row, start in documents:
        length = len(document.tokens)
        for position, (token, kind) in enumerate(zip(document.tokens, document.kinds, strict=True)):
            ended = token in frame.stop_ids and kind in (KIND_GREEDY, KIND_SAMPLED)
            if document.done and ended and position + 1 < length and document.kinds[position + 1] != KIND_FORCED:
                length = position + 1
                break
        tokens.append(np.array(document.tokens[:length], np.int32))
        kinds.append(np.array(document.kinds[:length], np.uint8))
        ids.append(top_ids[start : start + length, row])
        logprobs.append(top_logprobs[start : start + length, row])
        offsets.append(offsets[-1] + length)
    return {
        "tokens": np.concatenate(tokens),
        "kinds": np.concatenate(kinds),
        "offsets": np.array(offsets, np.int64),
        "top_ids": np.concatenate(ids),
        "top_logprobs": np.concatenate(logprobs),
    }


def round_path(folder: Path, index: int) -> Path:
    return folder / f"round-{index:04d}.npz"


def write_corpus(
    folder: Path, writer: RoundWriter, num_tokens: int, on_step: Callable[[int, int, int], None] | None = None
) -> Iterator[Path]:
    """Writes rounds into `folder` until it holds at least `num_tokens`; yields each round's file, old ones first."""
    meta = {**asdict(writer.settings), "prefix": list(writer.frame.prefix), "stop_ids": sorted(writer.frame.stop_ids)}
    meta_path = folder / "corpus.json"
    if meta_path.exists() and read_json(meta_path) != meta:
        from paceline.shared.errors import ModelError

        raise ModelError(f"{folder} holds a corpus made with other settings; choose another --work-dir or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(meta_path, meta)
    total, index = 0, 0
    while total < num_tokens:
        path = round_path(folder, index)
        if not path.exists():
            step_hook = None if on_step is None else (lambda done, of, base=total: on_step(base, done, of))
            write_arrays(path, writer.write(index, step_hook))
        with np.load(path, allow_pickle=False) as arrays:
            total += int(arrays["offsets"][-1])
        index += 1
        yield path

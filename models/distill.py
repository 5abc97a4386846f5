"""Trains a draft on the target's own text: cross-entropy against the target's top-k distribution.

The loss at a position is -sum_k p_k log q_k - p_rest log q_rest over the target's k most likely tokens and one bucket
for the rest (word-level distillation, Kim and Rush 2016). Where the target drew a token v from the rest, -log(q_v /
q_rest) is added: in expectation over its draws the sum is then the cross-entropy of the whole distributions, tail
included, which k labels cannot teach. Mass outside the draft's vocabulary is left out. AdamW; warm-up, plateau, linear
decay. Batches are a pure function of (seed, step), so a run goes on from its last checkpoint as if it had not stopped.
Not for: writing the text (`corpus`) or exporting (`export`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from paceline.models.draft import Draft
from paceline.models.samples import Batch, Packer
from paceline.models.store import read_json, write_json


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How a draft is trained. Lengths in tokens, one optimiser step sees batch_rows * row_len of them."""

    seed: int = 0
    num_steps: int = 1200
    batch_rows: int = 4
    row_len: int = 512
    micro_rows: int = 4
    learning_rate: float = 8e-4
    warmup_steps: int = 30
    decay_share: float = 0.3
    final_share: float = 0.02
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    user_weight: float = 0.3
    clip_norm: float = 1.0
    checkpoint_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Progress:
    """State after a step, for progress bars and the provenance record."""

    step: int
    num_steps: int
    loss: float
    tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over answer positions of held-out documents.

    loss in nats; top1, top5, top8: share of positions where the target's argmax is among the draft's first 1, 5, 8.
    """

    loss: float
    top1: float
    top5: float
    top8: float
    num_positions: int


def distillation_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """float32[M]: the loss at every labelled position, from logits [M, Vd]."""
    whole = torch.log_softmax(logits, dim=-1)
    logprobs = whole.gather(1, batch.labels)
    known = batch.masses > 0
    likely = torch.where(known, logprobs, torch.zeros_like(logprobs))
    log_rest = (1 - (likely.exp() * known).sum(-1)).clamp_min(1e-6).log()
    drawn = whole.gather(1, batch.tails.clamp_min(0)[:, None])[:, 0] - log_rest
    return -(batch.masses * likely).sum(-1) - batch.rest * log_rest - torch.where(batch.tails >= 0, drawn, 0.0)


def learning_rate(settings: DistillSettings, step: int) -> float:
    """Warm-up, plateau, then linear decay over the last `decay_share` of the steps.

    Before the decay the rate does not depend on `num_steps`, so a run may be given more or fewer steps while it lasts.
    """
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    left = (settings.num_steps - step) / max(1.0, settings.num_steps * settings.decay_share)
    return settings.learning_rate * min(warm, max(settings.final_share, min(1.0, left)))


class Distiller:
    """One training run in a work folder: checkpoints in `checkpoint/`, a log line per checkpoint in `history.json`."""

    def __init__(self, draft: Draft, packer: Packer, settings: DistillSettings, folder: Path) -> None:
        self.draft, self.packer, self.settings, self.folder = draft, packer, settings, folder
        self.device = draft.head.weight.device
        # The input embedding stays the target's own: it is most of the parameters and is never stored.
        draft.decoder.embed_tokens.weight.requires_grad_(False)
        decayed = [p for p in draft.parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for p in draft.parameters() if p.requires_grad and p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
        self.step = 0
        self.tokens = 0
        self.elapsed_s = 0.0
        self.history: list[dict[str, float]] = []
        self._epochs: dict[int, list[list[int]]] = {}
        self._rows_per_epoch = len(packer.epoch(settings.seed, 0))

    def run(self, on_progress: Callable[[Progress], None] | None = None, max_steps: int | None = None) -> None:
        """Trains to the end of the schedule (or `max_steps` more steps), from the last checkpoint if there is one."""
        self._resume()
        loss, first = math.nan, self.step
        last_save, started = time.monotonic(), time.monotonic() - self.elapsed_s
        stop = self.settings.num_steps if max_steps is None else min(self.settings.num_steps, self.step + max_steps)
        self.draft.train()
        while self.step < stop:
            loss = self._train_step()
            self.elapsed_s = time.monotonic() - started
            if on_progress is not None:
                on_progress(Progress(self.step, self.settings.num_steps, loss, self.tokens, self.elapsed_s))
            if time.monotonic() - last_save > self.settings.checkpoint_s and self.step < stop:
                self._checkpoint(loss)
                last_save = time.monotonic()
        if self.step > first:
            self._checkpoint(loss)

    def _train_step(self) -> float:
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s, self.step)
        rows = [self._row(self.step * s.batch_rows + index) for index in range(s.batch_rows)]
        batches = [self.packer.batch(rows[at : at + s.micro_rows]) for at in range(0, len(rows), s.micro_rows)]
        total = float(sum(batch.weights.sum() for batch in batches))
        loss_sum = 0.0
        for batch in (each.to(self.device) for each in batches):
            hidden = self.draft.decoder(
                input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
            logits = self.draft.head(hidden.flatten(0, 1)[batch.at])
            loss = (distillation_losses(logits, batch) * batch.weights).sum() / total
            loss.backward()
            loss_sum += float(loss.detach())
            self.tokens += len(batch.at)
        clip_grad_norm_([p for p in self.draft.parameters() if p.requires_grad], s.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_sum

    def _row(self, index: int) -> list[int]:
        epoch, place = divmod(index, self._rows_per_epoch)
        if epoch not in self._epochs:
            self._epochs = {epoch: self.packer.epoch(self.settings.seed, epoch)}
        rows = self._epochs[epoch]
        return rows[place % len(rows)]

    def _checkpoint(self, loss: float) -> None:
        agreement = measure(self.draft, self.packer)
        self.history.append({"step": self.step, "tokens": self.tokens, "train_loss": loss, **asdict(agreement)})
        folder = self.folder / "checkpoint"
        self.draft.save(folder)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
        }
        part = folder / ".state.pt.part"
        torch.save(state, part)
        part.replace(folder / "state.pt")
        write_json(self.folder / "history.json", self.history)
        self.draft.train()

    def _resume(self) -> None:
        folder = self.folder / "checkpoint"
        if not (folder / "state.pt").is_file():
            return
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
        self.draft.load_state_dict(Draft.load(folder).state_dict())
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.elapsed_s = state["step"], state["tokens"], state["elapsed_s"]
        self.history = read_json(self.folder / "history.json")


@torch.inference_mode()
def measure(draft: Draft, packer: Packer, max_rows: int = 32) -> Agreement:
    """Agreement on held-out documents of the corpus."""
    draft.eval()
    rows = packer.rows(packer.corpus.documents(held_out=True))[:max_rows]
    losses, hits = [], []
    for at in range(0, len(rows), 4):
        batch = packer.batch(rows[at : at + 4]).to(draft.head.weight.device)
        answers = batch.weights == 1.0
        logits = draft(batch.ids, batch.positions, batch.mask).flatten(0, 1)[batch.at]
        losses.append(distillation_losses(logits, batch)[answers])
        best = torch.where(batch.masses[:, 0] > 0, batch.labels[:, 0], -1)
        hits.append((logits.topk(min(8, logits.shape[1])).indices == best[:, None])[answers])
    hit = torch.cat(hits).float()
    return Agreement(
        loss=float(torch.cat(losses).mean()),
        top1=float(hit[:, :1].sum(1).mean()),
        top5=float(hit[:, :5].sum(1).mean()),
        top8=float(hit[:, :8].sum(1).mean()),
        num_positions=len(hit),
    )

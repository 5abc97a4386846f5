"""Flips: how often the engine's greedy token, in low precision, is not the argmax of one plain forward pass.

A verification step has another shape than one-token decoding and than a forward pass over a whole text, so its sums are
rounded differently and a near tie may fall to the other side. Every text that the engine wrote is fed at once to the
stock model in the same precision (teacher forcing), and each emitted token is held against the logits at its place:

    argmax     the largest logit, lowest id among equals
    flip       another token; harmless while its logit is within ``MAX_ULP`` units in the last place of the largest
    beyond     a flip by more than that

The texts are written twice, with drafts and by the server alone: plain streaming flips too. In float32 nothing may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bench import prompts as shipped_prompts
from paceline.bench.engine import load_peer
from paceline.bench.lockstep import LockstepSettings, run_lockstep, welcome_of
from paceline.bench.prompts import load_prompts
from paceline.bench.recorder import prompt_ids
from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.session import Task
from paceline.models.catalogue import find_bundle, find_target
from paceline.models.manifest import load_manifest
from paceline.server.engine import Engine, EngineSettings
from paceline.server.loading import load_target
from paceline.server.target import Target
from paceline.shared.errors import PacelineError
from paceline.shared.sampling import SamplingParams, Verifier

MAX_ULP = 2.0
DTYPES = ("bfloat16",)
Progress = Callable[[str], None]
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Flips:
    """gaps: float64[n], for every emitted token how far its logit is below the largest, in ulp of that.
    is_flip: bool[n]; a tie that went to another id than the lowest is a flip with a gap of 0.
    """

    gaps: NDArray[np.float64]
    is_flip: NDArray[np.bool_]

    @property
    def num_beyond(self) -> int:
        """Tokens further off than rounding explains."""
        return int((self.gaps > MAX_ULP).sum())

    def figures(self) -> dict[str, float]:
        """What the report says of these tokens."""
        return {
            "tokens": len(self.gaps),
            "flips": int(self.is_flip.sum()),
            "flips_per_1000": 1000.0 * float(self.is_flip.mean()) if len(self.gaps) else 0.0,
            "beyond": self.num_beyond,
            "largest_gap_ulp": float(self.gaps.max(initial=0.0)),
        }


def run_flip_bench(
    pair: str = "smollm2",
    prompts: Path | None = None,
    max_tokens: int = 96,
    dtypes: Sequence[str] = DTYPES,
    progress: Progress = lambda _line: None,
) -> dict[str, Any]:
    """Flips per 1,000 tokens in each precision, drafted and by the server alone.

    Raises ``ModelError`` if the pair is not built, ``UsageError`` for a file that holds no prompts.
    """
    bundle = find_bundle(pair)
    models = [
        OnnxDrafter(bundle / entry.file, name=entry.name, max_context=entry.context_len)
        for entry in load_manifest(bundle).drafters
    ]
    ids = prompt_ids(find_target(pair), load_prompts(prompts or shipped_prompts.SHIPPED))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        target = load_target(pair, dtype=dtype)
        peer = load_peer(pair, dtype, target.model.device)
        figures[dtype] = {}
        contestants: dict[str, list[Drafter]] = {"drafted": [*models, NGramDrafter()], "server-alone": []}
        for name, drafters in contestants.items():
            flips = measure_flips(target, peer, ids, drafters, max_tokens)
            figures[dtype][name] = flips.figures()
            progress(f"{dtype}, {name}: {int(flips.is_flip.sum())} flips in {len(flips.gaps)} tokens")
    for drafter in models:
        drafter.close()
    caveats = ["lower is better", "greedy, teacher-forced by stock transformers in the same precision"]
    about = {"max_tokens": max_tokens, "max_ulp": MAX_ULP, "torch": torch.__version__, "caveats": caveats}
    return {"figures": figures, "meta": {"pair": pair, "prompts": len(ids), **about}}


def check_flips(report: dict[str, Any]) -> None:
    """Raises ``PacelineError`` if a token of the report is further off than rounding explains."""
    for dtype, contestants in report["figures"].items():
        for name, figures in contestants.items():
            if figures["beyond"]:
                got = f"{figures['beyond']} tokens beyond, the largest gap {figures['largest_gap_ulp']:g} ulp"
                raise PacelineError(f"expected every {dtype} token within {MAX_ULP:g} ulp, got {got} ({name})")


def measure_flips(
    target: Target, peer: Any, prompts: Sequence[Tokens], drafters: Sequence[Drafter], max_tokens: int
) -> Flips:
    """Writes a greedy answer to every prompt and holds each token against the peer's logits.

    peer: the target's stock ``transformers`` model, in the same precision.
    """
    sampling = SamplingParams(max_tokens=max_tokens)
    engine = Engine(target, EngineSettings())
    tasks = [Task(prompt, sampling, Verifier.GREEDY) for prompt in prompts]
    answers = run_lockstep(engine, welcome_of(engine), tasks, drafters, LockstepSettings(num_parallel=4, delay=1))
    parts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = np.concatenate([prompt, answer.token_ids]).astype(np.int64)
        logits = _forced_logits(peer, text)[len(prompt) - 1 : -1, : target.info.vocab_size]
        parts.append(compare(logits, answer.token_ids))
    gaps, is_flip = (np.concatenate(column) for column in zip(*((one.gaps, one.is_flip) for one in parts), strict=True))
    return Flips(gaps, is_flip)


@torch.inference_mode()
def _forced_logits(peer: Any, text: NDArray[np.int64]) -> torch.Tensor:
    """[n, V] in the peer's precision: one causal forward pass over the whole text."""
    logits: torch.Tensor = peer(input_ids=torch.from_numpy(text)[None].to(peer.device), use_cache=False).logits[0]
    return logits.cpu()


def compare(logits: torch.Tensor, token_ids: Tokens) -> Flips:
    """logits: [n, V] in the precision that was measured; row i is what the token i was chosen from."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    best = logits.max(dim=-1).values
    # argmax of torch may name any of several equal logits.
    lowest = (logits == best[:, None]).to(torch.uint8).argmax(dim=-1)
    gaps = best.double() - logits.gather(1, ids[:, None])[:, 0].double()
    return Flips((gaps / _ulp(best)).numpy(), (ids != lowest).numpy())


def _ulp(values: torch.Tensor) -> torch.Tensor:
    """float64[n]: the distance of neighbouring numbers of the tensor's precision at each value."""
    _, exponent = torch.frexp(values.float().abs().clamp(min=torch.finfo(values.dtype).tiny))
    return torch.finfo(values.dtype).eps * torch.exp2(exponent.double() - 1.0)

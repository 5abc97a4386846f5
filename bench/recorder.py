"""Makes recordings with real models: the target's text through the engine, then the drafter's answers along it.

Two halves, cached apart: the target's output depends on the target, the prompt and the sampling only; the answers
depend on the draft bundle as well. So a new draft costs a pass of the draft model and no target.

    python -m paceline.bench.recorder       makes the recordings that ship with the package again, after a new draft

Not here: what recordings are for (``recording``).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.prompts import Prompt, load_prompts
from paceline.bench.recording import SHIPPED, Recording, RecordingSet, Rows, coverage
from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, Drafter, DraftRequest, DraftSequence
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.models.catalogue import EMBEDDED, cache_dir, ensure_private, find_bundle, find_target
from paceline.models.manifest import MANIFEST_NAME
from paceline.server.engine import Engine, EngineSettings
from paceline.server.plan import StepPlan
from paceline.server.target import Target
from paceline.shared.errors import RemoteError
from paceline.shared.messages import Commit, Fault, Open
from paceline.shared.sampling import SamplingParams

_SHIPPED_TOKENS = 96
WIDTH = 16
"""Candidates recorded per position: more than a session ever keeps below one node."""

Progress = Callable[[str], None]


def record(
    pair: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    bundle: str | None = None,
    progress: Progress = lambda line: None,
) -> RecordingSet:
    """Recordings of the prompts, from the cache where it has them.

    pair: a target's name or folder. bundle: a draft bundle's, the pair's own if None.
    Raises ``ModelError`` if either is not built.
    """
    target_folder, bundle_folder = find_target(pair), find_bundle(bundle or pair)
    manifest = (bundle_folder / MANIFEST_NAME).read_bytes()
    wishes = [[p.text, p.is_chat] for p in prompts]
    head = json.dumps([str(target_folder), wishes, max_tokens, temperature, seed])
    folder = ensure_private(cache_dir() / "bench")
    texts_path = folder / f"texts-{_digest(head.encode())}.npz"
    path = folder / f"recording-{_digest(head.encode() + manifest)}.npz"
    if path.exists():
        return RecordingSet.load(path)
    if texts_path.exists():
        texts = RecordingSet.load(texts_path)
    else:
        sampling = SamplingParams(temperature=temperature, seed=seed if temperature else None, max_tokens=max_tokens)
        texts = _write_texts(pair, target_folder, prompts, sampling, progress)
        texts.save(texts_path)
    entry = json.loads(manifest)["drafters"][0]
    drafter = OnnxDrafter(bundle_folder / entry["file"], max_context=int(entry["context_len"]), threads=1)
    recordings = add_answers(texts, drafter, progress)
    drafter.close()
    recordings.save(path)
    return recordings


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _write_texts(
    pair: str, folder: Path, prompts: Sequence[Prompt], sampling: SamplingParams, progress: Progress
) -> RecordingSet:
    from paceline.server.loading import load_target

    target = load_target(pair)
    ids = prompt_ids(folder, prompts)
    started = time.perf_counter()
    outputs = complete_all(target, ids, sampling, progress)
    seconds = time.perf_counter() - started
    nothing = Rows(np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH), np.float32))
    made = tuple(
        Recording(prompt, output, nothing, nothing, sampling.temperature, sampling.seed or 0)
        for prompt, output in zip(ids, outputs, strict=True)
    )
    meta = {"pair": pair, "fingerprint": target.info.fingerprint, "target_seconds": round(seconds, 1)}
    return RecordingSet(made, meta)


def prompt_ids(folder: Path, prompts: Sequence[Prompt]) -> list[NDArray[np.int32]]:
    """Token ids of the prompts; chat prompts as one user message in the model's own template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    made: list[NDArray[np.int32]] = []
    for prompt in prompts:
        text = prompt.text
        if prompt.is_chat and tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        made.append(np.array(tokenizer.encode(text, add_special_tokens=not prompt.is_chat), np.int32))
    return made


def complete_all(
    target: Target, prompts: Sequence[NDArray[np.int32]], sampling: SamplingParams, progress: Progress
) -> list[NDArray[np.int32]]:
    """The target's output for every prompt, all in one engine. Raises ``RemoteError`` if one fails."""
    engine = Engine(target, EngineSettings(max_running=8, max_queue=len(prompts)))
    for number, prompt in enumerate(prompts):
        request = Open(number, prompt, sampling, sampling.default_verifier(), drafting=False)
        engine.open((0, number), request, 0.0)
    outputs: list[list[int]] = [[] for _ in prompts]
    num_done = 0
    while isinstance(plan := engine.next_step(time.monotonic()), StepPlan):
        for (_, number), message in engine.finish(plan, target.forward(plan.batch), time.monotonic()):
            if isinstance(message, Fault):
                raise RemoteError(message.code, message.message)
            if isinstance(message, Commit):
                outputs[number].extend(message.tokens.tolist())
                num_done += message.finish is not None
                if message.finish is not None:
                    progress(f"target: {num_done} of {len(prompts)} prompts")
    return [np.array(output, np.int32) for output in outputs]


def add_answers(texts: RecordingSet, drafter: Drafter, progress: Progress = lambda line: None) -> RecordingSet:
    """The recordings with the drafter's answers along their texts, and what a call took (``meta["draft_ms"]``)."""
    made: list[Recording] = []
    timer = _CallTimer()
    for index, text in enumerate(texts.recordings):
        sequence = drafter.start()
        try:
            made.append(_follow(text, sequence, drafter.chunk_len, timer))
        finally:
            sequence.close()
        progress(f"draft: {index + 1} of {len(texts.recordings)} prompts")
    return RecordingSet(tuple(made), {**texts.meta, "drafter": drafter.name, "draft_ms": timer.medians()})


class _CallTimer:
    """What calls took, by their number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}

    def run(self, sequence: DraftSequence, request: DraftRequest) -> Candidates:
        started = time.perf_counter()
        answer = sequence.expand(request)
        rows = len(request.token_ids) + len(request.keys)
        self._seconds.setdefault(rows, []).append(time.perf_counter() - started)
        return answer

    def medians(self) -> dict[str, float]:
        often = {rows: times for rows, times in self._seconds.items() if len(times) >= 10}
        return {str(rows): round(1e3 * float(np.median(times)), 3) for rows, times in sorted(often.items())}


def _follow(text: Recording, sequence: DraftSequence, chunk_len: int, timer: _CallTimer) -> Recording:
    """Commits the text token by token; at each place asks what follows, and what follows the likeliest wrong token."""
    none = np.zeros(0, np.int64)
    held = 0
    while len(text.prompt) - held > chunk_len:
        piece = text.prompt[held : held + chunk_len]
        timer.run(sequence, _request(held, piece, none, none.astype(np.int32), wants_anchor=False))
        held += len(piece)
    pending = text.prompt[held:]
    on: list[Candidates] = []
    off: list[Candidates] = []
    for place, token in enumerate(text.output.tolist()):
        answer = timer.run(sequence, _request(held, pending, none, none.astype(np.int32), wants_anchor=True))
        held += len(pending)
        on.append(answer)
        wrong = answer.token_ids[0][answer.token_ids[0] != token][:1].astype(np.int32)
        keys = np.arange(place, place + len(wrong), dtype=np.int64)
        off.append(timer.run(sequence, _request(held, pending[:0], keys, wrong, wants_anchor=False)))
        pending = text.output[place : place + 1]
    return Recording(text.prompt, text.output, _rows(on), _rows(off), text.temperature, text.seed)


def _request(
    start: int, token_ids: NDArray[np.int32], keys: NDArray[np.int64], tokens: NDArray[np.int32], *, wants_anchor: bool
) -> DraftRequest:
    anchors = np.full(len(token_ids), ANCHOR_KEY, np.int64)
    below = np.full(len(keys), ANCHOR_KEY, np.int64)
    depths = np.ones(len(keys), np.int32)
    return DraftRequest(0, start, token_ids, anchors, keys, keys, tokens, below, depths, wants_anchor, WIDTH)


def _rows(answers: Sequence[Candidates]) -> Rows:
    rows = [(answer.token_ids[0], answer.logprobs[0]) for answer in answers if len(answer.token_ids)]
    ids = np.zeros((len(rows), WIDTH), np.int32)
    logprobs = np.full((len(rows), WIDTH), -np.inf, np.float32)
    for index, (row_ids, row_logprobs) in enumerate(rows):
        count = min(WIDTH, len(row_ids))
        ids[index, :count] = row_ids[:count]
        logprobs[index, :count] = row_logprobs[:count]
    return Rows(ids, logprobs)


def main() -> None:
    """Make the recordings that ship with the package, from its own prompts and the embedded pair."""
    prompts = load_prompts(SHIPPED.with_name("prompts.jsonl"))
    recordings = record(EMBEDDED, prompts, _SHIPPED_TOKENS, progress=lambda line: print(line, file=sys.stderr))
    shares = ", ".join(f"{rank}: {coverage(recordings.recordings, rank):.3f}" for rank in (1, 4, 16))
    recordings.save(SHIPPED)
    print(f"wrote {SHIPPED.name} ({SHIPPED.stat().st_size} bytes), right token among the first {shares}")


if __name__ == "__main__":
    main()

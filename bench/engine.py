"""The engine's forward path against ``transformers`` on the embedded target: one machine, one run, no drafts.

    one_stream_vs_generate                tok/s of one greedy stream over ``generate``'s, best dtype against best dtype
    eight_streams_vs_continuous_batching  tok/s of eight greedy streams over ``generate_batch``'s, best against best
    verify32_vs_forward                   time of a 32-node verify step over that of ``transformers``' own causal
                                          forward of as many tokens behind the same context (lower is better)

Contestants alternate and medians are compared, so that what else the machine does hits both. Pin it to one core
(``taskset -c 0``) to compare engines rather than threads. ``generate`` runs eagerly with its default cache: a compiled
one needs minutes to start.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig

from paceline.models.catalogue import find_target
from paceline.server.batch import Batch, Segment
from paceline.server.loading import load_target
from paceline.server.target import HFTarget
from paceline.shared.tree import TokenTree

PROMPT_LEN, CONTEXT_LEN, NUM_NODES, NUM_STREAMS = 64, 256, 32, 8
DTYPES = ("float32", "bfloat16")


def run_engine_bench(
    model: str = "smollm2", num_tokens: int = 32, rounds: int = 3, dtypes: tuple[str, ...] = DTYPES
) -> dict[str, Any]:
    """The three ratios and the figures behind them. Takes a few minutes on one core.

    num_tokens: new tokens per stream and run. Raises ``ModelError`` if the target is not built.
    """
    one: dict[str, dict[str, float]] = {}
    eight: dict[str, dict[str, float]] = {}
    verify: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        target = load_target(model, dtype=dtype)
        peer = load_peer(model, dtype, target.model.device)
        one[dtype] = _one_stream(target, peer, num_tokens, rounds)
        verify[dtype] = _verify_step(target, peer, 3 * rounds)
        eight[dtype] = _eight_streams(target, peer, num_tokens, max(1, rounds - 1))
    return {
        "one_stream_vs_generate": _best(one, "paceline_tok_s") / _best(one, "generate_tok_s"),
        "eight_streams_vs_continuous_batching": _best(eight, "paceline_tok_s") / _best(eight, "generate_batch_tok_s"),
        "verify32_vs_forward": verify[dtypes[0]]["paceline_ms"] / verify[dtypes[0]]["forward_ms"],
        "figures": {"one_stream": one, "eight_streams": eight, "verify32": verify},
        "meta": {
            "model": model,
            "prompt_tokens": PROMPT_LEN,
            "new_tokens": num_tokens,
            "context_tokens": CONTEXT_LEN,
            "nodes": NUM_NODES,
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "caveats": [
                "verify32_vs_forward is lower-is-better, the other two higher-is-better",
                f"verify32_vs_forward is for {dtypes[0]}; figures holds the other precisions",
                "generate and generate_batch run eagerly, not compiled",
            ],
        },
    }


def load_peer(model: str, dtype: str, device: torch.device) -> Any:
    """The same weights as plain ``transformers``, told never to stop early."""
    peer: Any = AutoModelForCausalLM.from_pretrained(
        find_target(model), dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    return peer.to(device).eval()


def _best(figures: dict[str, dict[str, float]], name: str) -> float:
    return max(figure[name] for figure in figures.values())


def _ids(seed: int, size: int, vocab_size: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(100, vocab_size, size).astype(np.int32)


def _seconds(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each; one warm-up, then ``rounds`` rounds in which every contestant runs once."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def decode_greedily(target: HFTarget, prompts: list[NDArray[np.int32]], num_tokens: int) -> list[list[int]]:
    """The target's own greedy continuation of each prompt, all in one packed batch a step, without drafts."""
    pool, empty = target.pool, TokenTree.empty()
    texts = [list(map(int, prompt)) for prompt in prompts]
    for handle, text in enumerate(texts):
        pool.open(handle, np.array(text, np.int32))
    try:
        for _ in range(num_tokens):
            segments = []
            for handle, text in enumerate(texts):
                cached = pool.length(handle)
                pool.reserve(handle, len(text))
                segments.append(Segment(handle, cached, np.array(text[cached:], np.int32), empty))
            choices = target.forward(Batch(tuple(segments))).argmax(dim=-1).tolist()
            for segment, choice in zip(segments, choices, strict=True):
                pool.commit(segment.sequence, segment.cached_len, range(segment.num_rows))
                texts[segment.sequence].append(choice)
    finally:
        for handle in range(len(texts)):
            pool.free(handle)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _one_stream(target: HFTarget, peer: Any, num_tokens: int, rounds: int) -> dict[str, float]:
    prompt = _ids(1, PROMPT_LEN, target.info.vocab_size)
    inputs = torch.from_numpy(prompt.astype(np.int64))[None].to(peer.device)
    mask = torch.ones_like(inputs)

    def generate() -> object:
        return peer.generate(inputs, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)

    taken = _seconds({"generate": generate, "paceline": lambda: decode_greedily(target, [prompt], num_tokens)}, rounds)
    return _rates(taken, num_tokens)


def _eight_streams(target: HFTarget, peer: Any, num_tokens: int, rounds: int) -> dict[str, float]:
    prompts = [_ids(10 + stream, PROMPT_LEN, target.info.vocab_size) for stream in range(NUM_STREAMS)]
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default it takes most of the machine's memory for its cache; this is ample for what runs here.
    memory = ContinuousBatchingConfig(num_blocks=4 * NUM_STREAMS, max_batch_tokens=NUM_STREAMS * PROMPT_LEN)
    lists = [prompt.tolist() for prompt in prompts]

    def generate_batch() -> object:
        return peer.generate_batch(
            inputs=lists, generation_config=settings, continuous_batching_config=memory, progress_bar=False
        )

    def paceline() -> object:
        return decode_greedily(target, prompts, num_tokens)

    return _rates(_seconds({"generate_batch": generate_batch, "paceline": paceline}, rounds), NUM_STREAMS * num_tokens)


def _rates(taken: dict[str, float], num_tokens: int) -> dict[str, float]:
    return {f"{name}_tok_s": num_tokens / seconds for name, seconds in taken.items()}


def _cache_argument(peer: Any) -> str:
    """``transformers`` renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(peer.forward).parameters else "past_key_values"


def _verify_step(target: HFTarget, peer: Any, rounds: int) -> dict[str, float]:
    """A 32-node tree behind a warm context, against ``transformers`` on the same tokens as a plain chain."""
    vocab_size, handle = target.info.vocab_size, 0
    context = _ids(2, CONTEXT_LEN, vocab_size)
    # Four chains of eight: wide and deep enough to need a real mask.
    parents = np.array([(node - 4) if node >= 4 else -1 for node in range(NUM_NODES)], np.int32)
    tree = TokenTree(_ids(3, NUM_NODES, vocab_size), parents)
    pool = target.pool
    pool.open(handle, context)
    pool.reserve(handle, CONTEXT_LEN + NUM_NODES)
    target.forward(Batch((Segment(handle, 0, context[:-1], TokenTree.empty(), wants_logits=False),)))
    pool.commit(handle, 0, range(CONTEXT_LEN - 1))
    step = Batch((Segment(handle, CONTEXT_LEN - 1, context[-1:], tree),))
    cache = {_cache_argument(peer): DynamicCache(config=peer.config)}
    packed = torch.from_numpy(np.concatenate([context[-1:], tree.tokens]).astype(np.int64))[None].to(peer.device)
    with torch.inference_mode():
        peer(torch.from_numpy(context[:-1].astype(np.int64))[None].to(peer.device), **cache)

    @torch.inference_mode()
    def forward() -> object:
        logits = peer(packed, **cache).logits
        next(iter(cache.values())).crop(-packed.shape[1])
        return logits.argmax(dim=-1).tolist()

    taken = _seconds({"forward": forward, "paceline": lambda: target.forward(step).argmax(dim=-1).tolist()}, rounds)
    pool.free(handle)
    return {f"{name}_ms": 1e3 * seconds for name, seconds in taken.items()}

"""Whole generations of real model families through the engine, drafts included, against plain ``transformers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.server.engine import EngineSettings
from paceline.shared.messages import StepTime

FREE_ROWS = EngineSettings(step_time=StepTime(0.03, 0.0), max_nodes=128)


def prompt_of(seed: int, size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 97, size)]


def plain_greedy(rig: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's own greedy output, each token from a forward pass over everything before it."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(rig.plain(np.array(text, np.int32))[-1].argmax()))
    return text[len(prompt) :]


def write(lab: Any, target: Any, prompts: list[list[int]], drafters: list[Any], num_tokens: int) -> list[Any]:
    world = lab.World(target, FREE_ROWS, model=FREE_ROWS.step_time)
    for prompt, drafter in zip(prompts, drafters, strict=True):
        world.client(prompt, drafter, max_tokens=num_tokens, ignore_eos=True, link={"delay": 0.001})
    world.run()
    assert target.pool.num_used_blocks == 0
    return list(world.clients.values())


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "phi3"])
def test_windows_are_crossed_with_drafts_cold_and_warm(family: str, make_rig: Callable[..., Any], lab: Any) -> None:
    """U049: a window of 8, prompts before, at and behind it, trees of depth 4; the second time from the cache."""
    rig = make_rig(family)
    prompts = [prompt_of(1, 10), prompt_of(2, 3), prompt_of(3, 8)]
    outputs = [plain_greedy(rig, prompt, 40) for prompt in prompts]
    drafters = [lab.oracle(output, widths=(2, 1, 1, 1), vocab=97) for output in outputs]
    cold = write(lab, rig.target, prompts, drafters, 40)
    assert [client.received for client in cold] == outputs
    assert all(len(client.commits) < 40 for client in cold)
    longer = [prompt + output[:25] for prompt, output in zip(prompts, outputs, strict=True)]
    drafters = [lab.oracle(output[25:], widths=(2, 1, 1, 1), vocab=97) for output in outputs]
    warm = write(lab, rig.target, longer, drafters, 15)
    assert [client.received for client in warm] == [output[25:] for output in outputs]
    assert all(client.opened.cached_tokens >= 16 for client in warm)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_last_siblings_win_at_every_level(family: str, size: int, make_rig: Callable[..., Any], lab: Any) -> None:
    """U044: nothing of the accepted path lies in place, in batches whose rows accept different paths."""
    rig = make_rig(family)
    prompts = [prompt_of(number, 4 + 3 * number) for number in range(size)]
    outputs = [plain_greedy(rig, prompt, 60) for prompt in prompts]
    drafters = [
        lab.oracle(output, widths=(3, 3, 3, 3), rank=2 - number % 2, vocab=97) for number, output in enumerate(outputs)
    ]
    clients = write(lab, rig.target, prompts, drafters, 60)
    assert [client.received for client in clients] == outputs
    assert all(len(client.commits) < 45 for client in clients)


class PoisonedTarget:
    """A target whose every slot without valid content holds NaN before each step."""

    def __init__(self, target: Any) -> None:
        self.target, self.pool, self.info = target, target.pool, target.info

    def forward(self, batch: Any) -> Any:
        self.pool.poison_free_blocks()
        return self.target.forward(batch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nothing_invalid_is_ever_read(family: str, make_rig: Callable[..., Any], lab: Any) -> None:
    """U053: blocks of generations that ended, rejected nodes and fresh blocks are NaN before every step."""
    rig = make_rig(family, kv_memory=20 << 10)
    prompts = [prompt_of(number, 5 + 7 * number) for number in range(4)]
    outputs = [plain_greedy(rig, prompt, 30) for prompt in prompts]
    drafters = [
        lab.oracle(output, widths=(2, 2, 1), rank=number % 2, vocab=97) for number, output in enumerate(outputs)
    ]
    clients = write(lab, PoisonedTarget(rig.target), prompts, drafters, 30)
    assert [client.received for client in clients] == outputs

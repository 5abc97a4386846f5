"""A pair in lockstep: what a drafter did for one text says nothing in the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.bench.lockstep import Answer, LockstepSettings, run_lockstep, welcome_of
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.session import Task
from paceline.models.draft import Draft
from paceline.models.graph import GraphBuilder
from paceline.models.tiny import VOCAB_SIZE, tiny_model
from paceline.server.engine import Engine, EngineSettings
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams

LONG = np.array([5, 6, 7, 8] * 12, np.int32)
SHORT = np.array([40, 7, 9, 200], np.int32)


@pytest.fixture(scope="module")
def graph() -> bytes:
    """A draft that shares half of the target's layers: right now and then."""
    torch.manual_seed(0)
    draft = Draft.from_target(tiny_model("llama"), (0, 3), np.arange(VOCAB_SIZE)).eval()
    return GraphBuilder(draft.weights(VOCAB_SIZE), 8, 8).build().SerializeToString()


def write(target: Target, drafters: Sequence[OnnxDrafter | NGramDrafter], prompt: NDArray[np.int32]) -> Answer:
    """One text, from a server whose prefix cache is empty."""
    target.pool.clear_cache()
    engine = Engine(target, EngineSettings())
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    task = Task(prompt, sampling, sampling.default_verifier(), patience_s=0.0)
    return run_lockstep(engine, welcome_of(engine), [task], list(drafters), LockstepSettings(1, 1))[0]


def test_a_drafter_that_wrote_other_texts_drafts_like_a_fresh_one(target: Target, graph: bytes) -> None:
    """U052: a long repetitive text, a short unrelated one, the first again, and then some more: same acceptance."""
    fresh = {
        len(prompt): write(target, [OnnxDrafter(graph, threads=1), NGramDrafter()], prompt).stats
        for prompt in (LONG, SHORT)
    }
    assert all(stats.drafted > 0 for stats in fresh.values())
    drafters = [OnnxDrafter(graph, threads=1), NGramDrafter()]
    for prompt in (LONG, SHORT, LONG, *(np.roll(SHORT, turn) for turn in range(1, 6)), LONG, SHORT):
        stats = write(target, drafters, prompt).stats
        if prompt is LONG or prompt is SHORT:
            assert stats == fresh[len(prompt)]

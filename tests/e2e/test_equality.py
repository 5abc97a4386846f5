"""Losslessness on the embedded pair: client sessions, the real draft and one packed engine, without sockets.

Frames travel for a round or more, so that late and stale nodes occur as they do over a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import paceline.bench
from paceline.bench.lockstep import Answer, LockstepSettings, run_lockstep, welcome_of
from paceline.client.drafting.drafter import Candidates, Drafter, DraftRequest, DraftSequence
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.onnx_ssm import OnnxDrafter
from paceline.client.drafting.policy import Policy, StaticPolicy
from paceline.client.drafting.wrong import WrongDrafter
from paceline.client.session import Task
from paceline.models.catalogue import find_bundle, find_target
from paceline.server.engine import Engine, EngineSettings
from paceline.server.loading import load_target
from paceline.server.target import Target
from paceline.shared.sampling import SamplingParams, Verifier

Reference = Callable[[list[list[int]], int], list[list[int]]]
NUM_TOKENS = 64


class RandomDrafter:
    """Proposes random tokens in random numbers: trees of every shape."""

    name, is_instant, max_context, chunk_len = "random", False, 8192, 4096

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)

    def start(self) -> DraftSequence:
        return self

    def expand(self, request: DraftRequest) -> Candidates:
        shape = (request.num_rows, int(self._rng.integers(1, 5)))
        ids = np.sort(self._rng.choice(self._vocab_size, shape[1], replace=False)).astype(np.int32)
        logprobs = np.full(shape, -np.log(4.0), np.float32)
        return Candidates(np.broadcast_to(ids, shape).copy(), logprobs)

    def close(self) -> None:
        return


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def ssm() -> Iterator[Drafter]:
    drafter = OnnxDrafter(find_bundle("smollm2") / "ssm-0.onnx", threads=1)
    yield drafter
    drafter.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Forty varied prompts, as ids of the embedded target."""
    tokenizer = Tokenizer.from_file(str(find_target("smollm2") / "tokenizer.json"))
    path = Path(paceline.bench.__path__[0]) / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 40
    return [tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids for line in lines]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], reference: Reference) -> list[list[int]]:
    """Greedy answers of plain transformers, in fp32."""
    return reference(prompts, NUM_TOKENS)


def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[Drafter],
    sampling: SamplingParams,
    *,
    make_policy: Callable[[], Policy] | None = None,
    num_parallel: int = 4,
    delay: int = 1,
) -> list[Answer]:
    """Every prompt's answer, through sessions, wire and engine; afterwards no KV block is held."""
    engine = Engine(target, EngineSettings(max_nodes=8))
    verifier = sampling.default_verifier()
    tasks = [Task(np.array(prompt, np.int32), sampling, verifier) for prompt in prompts]
    settings = LockstepSettings(num_parallel, delay, calls=2, make_policy=make_policy)
    answers = run_lockstep(engine, welcome_of(engine), tasks, drafters, settings)
    assert target.pool.num_used_blocks == 0
    return answers


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


def test_drafted_greedy_text_is_that_of_transformers(
    target: Target, ssm: Drafter, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    answers = write(target, prompts, [ssm, NGramDrafter()], SamplingParams(max_tokens=NUM_TOKENS))
    assert ids(answers) == expected
    num_tokens = sum(len(answer) for answer in expected)
    assert sum(answer.stats.accepted for answer in answers) > 0.1 * num_tokens
    assert sum(answer.stats.verify_steps for answer in answers) < 0.9 * num_tokens


@pytest.mark.parametrize("widths", [(1, 1, 1, 1, 1), (2, 2, 2, 2), (4, 3, 1), (8, 2)], ids=str)
def test_no_tree_shape_changes_the_text(
    target: Target, ssm: Drafter, prompts: list[list[int]], expected: list[list[int]], widths: tuple[int, ...]
) -> None:
    """U029: whatever static tree <k1..km> is drafted, the ids stay the same."""
    few = slice(0, 40, 8)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    answers = write(target, prompts[few], [ssm], sampling, make_policy=lambda: StaticPolicy(widths))
    assert ids(answers) == expected[few]
    assert sum(answer.stats.accepted for answer in answers) > 0


@pytest.mark.parametrize("name", ["wrong", "random", "none"])
def test_no_drafter_changes_the_text(
    target: Target, prompts: list[list[int]], expected: list[list[int]], name: str
) -> None:
    size = target.info.vocab_size
    drafters: dict[str, list[Drafter]] = {"wrong": [WrongDrafter(size)], "random": [RandomDrafter(size)], "none": []}
    few = slice(1, 40, 8)
    answers = write(target, prompts[few], drafters[name], SamplingParams(max_tokens=NUM_TOKENS), num_parallel=5)
    assert ids(answers) == expected[few]


SAMPLINGS = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]


def seeded_variants(
    target: Target, ssm: Drafter, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> Iterator[tuple[str, list[list[int]]]]:
    """The same seeded answers written in many ways."""
    size = target.info.vocab_size
    yield "drafted", ids(write(target, prompts, [ssm, NGramDrafter()], sampling))
    yield "always wrong", ids(write(target, prompts, [WrongDrafter(size)], sampling))
    yield "random trees", ids(write(target, prompts, [RandomDrafter(size)], sampling, num_parallel=3))
    yield "another batch mix", ids(write(target, prompts, [ssm], sampling, num_parallel=7))
    yield "another arrival timing", ids(write(target, prompts, [ssm], sampling, delay=3))


@pytest.mark.parametrize("changes", SAMPLINGS, ids=str)
def test_seed_gives_the_same_tokens_whatever_drafts(
    target: Target, ssm: Drafter, prompts: list[list[int]], changes: dict[str, float]
) -> None:
    few = prompts[2:40:10]
    sampling = SamplingParams(seed=20, max_tokens=24, **changes)  # type: ignore[arg-type]
    plain = ids(write(target, few, [], sampling))
    for name, answers in seeded_variants(target, ssm, few, sampling):
        assert answers == plain, name
    assert ids(write(target, few, [], SamplingParams(seed=21, max_tokens=24, **changes))) != plain  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SAMPLINGS, ids=str)
def test_seed_gives_the_same_tokens_for_forty_prompts(
    target: Target, ssm: Drafter, prompts: list[list[int]], changes: dict[str, float]
) -> None:
    sampling = SamplingParams(seed=5, max_tokens=NUM_TOKENS, **changes)  # type: ignore[arg-type]
    plain = ids(write(target, prompts[:40], [], sampling, num_parallel=8))
    for name, answers in seeded_variants(target, ssm, prompts[:40], sampling):
        assert answers == plain, name


def test_seeded_request_does_not_feel_its_neighbours(target: Target, ssm: Drafter, prompts: list[list[int]]) -> None:
    """U008, U009: alone, and beside seven neighbours with other seeds and parameters: the same tokens."""
    prompt = np.array(prompts[15], np.int32)
    mine = Task(prompt, SamplingParams(seed=42, temperature=2.0, max_tokens=16), Verifier.COUPLED)
    others = [
        Task(
            np.array(prompts[index], np.int32),
            SamplingParams(
                seed=index, temperature=0.3 * index, max_tokens=12 + index, top_k=4 * (index % 3), presence_penalty=1.0
            ),
            Verifier.COUPLED if index else Verifier.GREEDY,
        )
        for index in range(7)
    ]
    engine = Engine(target, EngineSettings(max_nodes=8))
    alone = run_lockstep(engine, welcome_of(engine), [mine], [ssm], LockstepSettings(8, 1, calls=4))[0]
    crowd = run_lockstep(engine, welcome_of(engine), [*others, mine], [ssm], LockstepSettings(8, 1, calls=4))[-1]
    assert crowd.token_ids.tolist() == alone.token_ids.tolist()


def test_phrase_probes_never_mix(target: Target, ssm: Drafter, reference: Reference) -> None:
    """U050: five probe prompts side by side, joining and leaving in turn: each answer is its own."""
    tokenizer = Tokenizer.from_file(str(find_target("smollm2") / "tokenizer.json"))
    words = ["APPLE", "BANANA", "CHERRY", "DATE", "ELDERBERRY"]
    probes = [tokenizer.encode(f"Repeat after me: {word}. The word is", add_special_tokens=False).ids for word in words]
    alone = reference(probes, 16)
    rng = np.random.default_rng(0)
    order = [int(index) for _ in range(3) for index in rng.permutation(len(words))]
    sampling = SamplingParams(max_tokens=16)
    answers = write(target, [probes[index] for index in order], [ssm, NGramDrafter()], sampling, num_parallel=5)
    assert ids(answers) == [alone[index] for index in order]


def test_answers_know_which_tokens_were_drafted(target: Target, prompts: list[list[int]]) -> None:
    answer = write(target, [prompts[15]], [NGramDrafter()], SamplingParams(max_tokens=48), delay=0)[0]
    assert len(answer.drafted) == len(answer.token_ids)
    assert int(answer.drafted.sum()) == answer.stats.accepted > 8

"""Every sampling parameter acts, and acts alike with drafts over the stream protocol and without them.

One table: what is set, and against what it must make a difference. Each case runs three times: drafted by sessions over
late links, plain as an OpenAI body would have it, and plain without the parameter.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.bench.lockstep import LockstepSettings, run_lockstep, welcome_of
from paceline.bench.markov import MarkovDrafter
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.session import Task
from paceline.server.engine import Engine, EngineSettings
from paceline.server.openai.schema import ChatRequest, CompletionRequest, parse
from paceline.server.plan import StepPlan
from paceline.server.scripted import ScriptedTarget
from paceline.shared.errors import ParameterError
from paceline.shared.messages import Commit, FinishReason, Open
from paceline.shared.sampling import SamplingParams

VOCAB_SIZE = 26
EOS_IDS = (24, 25)
PROMPT = [3, 5, 7, 3, 5]
TABLE = (np.random.default_rng(26).normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 1.5).astype(np.float32)
GUESS = TABLE + np.random.default_rng(27).normal(size=TABLE.shape).astype(np.float32) * 0.3
BASE = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}


def decode(ids):
    return "".join(chr(ord("a") + token) for token in ids)


class NotingEngine(Engine):
    """Keeps all commits."""

    def __init__(self):
        target = ScriptedTarget(lambda context: TABLE[context[-1]], VOCAB_SIZE, eos_token_ids=EOS_IDS)
        super().__init__(target, EngineSettings(), decode)
        self.commits = []

    def finish(self, plan, logits, now):
        messages = super().finish(plan, logits, now)
        self.commits += [message for _, message in messages if isinstance(message, Commit)]
        return messages

    def outcome(self):
        tokens = [token for commit in self.commits for token in commit.tokens.tolist()]
        entries = [entry for commit in self.commits for entry in commit.logprobs]
        return tokens, entries, self.commits[-1].finish


def drafted(sampling, choice=0, delay=0):
    engine = NotingEngine()
    task = Task(np.array(PROMPT, np.int32), sampling, sampling.default_verifier(), choice=choice)
    drafters = (MarkovDrafter(GUESS), NGramDrafter())
    (answer,) = run_lockstep(engine, welcome_of(engine), [task], drafters, LockstepSettings(delay=delay))
    tokens, entries, finish = engine.outcome()
    assert answer.token_ids.tolist() == tokens
    return tokens, entries, finish, answer.stats.accepted


def plain(sampling, choice=0):
    engine = NotingEngine()
    prompt = np.array(PROMPT, np.int32)
    engine.open((0, 0), Open(0, prompt, sampling, sampling.default_verifier(), choice=choice, drafting=False), 0.0)
    while isinstance(step := engine.next_step(0.0), StepPlan):
        engine.finish(step, engine.target.forward(step.batch), 0.0)
    return engine.outcome()


def from_body(params):
    """The same wishes, as they arrive at ``/v1/completions``."""
    return parse(CompletionRequest, json.dumps({"prompt": PROMPT, **params}).encode()).to_sampling()


def same_entries(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


STOPPING = {"stop": "s"}
TABLE_OF_PARAMETERS = {
    "temperature": ({"temperature": 0.2}, {}),
    "temperature 0": ({"temperature": 0.0}, {}),
    "top_k": ({"top_k": 2}, {}),
    "top_p": ({"top_p": 0.3}, {}),
    "min_p": ({"min_p": 0.5}, {}),
    "presence_penalty": ({"presence_penalty": 2.0}, {}),
    "negative presence_penalty": ({"presence_penalty": -2.0}, {}),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {}),
    "greedy frequency_penalty": ({"temperature": 0.0, "frequency_penalty": 2.0}, {"temperature": 0.0}),
    "repetition_penalty": ({"repetition_penalty": 3.0}, {}),
    "logit_bias": ({"logit_bias": {"4": 5.0, "11": -100.0}}, {}),
    "seed": ({"seed": 8}, {}),
    "max_tokens": ({"max_tokens": 5}, {}),
    "ignore_eos": ({"ignore_eos": True}, {"ignore_eos": False, "logit_bias": {"24": 2.0}}),
    "stop_token_ids": ({"stop_token_ids": [18, 3]}, {}),
    "stop": ({"stop": ["s", "d"]}, {}),
    "min_tokens": ({"stop_token_ids": [18, 3], "min_tokens": 12}, {"stop_token_ids": [18, 3]}),
    "min_tokens before stop strings": ({"stop": ["s", "d"], "min_tokens": 12}, {"stop": ["s", "d"]}),
    "all at once": (
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5, "logprobs": 2},
        {},
    ),
}


def given(params):
    """Parameters as the protocol carries them."""
    values = BASE | params
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    return SamplingParams(**values)


@pytest.mark.parametrize("name", TABLE_OF_PARAMETERS)
def test_a_parameter_acts_and_acts_alike_on_both_paths(name):
    params, without = TABLE_OF_PARAMETERS[name]
    params = without | params
    sampling = given(params)
    assert from_body(BASE | params) == sampling
    expected = plain(sampling)
    for delay in (0, 1):
        *outcome, accepted = drafted(sampling, delay=delay)
        assert tuple(outcome[::2]) == expected[::2]
        same_entries(outcome[1], expected[1])
    assert accepted or len(expected[0]) < 8, "drafts must take part for the test to mean anything"
    assert plain(given(without))[0] != expected[0]


def test_outputs_end_where_and_why_they_should():
    tokens, _, finish = plain(given({"max_tokens": 5}))
    assert (len(tokens), finish) == (5, FinishReason.LENGTH)
    for params in ({"stop_token_ids": [18, 3]}, {"stop": ["s", "d"]}):
        tokens, _, finish = plain(given(params))
        assert tokens[-1] in (18, 3) and not {18, 3} & set(tokens[:-1]) and finish is FinishReason.STOP
    tokens, _, finish = plain(given({"stop_token_ids": [18, 3], "min_tokens": 12}))
    assert len(tokens) >= 12 and not {18, 3} & set(tokens[:11])
    for eos in EOS_IDS:
        tokens, _, finish = drafted(given({"ignore_eos": False, "logit_bias": {eos: 3.0}}))[:3]
        assert tokens[-1] in EOS_IDS and not set(EOS_IDS) & set(tokens[:-1]) and finish is FinishReason.STOP


def test_log_probabilities_are_one_for_each_token_and_the_targets_own():
    sampling = given({"logprobs": 3, "top_p": 0.9, "presence_penalty": 1.0})
    tokens, entries, _ = plain(sampling)
    assert len(entries) == len(tokens) == 24
    context = PROMPT[-1:] + tokens
    raw = torch.log_softmax(torch.from_numpy(TABLE), -1).numpy()
    for before, token, entry in zip(context, tokens, entries, strict=False):
        assert entry.logprob == pytest.approx(raw[before, token], abs=1e-5)
        assert [top for top, _ in entry.top] == np.argsort(-raw[before], kind="stable")[:3].tolist()
    same_entries(drafted(sampling)[1], entries)
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}
    assert parse(ChatRequest, json.dumps(chat).encode()).to_sampling().logprobs == 3


def test_choices_of_one_request_differ_and_repeat():
    sampling = given({"n": 3})
    assert from_body(BASE | {"n": 3}) == sampling
    texts = [plain(sampling, choice)[0] for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert [drafted(sampling, choice)[0] for choice in range(3)] == texts
    assert texts[0] == plain(replace(sampling, n=1))[0]


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json": {}},
        {"guided_regex": "a*"},
        {"grammar": "root ::= 'a'"},
        {"json_schema": {"type": "object"}},
        {"structured_outputs": {"regex": "a*"}},
        {"use_beam_search": True},
        {"typical_p": 0.5},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"mirostat": 2},
    ],
)
def test_what_is_not_supported_is_refused_by_name(field):
    body = {"prompt": PROMPT, **field}
    with pytest.raises(ParameterError) as caught:
        parse(CompletionRequest, json.dumps(body).encode())
    assert caught.value.param == next(iter(field))

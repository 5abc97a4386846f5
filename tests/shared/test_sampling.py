"""Sampling parameters: every bad value is refused by name, every good one survives the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shared.errors import ParameterError
from paceline.shared.sampling import SamplingParams, Verifier

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 2),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("seed", -1),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", 10**9),
    ("min_tokens", -1),
    ("stop", ("",)),
    ("stop", ("x" * 513,)),
    ("stop", tuple("abcdefghijklmnopq")),
    ("stop", (7,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**31,)),
    ("stop_token_ids", tuple(range(65))),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 0.5)),
    ("ignore_eos", 1),
    ("logprobs", 21),
    ("n", 0),
    ("n", 10**6),
]


@pytest.mark.parametrize(("param", "value"), BAD, ids=[f"{param}={str(value)[:12]}" for param, value in BAD])
def test_bad_value_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ParameterError):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_unknown_name_on_the_wire_is_refused_and_known_ones_are_listed() -> None:
    with pytest.raises(ParameterError, match="temperature"):
        SamplingParams.from_plain({"temprature": 1.0})


def test_ids_outside_the_vocabulary_are_named() -> None:
    for params in (SamplingParams(logit_bias={64: 1.0}), SamplingParams(stop_token_ids=(64,))):
        with pytest.raises(ParameterError, match="64"):
            params.check_vocabulary(64)
        params.check_vocabulary(65)


def test_default_verifier_follows_the_temperature() -> None:
    assert SamplingParams().default_verifier() is Verifier.GREEDY
    assert SamplingParams(temperature=0.7).default_verifier() is Verifier.COUPLED


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 100),
        top_k=st.integers(0, 100),
        top_p=st.floats(0.01, 1),
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_what_changed_is_enough_to_rebuild(params: SamplingParams) -> None:
    assert SamplingParams.from_plain(params.changed()) == params

"""Runs of ids to text: characters whole, spaces kept, stop strings never shown, cost flat."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.shared.detokenize import Detokenizer, StopMatcher, TextStream
from paceline.shared.sampling import SamplingParams

TEXTS = ["삼겹살", "👩‍👩‍👧‍👦", "नमस्ते", "𝒳", "e\u0301", "a", "", "hello world", "x\n\n  y"]


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: id = byte."""
    return bytes(ids).decode("utf-8", errors="replace")


WORDS = ["the", "cat", "sat", "!", "on", "logs", "and"]


def decode_words(ids: Sequence[int]) -> str:
    """A sentencepiece-like decoder: words carry a space in front, the first space of a text is dropped."""
    text = "".join(WORDS[token] if WORDS[token] == "!" else " " + WORDS[token] for token in ids)
    return text.removeprefix(" ")


@pytest.mark.parametrize("text", TEXTS)
def test_text_cut_at_every_byte_is_whole_characters_only(text: str) -> None:
    raw = list(text.encode())
    for first in range(len(raw) + 1):
        for second in range(first, len(raw) + 1):
            detokenizer = Detokenizer(decode_bytes)
            deltas = [detokenizer.push(part) for part in (raw[:first], raw[first:second], raw[second:])]
            deltas.append(detokenizer.finish())
            assert "\ufffd" not in "".join(deltas)
            assert "".join(deltas) == text


@given(st.text(max_size=60), st.lists(st.integers(1, 9), max_size=40))
def test_deltas_concatenate_to_the_text_however_it_is_cut(text: str, runs: list[int]) -> None:
    raw = list(text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode())
    detokenizer = Detokenizer(decode_bytes)
    parts = []
    for run in [*runs, len(raw)]:
        parts.append(detokenizer.push(raw[:run]))
        raw = raw[run:]
    assert "".join(parts) + detokenizer.finish() == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
def test_spaces_between_words_survive_any_run_length(ids: list[int], run: int) -> None:
    detokenizer = Detokenizer(decode_words)
    text = "".join(detokenizer.push(ids[at : at + run]) for at in range(0, len(ids), run)) + detokenizer.finish()
    assert text == decode_words(ids)


def test_ascii_text_is_shown_with_its_token() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push([byte]) for byte in b"plain"] == list("plain")


def test_invalid_bytes_are_shown_in_the_end_and_block_nothing() -> None:
    detokenizer = Detokenizer(decode_bytes)
    shown = detokenizer.push([0xFF] * 100 + list(b"ok"))
    assert shown.endswith("ok")
    detokenizer = Detokenizer(decode_bytes)
    assert detokenizer.push([0xE2, 0x82]) + detokenizer.finish() == "\ufffd"


def test_cost_per_token_does_not_grow() -> None:
    seen: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return decode_bytes(ids)

    Detokenizer(counting).push(list(b"abcdefgh" * 1000))
    assert max(seen) <= 32
    assert sum(seen[-500:]) <= 2 * sum(seen[:500])


def stream(stops: Sequence[str], runs: Sequence[str]) -> tuple[list[str], TextStream]:
    text = TextStream(decode_bytes, stops)
    return [text.push(list(run.encode()))[0] for run in runs], text


def test_stop_string_early_in_a_long_run_cuts_there() -> None:
    deltas, text = stream(["END"], ["ab END and thirteen more characters"])
    assert (deltas, text.stopped, text.finish()) == (["ab "], True, "")


def test_stop_string_across_runs_is_never_shown() -> None:
    deltas, text = stream(["###"], ["one #", "## two"])
    assert ("".join(deltas), text.stopped) == ("one ", True)


def test_held_text_is_released_when_no_stop_string_comes_of_it() -> None:
    deltas, text = stream(["###"], ["one #", "# ok"])
    assert "".join(deltas) + text.finish() == "one ## ok"
    deltas, text = stream(["###"], ["ends ##"])
    assert "".join(deltas) + text.finish() == "ends ##"


@pytest.mark.parametrize("length", [1, 2, 5, 23, 24, 25])
def test_short_answers_lose_nothing_at_the_end(length: int) -> None:
    answer = "abcdefghijklmnopqrstuvwxyz"[:length]
    deltas, text = stream(["zebra" * 5, answer + "!"], list(answer))
    assert "".join(deltas) + text.finish() == answer


def test_used_ids_end_with_the_one_that_completed_the_stop() -> None:
    text = TextStream(decode_bytes, ["END"])
    assert text.push(list(b"abENDxyz")) == ("ab", 5)


def test_stop_string_before_min_tokens_is_text_and_the_search_goes_on_behind_it() -> None:
    text = TextStream(decode_bytes, ["END"], min_tokens=8)
    assert text.push(list(b"aENDbENDcENDd")) == ("aENDb", 8)
    assert (text.stopped, text.finish()) == (True, "")
    text = TextStream(decode_bytes, ["END"], min_tokens=9)
    assert text.push(list(b"aENDbENDcENDd")) == ("aENDbENDc", 12)
    text = TextStream(decode_bytes, ["aa"], min_tokens=3)
    assert text.push(list(b"aaaa")) == ("aa", 4)


def test_stop_id_adds_no_text_and_counts_from_min_tokens_on() -> None:
    sampling = SamplingParams(stop_token_ids=(ord("."),), min_tokens=3)
    text = TextStream.of(decode_bytes, sampling, [ord("!")])
    assert text.push(list(b"a.bc!d")) == ("a.bc", 5)
    assert text.push(list(b"more")) == ("", 0)
    ignoring = TextStream.of(decode_bytes, SamplingParams(ignore_eos=True), [ord("!")])
    assert ignoring.push(list(b"a!b")) == ("a!b", 3)


@given(st.text("ab#", max_size=40), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_matcher_equals_searching_the_whole_text(text: str, stops: list[str], run: int) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(text[at : at + run]) for at in range(0, len(text), run)) + matcher.finish()
    char_by_char = StopMatcher(stops)
    expected = "".join(char_by_char.push(char) for char in text) + char_by_char.finish()
    assert shown == expected
    assert not any(stop in shown for stop in stops)
    if not any(stop in text for stop in stops):
        assert shown == text

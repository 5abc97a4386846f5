"""Prompt lookup against a slow search, and what it drafts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.drafting.drafter import ANCHOR_KEY, DraftRequest
from paceline.client.drafting.ngram import NGramDrafter, NGramIndex

ORDERS = (9, 6, 4, 3, 2)


def slow_guesses(text, context):
    """Tokens that followed the longest known end of ``context``, latest first."""
    for order in ORDERS:
        gram = list(context[-order:])
        if len(gram) < order:
            continue
        followers = [text[i] for i in range(len(text) - 1, order - 1, -1) if text[i - order : i] == gram]
        if followers:
            return followers[:6]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=12))
def test_index_finds_what_a_slow_search_finds(text, tail):
    index = NGramIndex()
    for token in text:
        index.append(token)
    context = tuple((text + tail)[-9:])
    guesses = index.guesses(context)
    expected = slow_guesses(text, context)
    assert {token for token, _ in guesses} <= set(expected)
    assert bool(guesses) == bool(expected)
    if expected:
        assert expected[0] in {token for token, _ in guesses}
    assert all(0 < confidence < 1 for _, confidence in guesses)


def request(start, tokens, nodes=(), wants_anchor=True):
    keys, ids, parents, depths = (list(column) for column in zip(*nodes, strict=True)) if nodes else ([], [], [], [])
    return DraftRequest(
        0,
        start,
        np.array(tokens, np.int32),
        np.full(len(tokens), ANCHOR_KEY),
        np.array(keys, np.int64),
        np.array(keys, np.int64),
        np.array(ids, np.int32),
        np.array(parents, np.int64),
        np.array(depths, np.int32),
        wants_anchor,
        8,
    )


def test_sequence_continues_a_repeated_phrase_node_by_node():
    sequence = NGramDrafter().start()
    phrase = [10, 11, 12, 13, 14, 15, 16, 17]
    answer = sequence.expand(request(0, [*phrase, 1, 2, *phrase[:3]]))
    assert answer.is_point_mass
    assert answer.token_ids[0, 0] == 13
    answer = sequence.expand(request(13, [], [(0, 13, ANCHOR_KEY, 1)], wants_anchor=False))
    assert answer.token_ids[0, 0] == 14
    answer = sequence.expand(request(13, [], [(1, 14, 0, 2), (2, 15, 1, 3)], wants_anchor=False))
    assert answer.token_ids[:, 0].tolist() == [15, 16]
    again = sequence.expand(request(12, [12]))
    assert again.token_ids[0, 0] == 13, "the anchor may be asked for once more"


def test_text_without_repetition_gets_no_guess():
    sequence = NGramDrafter().start()
    answer = sequence.expand(request(0, list(range(50))))
    assert answer.token_ids.shape == (1, 0)

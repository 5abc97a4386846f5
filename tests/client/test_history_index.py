"""Lookups in earlier conversations against a slow search through all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.drafting.history_index import ORDERS, HistoryIndex

VOCAB = 4
CONVERSATIONS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), max_size=5)


def slow_followers(conversations, context, longer_than=0):
    """(order, tokens that followed the longest known end of ``context``, latest first)."""
    for order in reversed(ORDERS):
        gram = list(context[-order:])
        if order <= longer_than or len(gram) < order:
            continue
        followers = [
            text[place]
            for text in reversed(conversations)
            for place in range(len(text) - 1, order - 1, -1)
            if text[place - order : place] == gram
        ]
        if followers:
            return order, followers[:6]
    return 0, []


def index_of(conversations, vocab_size=VOCAB):
    return HistoryIndex([np.array(tokens, np.int32) for tokens in conversations], vocab_size)


@given(CONVERSATIONS, st.lists(st.integers(0, VOCAB - 1), max_size=12), st.sampled_from([0, 2, 3, 6, 9]))
def test_index_finds_what_a_slow_search_finds(conversations, end, longer_than):
    context = tuple(((conversations[0][:9] if conversations else []) + end)[-9:])
    match = index_of(conversations).find(context, longer_than)
    order, followers = slow_followers(conversations, context, longer_than)
    assert match.order == order
    assert {token for token, _ in match.guesses} <= set(followers)
    assert bool(match.guesses) == bool(followers)
    assert sum(confidence for _, confidence in match.guesses) < 1
    if followers:
        weights = {}
        for age, token in enumerate(followers):
            weights[token] = weights.get(token, 0.0) + 0.7**age
        assert abs(weights[match.guesses[0][0]] - max(weights.values())) < 1e-9


@given(CONVERSATIONS)
def test_every_place_of_a_conversation_is_found_again(conversations):
    index = index_of(conversations)
    for tokens in conversations:
        for place in range(3, len(tokens)):
            assert index.find(tuple(tokens[max(0, place - 9) : place])).order >= 3


def test_match_never_spans_two_conversations():
    index = index_of([[1, 2, 3], [0, 1]])
    assert index.find((1, 2, 3)).order == 0
    assert index.find((2, 3, 0)).order == 0


def test_conversation_with_ids_that_the_target_does_not_have_is_left_out():
    index = index_of([[1, 2, 3, 1], [1, 2, 3, 9]], vocab_size=4)
    assert index.num_tokens == 4
    assert index.find((1, 2, 3)).guesses[0][0] == 1


def test_empty_history_matches_nothing():
    assert index_of([]).find((1, 2, 3)).order == 0
    assert index_of([[1]]).find((1, 1, 1)).order == 0


def test_index_of_a_full_history_is_bounded_in_memory():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 49152, 250_000).astype(np.int32)
    index = HistoryIndex([tokens], 49152)
    arrays = [index._tokens, *index._hashes.values(), *index._places.values()]
    assert sum(array.nbytes for array in arrays) <= 250_000 * (4 + 12 * len(ORDERS))
    for place in (10, 1000, 249_999):
        match = index.find(tuple(tokens[place - 9 : place].tolist()))
        assert match.order == 9
        assert match.guesses[0][0] == tokens[place]

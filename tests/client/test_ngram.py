"""Prompt lookup against a slow search, and what it drafts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.client.drafting.drafter import ANCHOR_KEY, DraftRequest
from paceline.client.drafting.history_index import HistoryIndex
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
    guesses = index.find(context).guesses
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


def test_longer_match_of_an_earlier_conversation_wins_and_ties_go_to_the_present_text():
    drafter = NGramDrafter()
    earlier = [20, 21, 22, 23, 24, 25, 26]
    drafter.earlier = HistoryIndex([np.array(earlier, np.int32)], 64)
    here = [22, 23, 24, 40, 1, 22, 23, 24]  # three tokens match here too
    assert drafter.start().expand(request(0, here)).token_ids[0, 0] == 40
    longer = [22, 23, 24, 40, 1, 21, 22, 23, 24]  # four match there
    assert drafter.start().expand(request(0, longer)).token_ids[0, 0] == 25
    assert drafter.start().expand(request(0, [1, 2, 20, 21, 22])).token_ids[0, 0] == 23


def test_earlier_conversation_is_followed_node_by_node():
    drafter = NGramDrafter()
    drafter.earlier = HistoryIndex([np.arange(20, 40, dtype=np.int32)], 64)
    sequence = drafter.start()
    assert sequence.expand(request(0, [20, 21, 22])).token_ids[0, 0] == 23
    answer = sequence.expand(request(3, [], [(0, 23, ANCHOR_KEY, 1), (1, 24, 0, 2)], wants_anchor=False))
    assert answer.token_ids[:, 0].tolist() == [24, 25]


def test_nothing_of_other_texts_is_known_without_a_history():
    drafter = NGramDrafter()
    assert drafter.earlier is None
    sequence = drafter.start()
    sequence.expand(request(0, list(range(20, 40))))
    sequence.close()
    assert drafter.start().expand(request(0, [20, 21, 22])).token_ids.shape == (1, 0)


def test_conversation_known_by_heart_is_accepted_nearly_whole(lab):
    world = lab.World(lab.target())
    prompt = [3, 1, 4, 1, 5]
    answer = world.target.greedy(prompt, 60)
    drafter = NGramDrafter()
    drafter.earlier = HistoryIndex([np.array([*prompt, *answer], np.int32)], 32)
    peers = [world.client(prompt, [each], max_tokens=60) for each in (NGramDrafter(), drafter)]
    world.run()
    assert [peer.token_ids for peer in peers] == [answer, answer]
    plain, remembered = (peer.session.stats.accepted for peer in peers)
    assert remembered > plain
    assert remembered >= 30

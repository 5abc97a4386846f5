"""The client session: lossless, full duplex, exactly once, whatever drafters and links do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.drafting.policy import BestFirstPolicy, StaticPolicy
from paceline.client.drafting.wrong import WrongDrafter
from paceline.client.session import ClientSession, Failed, Finished, Started, Task, Tokens
from paceline.server.scripted import markov
from paceline.shared.errors import ProtocolError
from paceline.shared.messages import Commit, Fault, FinishReason, Grow, Limits, Opened, StepTime, Welcome
from paceline.shared.sampling import SamplingParams, Verifier

PROMPT = [3, 1, 4, 1, 5]
WELCOME = Welcome(1, "m", "", 32, (0,), None, Limits(), StepTime(0.03, 0.0005))


def run_one(lab, drafters, *, tokens=60, **options):
    world = lab.World(lab.target())
    peer = world.client(PROMPT, drafters, max_tokens=tokens, **options)
    world.run()
    return world, peer


def make_drafters(lab, kinds, seed=0):
    made = {
        "good": lambda: lab.ScriptedDrafter(markov(32, seed), noise=0.3),
        "poor": lambda: lab.ScriptedDrafter(markov(32, seed), noise=5.0, seed=1),
        "ngram": NGramDrafter,
        "wrong": lambda: WrongDrafter(32),
    }
    return [made[kind]() for kind in kinds]


@pytest.mark.parametrize(
    "kinds", [(), ("good",), ("poor",), ("wrong",), ("ngram",), ("good", "ngram"), ("good", "poor", "ngram")]
)
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.15])
def test_session_output_is_the_targets_greedy_output_whatever_drafts_it(lab, kinds, delay):
    world, peer = run_one(lab, make_drafters(lab, kinds), delay=delay, jitter=delay / 2)
    assert peer.token_ids == world.target.greedy(PROMPT, 60)
    assert peer.session.output.tolist() == peer.token_ids
    assert peer.session.finish is FinishReason.LENGTH


@given(
    seed=st.integers(0, 5),
    kinds=st.lists(st.sampled_from(["good", "poor", "ngram", "wrong"]), max_size=3),
    delay=st.floats(0, 0.2),
    jitter=st.floats(0, 0.1),
    call_s=st.floats(0.002, 0.2),
    widths=st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    drops=st.lists(st.floats(0.05, 2.0), max_size=3),
    sampled=st.booleans(),
)
@settings(max_examples=12)
def test_session_is_lossless_over_any_link_with_any_drafters(
    lab, seed, kinds, delay, jitter, call_s, widths, drops, sampled
):
    params = {"temperature": 0.8, "seed": 11, "top_p": 0.95} if sampled else {}
    plain = lab.World(lab.target(seed=seed))
    reference = plain.client(PROMPT, max_tokens=30, **params)
    plain.run()
    world = lab.World(lab.target(seed=seed))
    policy = BestFirstPolicy() if widths is None else StaticPolicy(widths)
    peer = world.client(
        PROMPT,
        make_drafters(lab, kinds, seed),
        policy=policy,
        delay=delay,
        jitter=jitter,
        call_s=call_s,
        max_tokens=30,
        **params,
    )
    for when in drops:
        world.at(when, peer.drop)
    world.run()
    assert peer.token_ids == reference.token_ids


def test_session_with_a_good_drafter_commits_several_tokens_per_step(lab):
    _, peer = run_one(lab, make_drafters(lab, ["good"]), tokens=200)
    stats = peer.session.stats
    assert 200 / stats.verify_steps > 2.0
    assert stats.accepted == sum(peer.drafted)
    assert stats.accepted + stats.verify_steps == 200 or stats.accepted + stats.verify_steps == 201


def test_session_with_a_long_link_still_runs_ahead_of_plain_streaming(lab):
    _, plain = run_one(lab, [], tokens=200, delay=0.05)
    _, drafted = run_one(lab, [lab.ScriptedDrafter(markov(32, 0), noise=0.0)], tokens=200, delay=0.05)
    assert plain.times[-1] / drafted.times[-1] > 1.5


@pytest.mark.parametrize("kind", ["wrong", "poor"])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_useless_drafter_costs_at_most_one_percent(lab, kind, delay):
    _, plain = run_one(lab, [], tokens=128, delay=delay)
    _, drafted = run_one(lab, make_drafters(lab, [kind]), tokens=128, delay=delay)
    assert drafted.times[-1] <= 1.01 * plain.times[-1]


def test_wrong_drafter_is_switched_off_with_its_figures_within_32_tokens(lab):
    _, peer = run_one(lab, make_drafters(lab, ["wrong"]), tokens=32, delay=0.1)
    assert not peer.session.controller.is_on
    assert "off (acceptance 0.00" in peer.session.controller.explain()


def test_drafter_that_stalls_for_two_seconds_delays_nothing(lab):
    _, plain = run_one(lab, [], tokens=100)
    _, stalled = run_one(lab, make_drafters(lab, ["good"]), tokens=100, call_s=2.0)
    assert stalled.times[-1] <= 1.005 * plain.times[-1]


def test_session_counts_node_ids_up_and_names_earlier_parents(lab):
    _, peer = run_one(lab, make_drafters(lab, ["good", "ngram"]), tokens=80)
    expected = 0
    for _, message, _ in peer.frames:
        if isinstance(message, Grow):
            assert message.first_id == expected
            ids = np.arange(expected, expected + len(message.tokens))
            assert (message.parents < ids).all()
            expected += len(message.tokens)
    assert expected == peer.session.stats.drafted > 0


def test_drafting_stops_at_the_drafters_context_and_the_text_goes_on(lab):
    target = lab.target(max_context=64)
    world = lab.World(target)
    drafter = lab.ScriptedDrafter(markov(32, 0), max_context=32)
    peer = world.client(list(range(20)), [drafter], max_tokens=44)
    world.run()
    assert peer.token_ids == target.greedy(list(range(20)), 44)
    assert peer.session.finish is FinishReason.LENGTH


def test_nodes_keep_within_remaining_tokens_and_context(lab):
    _, peer = run_one(lab, [lab.ScriptedDrafter(markov(32, 0))], tokens=12, delay=0.0, call_s=0.0005)
    assert max((len(m.tokens) + m.at for _, m, _ in peer.frames if isinstance(m, Grow)), default=0) > 0
    deepest = 0
    depth_of = {}
    for _, message, _ in peer.frames:
        if not isinstance(message, Grow):
            continue
        for offset, parent in enumerate(message.parents.tolist()):
            position = message.at if parent == -1 else depth_of[parent] + 1
            depth_of[message.first_id + offset] = position
            deepest = max(deepest, position)
    assert deepest <= len(PROMPT) + 12 - 2, "the last token never needs a draft"


def test_cancel_frees_the_generation_on_the_server(lab):
    world = lab.World(lab.target())
    peer = world.client(PROMPT, make_drafters(lab, ["good"]), max_tokens=500)

    def cancel():
        peer.session.cancel()
        peer.pump()

    world.at(0.5, cancel)
    world.at(1.0, lambda: None)
    world.run()
    while world.heap and world.now < 1.0:
        world.now, _, action = __import__("heapq").heappop(world.heap)
        action()
    assert world.engine.is_idle
    assert peer.session.finish is FinishReason.CANCELLED


def session(prompt=(1, 2, 3), **sampling):
    task = Task(np.array(prompt, np.int32), SamplingParams(**sampling), Verifier.GREEDY)
    return ClientSession(0, task, WELCOME)


def commit(at, tokens, **fields):
    fields = {"num_drafted": 0, "num_scored": 0, "node_budget": 8, "step_s": 0.03, **fields}
    return Commit(0, at, np.array(tokens, np.int32), **fields)


def test_session_ignores_an_identical_duplicate_and_refuses_gaps_and_other_texts():
    one = session()
    one.open(0.0)
    assert isinstance(one.receive(Opened(0, 2), 0.0)[0], Started)
    (event,) = one.receive(commit(3, [7, 8]), 0.1)
    assert isinstance(event, Tokens)
    assert (event.at, event.token_ids.tolist()) == (3, [7, 8])
    assert one.receive(commit(3, [7, 8]), 0.1) == []
    (event,) = one.receive(commit(4, [8, 9], num_drafted=1), 0.2)
    assert (event.token_ids.tolist(), event.drafted.tolist()) == ([9], [False])
    with pytest.raises(ProtocolError, match="expected a commit at position 6"):
        one.receive(commit(7, [1]), 0.3)
    with pytest.raises(ProtocolError, match="stay as it is"):
        one.receive(commit(4, [9]), 0.3)
    with pytest.raises(ProtocolError, match="behind the prompt"):
        one.receive(commit(2, [3]), 0.3)
    assert one.output.tolist() == [7, 8, 9]


def test_session_reports_the_end_and_errors_and_then_takes_nothing():
    one = session()
    one.open(0.0)
    events = one.receive(commit(3, [7], finish=FinishReason.STOP), 0.1)
    assert [type(event) for event in events] == [Tokens, Finished]
    assert one.receive(commit(4, [7]), 0.2) == []
    other = session()
    other.open(0.0)
    (failure,) = other.receive(Fault("context_length_exceeded", "too long", 0), 0.1)
    assert isinstance(failure, Failed)
    assert failure.error.exit_code == 2


def test_reopen_carries_prompt_committed_output_and_restarts_node_ids(lab):
    one = session(max_tokens=10)
    one.open(0.0)
    one.outgoing(0.0)
    one.receive(commit(3, [7, 8]), 0.1)
    one.reopen(5, WELCOME, 0.2)
    (opening,) = one.outgoing(0.2)
    assert (opening.generation, opening.prompt.tolist(), opening.committed.tolist()) == (5, [1, 2, 3], [7, 8])


def test_mss_text_is_drafted_and_every_frame_carries_its_proposals(lab):
    drafters = [lab.ScriptedDrafter(markov(32, 0), noise=0.3, width=16)]
    _, peer = run_one(lab, drafters, tokens=80, temperature=1.0, seed=5, verifier=Verifier.MSS)
    grows = [message for _, message, _ in peer.frames if isinstance(message, Grow)]
    assert grows
    for frame in grows:
        assert frame.drafters is not None
        keys = {(int(p), int(d)) for p, d in zip(frame.parents, frame.drafters, strict=True)}
        assert keys == set(frame.proposals)
    assert peer.session.stats.accepted > 10


@pytest.mark.parametrize("kinds", [("ngram", "good"), ("good", "ngram"), ("wrong",)])
def test_mss_and_naive_survive_links_and_drops(lab, kinds):
    for verifier in (Verifier.MSS, Verifier.NAIVE):
        world = lab.World(lab.target())
        peer = world.client(
            PROMPT, make_drafters(lab, kinds), max_tokens=50, temperature=1.0, seed=5, verifier=verifier
        )
        world.at(0.4, peer.drop)
        world.run()
        assert len(peer.token_ids) == 50

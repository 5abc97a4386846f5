"""The engine on a virtual clock: whatever is drafted, the output is the target's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline.server.engine import EngineSettings
from paceline.server.scheduler import StepLimits
from paceline.server.scripted import ScriptedTarget, markov, recital
from paceline.shared.errors import BusyError, ContextError, ParameterError, ProtocolError
from paceline.shared.messages import Cancel, FinishReason, Grow, Limits, StepTime

PROMPT = [1, 2, 3, 4, 5]
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Shrinking a whole run takes minutes and helps little; the seed of a failure is printed."""
MODEL = StepTime(0.03, 0.0005)


def make_settings(**changes):
    return EngineSettings(**{"step_time": MODEL, **changes})


def test_engine_without_drafts_writes_the_targets_greedy_output(lab):
    world = lab.World(lab.target())
    client = world.client(PROMPT, max_tokens=40)
    world.run()
    assert client.received == world.target.greedy(PROMPT, 40)
    assert client.finish is FinishReason.LENGTH
    assert len(client.commits) == 40
    assert world.target.pool.num_used_blocks == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("widths", [(1, 5), (1, 1, 1, 1, 1, 1), (2, 2, 2, 2), (4, 4, 4), (3, 3, 3, 3), (3, 1, 1, 1)])
def test_engine_with_an_oracle_writes_the_same_in_fewer_steps(lab, widths, rank):
    target = lab.target()
    expected = target.greedy(PROMPT, 60)
    world = lab.World(target, make_settings(max_nodes=256))
    drafter = lab.oracle(expected, widths=widths, rank=rank)
    client = world.client(PROMPT, drafter, max_tokens=60, link={"delay": 0.001})
    world.run()
    assert client.received == expected
    assert len(client.commits) < 50


def test_engine_with_an_always_wrong_drafter_writes_the_same_and_cuts_its_budget(lab):
    target = lab.target()
    expected = target.greedy(PROMPT, 120)
    world = lab.World(target)
    client = world.client(PROMPT, lab.oracle(expected, widths=(4, 4, 3), wrong=True), max_tokens=120)
    world.run()
    assert client.received == expected
    assert sum(commit.num_drafted for commit in client.commits) == 0
    assert client.commits[0].node_budget >= 8
    assert max(commit.node_budget for commit in client.commits[40:]) <= 4
    assert sum(commit.num_scored for commit in client.commits[40:]) <= 40


def test_budget_recovers_when_a_wrong_drafter_turns_right(lab):
    target = lab.target()
    expected = target.greedy(PROMPT, 400)
    bad, good = (lab.oracle(expected, widths=(1,) * 6, wrong=wrong) for wrong in (True, False))
    world = lab.World(target)
    client = world.client(
        PROMPT, lambda client: (bad if len(client.known) < 100 else good)(client), max_tokens=400, link={"delay": 0.001}
    )
    world.run()
    assert client.received == expected
    assert client.commits[99].node_budget <= 4
    assert client.commits[-1].node_budget >= 6


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=NO_SHRINK)
@given(data=st.data())
def test_any_tree_any_delay_any_mix_gives_the_targets_own_output(lab, data):
    seed = data.draw(st.integers(0, 3), label="target")
    target = lab.target(
        vocab=24, seed=seed, num_blocks=data.draw(st.sampled_from([12, 64]), label="blocks"), block_size=4
    )
    rows = data.draw(st.sampled_from([3, 12, 1024]), label="rows")
    world = lab.World(target, make_settings(step_limits=StepLimits(max_rows=rows)))
    outputs = []
    for number in range(data.draw(st.integers(1, 4), label="clients")):
        prompt = data.draw(st.lists(st.integers(0, 23), min_size=1, max_size=12), label="prompt")
        outputs.append(target.greedy(prompt, 25))
        link = {
            "delay": data.draw(st.sampled_from([0.0, 0.01, 0.2]), label="delay"),
            "jitter": data.draw(st.sampled_from([0.0, 0.05]), label="jitter"),
            "every": data.draw(st.sampled_from([0.005, 0.04]), label="every"),
            "seed": data.draw(st.integers(0, 1000), label="seed") + number,
        }
        right = data.draw(st.sampled_from([0.0, 0.6, 1.0]), label="right")
        world.client(prompt, lab.chatter(outputs[-1], vocab=24, right=right), max_tokens=25, link=link)
    world.run()
    for client, expected in zip(world.clients.values(), outputs, strict=True):
        assert client.fault is None
        assert client.received == expected
    assert target.pool.num_used_blocks == 0


def test_sampled_output_is_the_same_with_and_without_drafts(lab):
    def run(drafter):
        world = lab.World(lab.target())
        client = world.client(PROMPT, drafter, temperature=1.0, seed=7, max_tokens=60)
        world.run()
        return client.received

    plain = run(None)
    assert run(lab.oracle(plain)) == plain
    assert run(lab.oracle(plain, wrong=True)) == plain
    assert run(lab.chatter(plain)) == plain
    assert len(set(plain)) > 5


def test_neighbours_change_nothing_and_offsets_advance_on_their_own(lab):
    """U047, U050: an oracle, an always-wrong and a half-right row, mixed prompt lengths, join and leave."""
    target = lab.target()
    prompts = [[1], [2, 3, 4, 5, 6, 7], list(range(20)), [9, 9, 9], [4, 4]]
    alone = [target.greedy(prompt, 100) for prompt in prompts]
    world = lab.World(target)
    for index, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
        drafters = [lab.oracle(expected), lab.oracle(expected, wrong=True), lab.chatter(expected), None]
        world.client(prompt, drafters[index % 4], max_tokens=100, link={"delay": 0.01 * index, "jitter": 0.02})
    world.run()
    assert [client.received for client in world.clients.values()] == alone


def test_preempted_generations_lose_and_double_nothing(lab):
    """U054: KV for one and a half generations, eight at once."""
    target = lab.target(num_blocks=78, block_size=4)
    prompts = [[index + 1] * 8 for index in range(8)]
    expected = [target.greedy(prompt, 200) for prompt in prompts]
    world = lab.World(target)
    for prompt, output in zip(prompts, expected, strict=True):
        world.client(prompt, lab.oracle(output, widths=(2, 1, 1, 1)), max_tokens=200)
    world.run()
    assert [client.received for client in world.clients.values()] == expected
    assert world.engine.num_preempted >= 10
    assert target.pool.num_used_blocks == 0


def test_tight_kv_preempts_often_and_still_writes_the_same(lab):
    target = lab.target(num_blocks=20, block_size=4)
    prompts = [[index + 1] * 6 for index in range(5)]
    expected = [target.greedy(prompt, 60) for prompt in prompts]
    world = lab.World(target)
    for prompt, output in zip(prompts, expected, strict=True):
        world.client(prompt, lab.chatter(output), max_tokens=60)
    world.run()
    assert [client.received for client in world.clients.values()] == expected
    assert world.engine.num_preempted >= 5


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_resume_goes_on_with_the_same_tokens(lab, right):
    whole = lab.World(lab.target())
    first = whole.client(PROMPT, temperature=1.0, seed=3, presence_penalty=1.0, max_tokens=50)
    whole.run()
    world = lab.World(lab.target())
    drafter = lab.chatter(first.received, right=right)
    rest = world.client(
        PROMPT, drafter, committed=first.received[:20], temperature=1.0, seed=3, presence_penalty=1.0, max_tokens=50
    )
    world.run()
    assert rest.received == first.received[20:]


def test_nothing_behind_an_accepted_end_of_text_is_committed(lab):
    """U022, U023: any of several end-of-text ids cuts the run; the id itself counts."""
    text = [5, 6, 7, 30, 8, 9]
    for eos in (30, 31):
        text[3] = eos
        target = ScriptedTarget(recital([PROMPT + text], 32, 0), 32, eos_token_ids=(30, 31))
        world = lab.World(target)
        client = world.client(PROMPT, lab.oracle(text, widths=(1,) * 6), max_tokens=20)
        world.run()
        assert client.received == [5, 6, 7, eos]
        assert client.finish is FinishReason.STOP
        ignoring = lab.World(ScriptedTarget(recital([PROMPT + text], 32, 0), 32, eos_token_ids=(30, 31)))
        client = ignoring.client(PROMPT, lab.oracle(text, widths=(1,) * 6), max_tokens=6, ignore_eos=True)
        ignoring.run()
        assert client.received == text


def letters(ids):
    return "".join(chr(97 + token) if token < 26 else "#" for token in ids)


@pytest.mark.parametrize("width", [1, 8])
def test_stop_string_early_in_an_accepted_run_ends_it_there(lab, width):
    """U017: a run of 16 tokens whose third to fifth spell the stop string."""
    text = [0, 1, 4, 13, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    target = ScriptedTarget(recital([PROMPT + text], 32, 31), 32)
    world = lab.World(target, decode=letters)
    client = world.client(PROMPT, lab.oracle(text, widths=(1,) * 16), max_tokens=16, stop=("end",))
    world.run()
    assert client.received == text[:5]
    assert client.finish is FinishReason.STOP
    assert letters(client.received).endswith("end")
    assert client.commits[-1].num_drafted <= len(client.commits[-1].tokens)


def test_max_tokens_is_met_exactly_inside_a_run(lab):
    target = lab.target()
    expected = target.greedy(PROMPT, 50)
    world = lab.World(target)
    client = world.client(PROMPT, lab.oracle(expected, widths=(1,) * 8), max_tokens=10)
    world.run()
    assert client.received == expected[:10]
    assert client.finish is FinishReason.LENGTH


def test_context_end_clips_the_output_and_the_tree(lab):
    """U087: context 64, prompt 20: 44 tokens; prompt 60: 4; prompt 64: refused."""
    for prompt_len, room in ((20, 44), (60, 4)):
        prompt = [index % 32 for index in range(prompt_len)]
        target = lab.target(max_context=64)
        expected = target.greedy(prompt, room)
        world = lab.World(target)
        client = world.client(prompt, lab.oracle(expected + [1] * 9, widths=(2,) + (1,) * 5))
        world.run()
        assert client.received == expected
        assert client.finish is FinishReason.LENGTH
    world = lab.World(lab.target(max_context=64))
    client = world.client([1] * 64)
    with pytest.raises(ContextError, match="max_context=64"):
        world.engine.open(client.key, client.request, 0.0)


def test_cancel_frees_at_once_even_during_a_step(lab):
    world = lab.World(lab.target())
    client = world.client(PROMPT, max_tokens=1000)
    other = world.client([7, 8], max_tokens=60)
    world.at(0.5, lambda: world.feed(client.key, Cancel(0)))
    world.run()
    assert client.finish is FinishReason.CANCELLED
    assert client.received == world.target.greedy(PROMPT, 1000)[: len(client.received)]
    assert other.received == world.target.greedy([7, 8], 60)
    assert world.target.pool.num_used_blocks == 0


def test_disconnect_frees_all_generations_of_a_connection(lab):
    world = lab.World(lab.target())
    client = world.client(PROMPT, max_tokens=1000)
    other = world.client([7, 8], max_tokens=60)
    world.at(0.4, lambda: world.engine.disconnect(client.key[0]))
    world.run(until=4.0)
    assert world.engine.is_idle
    assert other.received == world.target.greedy([7, 8], 60)
    assert client.finish is None


def frame(first_id, tokens, parents, at=5):
    return Grow(0, at, first_id, np.array(tokens, np.int32), np.array(parents, np.int32))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(3, [1], [-1]), "protocol"),
        (frame(0, [1], [-1], at=9999), "protocol"),
        (frame(0, [1], [-1], at=2), "protocol"),
        (frame(0, [99], [-1]), "invalid_tree"),
        (frame(0, [-1], [-1]), "invalid_tree"),
        (frame(0, [1], [0]), "invalid_tree"),
        (frame(0, [1, 2], [1, 0]), "invalid_tree"),
        (frame(0, [1], [-5]), "invalid_tree"),
        (frame(0, [1] * 300, [-1] * 300), "limit"),
        (frame(0, list(range(20)), list(range(-1, 19))), "limit"),
    ],
)
def test_a_malformed_tree_ends_its_generation_and_no_other(lab, bad, code):
    """U068, on the engine: typed, at once, and the neighbour's text is untouched."""
    world = lab.World(lab.target(), make_settings(limits=Limits(max_depth=8)))
    culprit = world.client(PROMPT, max_tokens=1000)
    other = world.client([7, 8], max_tokens=30)
    world.at(0.021, lambda: world.feed(culprit.key, bad))
    world.run()
    assert culprit.fault is not None
    assert culprit.fault.code == code
    assert culprit.fault.generation == 0
    assert other.received == world.target.greedy([7, 8], 30)
    assert world.target.pool.num_used_blocks == 0


def test_nan_logits_end_one_generation_and_no_other(lab):
    base = markov(32, 0)

    def next_logits(context):
        return np.full(32, np.nan, np.float32) if context[0] == 31 and len(context) > 10 else base(context)

    world = lab.World(ScriptedTarget(next_logits, 32))
    culprit = world.client([31, 2], max_tokens=40)
    other = world.client(PROMPT, max_tokens=40)
    world.run()
    assert culprit.fault is not None
    assert len(culprit.received) == 9
    assert other.received == world.target.greedy(PROMPT, 40)


def test_a_full_queue_refuses_and_says_when_to_come_back(lab):
    """U080: one runs, one waits, the third is refused; a queued one whose client left never runs."""
    world = lab.World(lab.target(), make_settings(max_running=1, max_queue=1))
    clients = [world.client([index + 1], max_tokens=5) for index in range(3)]
    for client in clients[:2]:
        world.engine.open(client.key, client.request, 0.0)
    with pytest.raises(BusyError) as caught:
        world.engine.open(clients[2].key, clients[2].request, 0.0)
    assert caught.value.retry_after_s > 0
    world.engine.disconnect(clients[1].key[0])
    assert world.engine.num_waiting <= 1
    while not world.engine.is_idle:
        plan = world.engine.next_step(0.0)
        world.engine.finish(plan, world.target.forward(plan.batch), 0.1)
    assert world.engine.counters.num_finished == 1


def test_bad_requests_are_refused_by_name(lab):
    world = lab.World(lab.target())
    table = [
        ({"prompt": [99]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": PROMPT, "committed": [77]}, "committed"),
        ({"prompt": PROMPT, "stop_token_ids": (5000,)}, "stop_token_ids"),
        ({"prompt": PROMPT, "logit_bias": {5000: 1.0}}, "logit_bias"),
        ({"prompt": PROMPT, "stop": ("x",)}, "stop"),
        ({"prompt": PROMPT, "temperature": 1.0}, "seed"),
    ]
    for wish, param in table:
        client = world.client(wish.pop("prompt"), **wish)
        with pytest.raises(ParameterError) as caught:
            world.engine.open(client.key, client.request, 0.0)
        assert caught.value.param == param
    good = world.client(PROMPT)
    world.engine.open(good.key, good.request, 0.0)
    with pytest.raises(ProtocolError, match="in use"):
        world.engine.open(good.key, good.request, 0.0)


def test_prefill_is_chunked_and_others_go_on_meanwhile(lab):
    target = lab.target(max_context=2000)
    limits = StepLimits(max_rows=64, prefill_step_s=0.04)
    world = lab.World(target, make_settings(step_limits=limits))
    quick = world.client([7, 8], max_tokens=60)
    long_prompt = [index % 32 for index in range(900)]
    long = world.client(long_prompt, max_tokens=10)
    world.run()
    assert quick.received == target.greedy([7, 8], 60)
    assert long.received == target.greedy(long_prompt, 10)
    assert max(target.num_rows) <= 64
    gaps = np.diff(quick.times)
    assert gaps.max() < 0.08


@pytest.mark.parametrize("answer_len", range(6, 14))
def test_a_second_turn_recomputes_less_than_a_block(lab, answer_len):
    """U025: KV is published up to the delivered boundary; what was accepted behind the end of text is not."""
    answer = [*(5 + index for index in range(answer_len)), 30]
    first_turn, second_turn = PROMPT + answer, PROMPT + answer + [20, 21]
    texts = [[*second_turn, 9, 8, 7], [*first_turn, 1, 2, 3, 4, 1, 2, 3, 4]]
    target = ScriptedTarget(recital(texts[::-1], 32, 30), 32, eos_token_ids=(30,), block_size=4)
    world = lab.World(target)
    drafted = texts[1][len(PROMPT) :]
    first = world.client(PROMPT, lab.oracle(drafted, widths=(1,) * 8), max_tokens=40, link={"delay": 0.001})
    world.run()
    assert first.received == answer
    assert sum(commit.num_drafted for commit in first.commits) > answer_len // 2
    again = lab.World(target)
    second = again.client(second_turn, max_tokens=2)
    again.run()
    assert second.received == [9, 8]
    assert len(first_turn) - 4 <= second.opened.cached_tokens <= len(first_turn)


@pytest.mark.parametrize("kind", ["wrong", "half right"])
def test_rejected_tokens_are_never_found_in_the_prefix_cache(lab, kind):
    """U048: nor does a prompt whose last token differs find more than what they share."""
    target = lab.target(block_size=4)
    expected = target.greedy(PROMPT, 40)
    drafter = lab.oracle(expected, widths=(2, 2, 2, 2), wrong=True) if kind == "wrong" else lab.chatter(expected)
    world = lab.World(target)
    client = world.client(PROMPT, drafter, max_tokens=40)
    world.run()
    assert client.received == expected
    assert target.pool.num_cached_blocks >= 10
    whole = PROMPT + expected
    for number, path in enumerate(sorted(client.proposed)):
        text = [*PROMPT, *path, 0, 0, 0, 0]
        shared = next(i for i, token in enumerate(text) if i == len(whole) or token != whole[i])
        assert target.pool.open(1000 + number, np.array(text, np.int32)) <= shared
        target.pool.free(1000 + number)
    changed = [*PROMPT[:-1], 9]
    for prompt in (PROMPT, changed, PROMPT):
        again = lab.World(target)
        client = again.client(prompt, max_tokens=20)
        again.run()
        assert client.received == target.greedy(prompt, 20)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_kv_moved_by_a_verification_is_at_most_that_of_the_accepted_tokens(lab, rank):
    """And none at all where the right path lies first in its tree."""
    target = lab.target()
    expected = target.greedy(PROMPT, 80)
    steps = []

    class WatchedWorld(lab.World):
        def land(self, plan, logits):
            counters = self.engine.counters
            moved, accepted = counters.kv_bytes_moved, counters.num_accepted
            super().land(plan, logits)
            steps.append((counters.kv_bytes_moved - moved, counters.num_accepted - accepted))

    world = WatchedWorld(target, make_settings(max_nodes=256))
    drafter = lab.oracle(expected, widths=(3, 3, 3), rank=rank)
    client = world.client(PROMPT, drafter, max_tokens=80, link={"delay": 0.001})
    world.run()
    assert client.received == expected
    assert sum(accepted for _, accepted in steps) > 20
    assert all(moved <= accepted * target.pool.slot_bytes for moved, accepted in steps)
    assert (sum(moved for moved, _ in steps) > 0) == (rank > 0)


def silent(drafter, start, stop):
    return lambda client: [] if start <= client.world.now < stop else drafter(client)


@pytest.mark.parametrize("patience_s", [None, 2.0])
def test_a_client_that_stalls_for_two_seconds_delays_nobody(lab, patience_s):
    """The others' p95 inter-token time changes by less than 5 %, even if the stalled one asked to be waited for."""

    def paces(stalls):
        target = lab.target()
        world = lab.World(target)
        for number in range(4):
            prompt = [number + 1, 7]
            output = target.greedy(prompt, 300)
            drafter = lab.oracle(output, widths=(2, 1, 1))
            if number == 0 and stalls:
                drafter = silent(drafter, 1.0, 3.0)
            wish = patience_s if number == 0 else None
            world.client(prompt, drafter, max_tokens=300, patience_s=wish, link={"delay": 0.005 * number})
        world.run()
        stalled, *others = world.clients.values()
        assert min(client.times[-1] for client in world.clients.values()) > 3.0
        assert stalled.received == target.greedy([1, 7], 300)
        return np.array([np.percentile(np.diff(client.times), 95) for client in others])

    assert (paces(stalls=True) <= 1.05 * paces(stalls=False)).all()


def test_speculation_that_is_off_costs_nothing(lab):
    """U056: eight streams: same rows and times, whether drafting is impossible, refused or just absent."""

    def run(max_nodes, *, drafting):
        target = lab.target()
        world = lab.World(target, make_settings(max_nodes=max_nodes))
        for number in range(8):
            client = world.client([number, 3, 5], max_tokens=50)
            client.request = replace(client.request, drafting=drafting)
        world.run()
        counters = world.engine.counters
        assert counters.num_scored == counters.kv_bytes_moved == 0
        return target.num_rows, [client.times for client in world.clients.values()]

    without = run(0, drafting=False)
    assert without == run(128, drafting=False) == run(128, drafting=True)


def test_speculation_that_switched_itself_off_costs_next_to_nothing(lab):
    """U056: once the server has seen what a drafter is worth, its frames cost a few probing rows."""
    expected = lab.target().greedy(PROMPT, 400)

    def seconds(drafter):
        world = lab.World(lab.target())
        client = world.client(PROMPT, drafter, max_tokens=400)
        world.run()
        return client.times[-1] - client.times[100]

    assert seconds(lab.oracle(expected, widths=(4, 4, 2), wrong=True)) <= 1.03 * seconds(None)


def test_sixteen_different_generations_never_mix(lab):
    """U050: other lengths, parameters, seeds and drafters in one batch; each writes what it writes alone."""
    parameters = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.7},
        {"temperature": 0.7, "min_p": 0.05, "logit_bias": {3: 2.0}},
        {"frequency_penalty": 0.5},
    ]
    wishes = []
    for number in range(16):
        wish = dict(parameters[number % len(parameters)], max_tokens=20 + 4 * number)
        if "temperature" in wish:
            wish["seed"] = number
        wishes.append(([(7 * number + i) % 32 for i in range(1 + 3 * number)], wish))
    alone = []
    for prompt, wish in wishes:
        world = lab.World(lab.target())
        client = world.client(prompt, **wish)
        world.run()
        alone.append(client.received)
    world = lab.World(lab.target())
    for number, ((prompt, wish), output) in enumerate(zip(wishes, alone, strict=True)):
        drafters = [lab.oracle(output), lab.chatter(output), None, lab.oracle(output, wrong=True)]
        world.client(prompt, drafters[number % 4], link={"delay": 0.013 * number, "jitter": 0.02}, **wish)
    world.run()
    assert [client.received for client in world.clients.values()] == alone


def test_trees_are_large_for_few_generations_and_small_for_many(lab):
    """A drafter whose right token is as likely the first as the eighth of its guesses: each is worth an eighth."""

    def guesses(output):
        def pick(path, width):
            tokens = [(output[len(path)] + 1 + i) % 32 for i in range(width)]
            tokens[5 * len(path) % width] = output[len(path)]
            return tokens

        return lambda client: lab.tree_frame(client, (8,), pick) if len(client.known) < len(output) else []

    def mean_scored(num_clients):
        target = lab.target()
        world = lab.World(target)
        for number in range(num_clients):
            prompt = [number % 32, 3]
            world.client(prompt, guesses(target.greedy(prompt, 60)), max_tokens=60, link={"delay": 0.002})
        world.run()
        counters = world.engine.counters
        return counters.num_scored / (counters.num_committed - counters.num_accepted)

    few, many = mean_scored(1), mean_scored(32)
    assert few > 6
    assert many < few / 3


def steps_with_an_oracle(lab, world, num_tokens, depth, delay, **options):
    """Commits that a generation of its own takes, with a chain of the right tokens drafted again and again."""
    expected = world.target.greedy(PROMPT, num_tokens)
    drafter, link = lab.oracle(expected, widths=(1,) * depth), {"delay": delay, "every": 0.005}
    world.clients.clear()
    client = world.client(PROMPT, drafter, max_tokens=num_tokens, link=link, **options)
    world.run()
    assert client.received == expected
    return len(client.commits)


def test_strict_patience_waits_and_zero_does_not(lab):
    def steps(patience_s):
        return steps_with_an_oracle(lab, lab.World(lab.target()), 40, 4, 0.02, patience_s=patience_s)

    assert steps(0.2) < steps(0.0)


def test_what_was_learnt_about_a_connection_helps_its_next_generation(lab):
    world = lab.World(lab.target())

    def steps(connection):
        return steps_with_an_oracle(lab, world, 24, 3, 0.002, connection=connection)

    first, second, stranger = steps(100), steps(100), steps(101)
    assert second < first
    assert stranger == first
    world.engine.disconnect(100)
    assert steps(100) == first


def test_drafts_never_make_a_stream_slower_than_none(lab):
    """Promise 2 on the virtual clock, at several round-trip times, for right, random and wrong drafters."""
    target = lab.target()
    expected = target.greedy(PROMPT, 120)

    def duration(drafter, delay):
        world = lab.World(lab.target())
        client = world.client(PROMPT, drafter, max_tokens=120, link={"delay": delay})
        world.run()
        assert client.received == expected
        return client.times[-1] - client.times[0]

    for delay in (0.001, 0.02, 0.15):
        plain = duration(None, delay)
        assert duration(lab.oracle(expected, widths=(2, 1, 1, 1)), delay) <= 1.01 * plain
        assert duration(lab.chatter(expected, right=0.3), delay) <= 1.05 * plain
        assert duration(lab.oracle(expected, widths=(4, 4), wrong=True), delay) <= 1.10 * plain

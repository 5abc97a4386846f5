"""The played-back drafter gives exactly what was recorded, wherever the session asks."""

import numpy as np

from paceline.bench.playback import OFF_PATH, Oracle, PlaybackDrafter
from paceline.bench.synthetic import synthetic
from paceline.client.drafting.drafter import ANCHOR_KEY, DraftRequest

RECORDING = synthetic(1, 12, top1=0.6, coverage=0.9).recordings[0]


def ask(
    start: int, tokens: list[int], keys: list[int], node_tokens: list[int], parents: list[int], depths: list[int]
) -> DraftRequest:
    return DraftRequest(
        drafter=0,
        start=start,
        token_ids=np.array(tokens, np.int32),
        path_keys=np.full(len(tokens), ANCHOR_KEY, np.int64),
        alive_keys=np.array(keys, np.int64),
        keys=np.array(keys, np.int64),
        tokens=np.array(node_tokens, np.int32),
        parent_keys=np.array(parents, np.int64),
        depths=np.array(depths, np.int32),
        wants_anchor=bool(tokens),
        width=4,
    )


def test_right_nodes_get_the_answers_recorded_along_the_text() -> None:
    sequence = PlaybackDrafter(RECORDING).start()
    first, second, third = RECORDING.output[:3].tolist()
    answer = sequence.expand(
        ask(0, RECORDING.prompt.tolist(), [0, 1, 2], [first, second, third], [ANCHOR_KEY, 0, 1], [1, 2, 3])
    )
    assert answer.token_ids.shape == (4, 4)
    assert np.array_equal(answer.token_ids, RECORDING.on_path.token_ids[:4, :4])
    assert np.array_equal(answer.logprobs, RECORDING.on_path.logprobs[:4, :4])


def test_nodes_below_a_wrong_token_get_answers_from_below_wrong_tokens() -> None:
    sequence = PlaybackDrafter(RECORDING).start()
    wrong = int(RECORDING.output[0]) + 1
    second = int(RECORDING.output[1])
    answer = sequence.expand(ask(0, RECORDING.prompt.tolist(), [0, 1], [wrong, second], [ANCHOR_KEY, 0], [1, 2]))
    known = {tuple(row[:4].tolist()) for row in RECORDING.off_path.token_ids}
    assert tuple(answer.token_ids[1].tolist()) in known
    assert tuple(answer.token_ids[2].tolist()) in known


def test_places_are_remembered_from_call_to_call() -> None:
    sequence = PlaybackDrafter(RECORDING).start()
    first, second = RECORDING.output[:2].tolist()
    sequence.expand(ask(0, RECORDING.prompt.tolist(), [7], [first], [ANCHOR_KEY], [1]))
    request = ask(len(RECORDING.prompt), [], [8], [second], [7], [2])
    request = DraftRequest(**{**{n: getattr(request, n) for n in request.__slots__}, "alive_keys": np.array([7, 8])})
    answer = sequence.expand(request)
    assert np.array_equal(answer.token_ids[0], RECORDING.on_path.token_ids[2, :4])


def test_the_oracle_stops_at_the_end_of_the_text() -> None:
    oracle = Oracle(RECORDING)
    assert oracle.step(11, int(RECORDING.output[11])) == 12
    assert oracle.step(12, 5) == OFF_PATH
    assert oracle.step(OFF_PATH, 5) == OFF_PATH

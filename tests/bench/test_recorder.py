"""Recording with a scripted target and a drafter that knows its text: everything but the real models."""

import numpy as np
import pytest

from paceline.bench.calibrate import calibrate_target, draft_time_of, fit_line
from paceline.bench.playback import PlaybackDrafter
from paceline.bench.recorder import WIDTH, add_answers, complete_all
from paceline.bench.recording import Recording, RecordingSet, Rows, coverage
from paceline.bench.synthetic import synthetic
from paceline.server.scripted import ScriptedTarget, markov
from paceline.shared.sampling import SamplingParams


def test_texts_are_the_target_s_own_greedy_output() -> None:
    target = ScriptedTarget(markov(32, 0), 32, eos_token_ids=(2,))
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 5, 12)]
    lines: list[str] = []
    outputs = complete_all(target, prompts, SamplingParams(max_tokens=20), lines.append)
    assert [output.tolist() for output in outputs] == [target.greedy(prompt.tolist(), 20) for prompt in prompts]
    assert len(lines) == 3


def test_answers_are_the_drafter_s_along_the_text_and_below_wrong_tokens() -> None:
    known = synthetic(1, 18, top1=0.6, coverage=0.9, width=6, prompt_len=300).recordings[0]
    nothing = Rows(np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH), np.float32))
    bare = RecordingSet((Recording(known.prompt, known.output, nothing, nothing),), {})
    made = add_answers(bare, PlaybackDrafter(known))
    (recording,) = made.recordings
    assert np.array_equal(recording.on_path.token_ids[:, :6], known.on_path.token_ids)
    assert np.isneginf(recording.on_path.logprobs[:, 6:]).all()
    assert len(recording.off_path) == 18
    assert coverage(made.recordings, 6) == pytest.approx(coverage([known], 6))
    assert "draft_ms" in made.meta


def test_calibration_fits_a_line_and_leaves_the_pool_as_it_was() -> None:
    base, per_row = fit_line(np.array([1.0, 8.0, 32.0]), 0.02 + 0.001 * np.array([1.0, 8.0, 32.0]))
    assert (base, per_row) == pytest.approx((0.02, 0.001))
    target = ScriptedTarget(markov(300, 0), 300)
    free = target.pool.num_free_blocks + target.pool.num_cached_blocks
    found = calibrate_target(target, repeats=1)
    assert target.pool.num_free_blocks + target.pool.num_cached_blocks == free
    assert min(found.step_ms.values()) > 0


def test_draft_times_come_from_the_recording_where_it_has_them() -> None:
    assert draft_time_of(RecordingSet((), {"draft_ms": {"1": 3.0, "9": 5.0}})).at(5) == pytest.approx(0.004)
    assert draft_time_of(RecordingSet((), {"draft_ms": {"1": 3.0}})).at(1) == pytest.approx(0.003)
    assert draft_time_of(RecordingSet((), {})).at(1) > 0

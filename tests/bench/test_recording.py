"""Recordings on disk, and what they say about a drafter."""

from pathlib import Path

import numpy as np
import pytest

from paceline.bench.recording import RecordingSet, coverage
from paceline.bench.synthetic import synthetic
from paceline.bench.target import renumbered
from paceline.shared.errors import ParameterError, UsageError


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    made = synthetic(3, 20)
    path = tmp_path / "deep" / "set.npz"
    made.save(path)
    loaded = RecordingSet.load(path)
    assert loaded.meta["pair"] == "synthetic"
    for mine, theirs in zip(made.recordings, loaded.recordings, strict=True):
        assert np.array_equal(mine.prompt, theirs.prompt)
        assert np.array_equal(mine.output, theirs.output)
        assert np.array_equal(mine.on_path.token_ids, theirs.on_path.token_ids)
        assert np.allclose(mine.on_path.logprobs, theirs.on_path.logprobs, atol=0.05)
        assert len(theirs.off_path) == len(mine.off_path)


def test_ids_beyond_16_bits_survive(tmp_path: Path) -> None:
    made = synthetic(1, 20, vocab_size=200_000)
    made.save(tmp_path / "set.npz")
    assert np.array_equal(RecordingSet.load(tmp_path / "set.npz").recordings[0].output, made.recordings[0].output)


def test_files_that_are_no_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recordings"):
        RecordingSet.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UsageError, match="recordings"):
        RecordingSet.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(UsageError, match="recordings"):
        RecordingSet.load(tmp_path / "other.npz")


@pytest.mark.parametrize(("top1", "cover"), [(0.5, 0.8), (0.75, 0.75), (0.2, 0.4)])
def test_dice_have_the_quality_that_was_asked_for(top1: float, cover: float) -> None:
    made = synthetic(20, 200, top1=top1, coverage=cover, seed=1).recordings
    assert coverage(made, 1) == pytest.approx(top1, abs=0.06)
    assert coverage(made, 8) == pytest.approx(cover, abs=0.06)


def test_impossible_dice_are_refused() -> None:
    with pytest.raises(ParameterError):
        synthetic(1, 10, top1=0.9, coverage=0.5)


def test_renumbering_keeps_which_ids_are_equal() -> None:
    made = synthetic(4, 30)
    small, vocab_size = renumbered(made)
    assert vocab_size < 49_152
    for old, new in zip(made.recordings, small.recordings, strict=True):
        assert np.array_equal(old.hit_rank, new.hit_rank)
        assert int(new.on_path.token_ids.max()) < vocab_size
        assert int(new.output.min()) >= 0

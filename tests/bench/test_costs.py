"""Step times and draft times by name and figure."""

import pytest

from paceline.bench.costs import PRESETS, DraftTime, step_time_of
from paceline.shared.errors import ParameterError


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_a_source_and_grow_with_rows(name: str) -> None:
    preset = PRESETS[name]
    assert preset.source
    assert step_time_of(name) == (name, preset.step_time)
    assert 0 < preset.step_time.at(1) < preset.step_time.at(32)


def test_milliseconds_are_the_one_token_step() -> None:
    assert step_time_of("30")[1].at(1) == pytest.approx(0.030)
    assert step_time_of(" 28.5+0.5 ")[1].at(3) == pytest.approx(0.030)


@pytest.mark.parametrize("wrong", ["", "fast", "-3", "0", "1+x", "8b"])
def test_unknown_step_times_name_the_known_ones(wrong: str) -> None:
    with pytest.raises(ParameterError, match="8b-h100"):
        step_time_of(wrong)


def test_draft_time_is_linear_in_rows() -> None:
    assert DraftTime(0.002, 0.001).at(5) == pytest.approx(0.007)

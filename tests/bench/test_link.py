"""The link model: what TCP guarantees, and what each knob does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.link import MIN_STALL_S, LinkModel, Outages, Pipe
from paceline.shared.errors import ParameterError


def arrivals(
    model: LinkModel, sends: list[float], size: int = 100, *, is_up: bool = True, seed: int = 0
) -> list[float]:
    pipe = Pipe(model, is_up=is_up, seed=seed)
    return [pipe.send(time, size) for time in sends]


@given(
    st.floats(0, 0.3),
    st.floats(0, 0.2),
    st.floats(0, 0.5),
    st.lists(st.floats(0, 0.1), min_size=1, max_size=40),
    st.integers(0, 1000),
)
def test_frames_never_overtake_and_never_arrive_early(
    rtt: float, jitter: float, loss: float, gaps: list[float], seed: int
) -> None:
    sends = np.cumsum(gaps).tolist()
    times = arrivals(LinkModel(rtt, jitter, loss), sends, seed=seed)
    assert times == sorted(times)
    assert all(arrival >= sent + rtt / 2 for sent, arrival in zip(sends, times, strict=True))


def test_same_seed_same_delays_and_other_seed_others() -> None:
    model = LinkModel(0.05, jitter_s=0.02)
    sends = [0.1 * i for i in range(20)]
    assert arrivals(model, sends, seed=3) == arrivals(model, sends, seed=3)
    assert arrivals(model, sends, seed=3) != arrivals(model, sends, seed=4)


def test_a_quiet_link_takes_half_a_round_trip_and_the_bytes_time() -> None:
    model = LinkModel(0.08, up_bytes_per_s=1000.0, down_bytes_per_s=2000.0, frame_overhead_bytes=0)
    assert arrivals(model, [1.0]) == [pytest.approx(1.0 + 0.1 + 0.04)]
    assert arrivals(model, [1.0], is_up=False) == [pytest.approx(1.0 + 0.05 + 0.04)]


def test_frames_queue_behind_each_other_for_bandwidth() -> None:
    model = LinkModel(0.0, up_bytes_per_s=1000.0, frame_overhead_bytes=0)
    assert arrivals(model, [0.0, 0.0, 0.0]) == pytest.approx([0.1, 0.2, 0.3])


def test_a_loss_stalls_the_direction() -> None:
    model = LinkModel(0.02, loss=0.3)
    times = arrivals(model, [float(i) for i in range(200)])
    late = [time - i for i, time in enumerate(times)]
    stalled = [delay for delay in late if delay > MIN_STALL_S]
    assert 30 < len(stalled) < 90


def test_outages_follow_their_mean_and_none_means_never() -> None:
    outages = Outages(LinkModel(mean_uptime_s=2.0), seed=1)
    gaps = [outages.next_after(0.0) for _ in range(2000)]
    assert 1.8 < np.mean(gaps) < 2.2
    assert Outages(LinkModel(), seed=1).next_after(5.0) == float("inf")


@pytest.mark.parametrize("wrong", [{"rtt_s": -1.0}, {"loss": 1.0}, {"up_bytes_per_s": 0.0}])
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ParameterError):
        LinkModel(**wrong)  # type: ignore[arg-type]

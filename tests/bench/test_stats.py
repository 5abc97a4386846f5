"""Figures of served requests."""

import pytest

from paceline.bench.frames import header_bytes, weight
from paceline.bench.stats import Row, Served, row_of, with_speedups
from paceline.shared.messages import Cancel
from paceline.shared.wire import encode


def served(*arrivals: tuple[float, int], opened_at: float = 1.0) -> Served:
    made = Served(opened_at, num_steps=len(arrivals), bytes_up=10, bytes_down=20)
    for time, count in arrivals:
        made.arrive(time, list(range(count)))
    return made


def test_tokens_that_arrive_together_share_their_gap() -> None:
    one = served((1.5, 1), (2.5, 4), (2.6, 1))
    assert one.ttft_s == pytest.approx(0.5)
    assert one.total_s == pytest.approx(1.6)
    assert one.gaps().tolist() == pytest.approx([0.25] * 4 + [0.1])


def test_an_empty_arrival_is_none() -> None:
    one = Served(0.0)
    one.arrive(1.0, [])
    assert one.arrivals == []


def test_a_row_sums_tokens_and_seconds_over_requests() -> None:
    row = row_of("m", [served((2.0, 2)), served((4.0, 4))], rtt_ms=10, step_ms=30, clients=1)
    assert row.tok_s == pytest.approx(6 / (1.0 + 3.0))
    assert row.tokens_per_step == pytest.approx(3.0)
    assert row.bytes_up_per_token == pytest.approx(20 / 6)


def test_speedups_are_within_a_cell() -> None:
    def row(method: str, rtt: float, tok_s: float) -> Row:
        return Row(method, rtt, 30, 1, tok_s, 0, 0, 0, 0, 0, 0, 1.0)

    rows = with_speedups([row("server-alone", 0, 10), row("a", 0, 20), row("server-alone", 9, 5), row("a", 9, 4)])
    assert [one.speedup_vs_server_alone for one in rows] == pytest.approx([1.0, 2.0, 1.0, 0.8])


def test_frames_weigh_their_payload_and_a_websocket_header() -> None:
    assert weight(Cancel(1), is_up=True) == len(encode(Cancel(1))) + 6
    assert weight(Cancel(1), is_up=False) == len(encode(Cancel(1))) + 2
    assert [header_bytes(size, is_up=False) for size in (125, 126, 65535, 65536)] == [2, 4, 4, 10]

"""A small grid, its figures and its pictures."""

import json
from pathlib import Path

import pytest

from paceline.bench.grid import Grid, Results, count_flips, run_grid
from paceline.bench.methods import METHODS, method_names
from paceline.bench.page import check_plot_path, page, write_plot
from paceline.bench.recording import RecordingSet
from paceline.bench.report import as_json, meta, table
from paceline.bench.synthetic import synthetic
from paceline.shared.errors import ParameterError, UsageError

FIELDS = {
    "method",
    "rtt_ms",
    "step_ms",
    "clients",
    "tok_s",
    "ttft_s",
    "itl_p50_s",
    "itl_p95_s",
    "tokens_per_step",
    "bytes_up_per_token",
    "bytes_down_per_token",
    "speedup_vs_server_alone",
}


@pytest.fixture(scope="module")
def results() -> Results:
    return run_grid(Grid(synthetic(2, 24), rtts_ms=(0.0, 40.0), steps=("30",)))


def test_every_method_has_a_row_in_every_cell_and_writes_the_target_s_text(results: Results) -> None:
    assert [row.method for row in results.rows] == [*METHODS, *METHODS]
    assert all(row.flips == 0 for row in results.rows)
    assert all(row.speedup_vs_server_alone == 1.0 for row in results.rows if row.method == "server-alone")


def test_the_same_grid_gives_the_same_figures(results: Results) -> None:
    again = run_grid(Grid(synthetic(2, 24), rtts_ms=(0.0, 40.0), steps=("30",)))
    assert again.rows == results.rows


def test_json_holds_what_the_contract_names(results: Results) -> None:
    plain = json.loads(as_json(results.rows, meta("simulate", seed=0)))
    assert plain["meta"]["mode"] == "simulate"
    assert len(plain["rows"]) == len(results.rows)
    assert all(row.keys() >= FIELDS for row in plain["rows"])


def test_table_and_page_show_every_row(results: Results) -> None:
    assert table(results.rows).row_count == len(results.rows)
    text = page(results, meta("simulate", note="<script>"))
    assert text.count("<tr") == len(results.rows) + 1
    assert "<svg" in text
    assert "<script>" not in text
    assert "http-equiv" not in text


def test_pictures_are_written(results: Results, tmp_path: Path) -> None:
    files = write_plot(tmp_path / "gain.png", results, meta("simulate"))
    assert [file.read_bytes()[:4] for file in files] == [b"\x89PNG", b"\x89PNG"]
    (html,) = write_plot(tmp_path / "gain.html", results, meta("simulate"))
    assert html.stat().st_size > 10_000
    with pytest.raises(UsageError, match="writable"):
        write_plot(tmp_path / "none" / "gain.html", results, meta("simulate"))


def test_usage_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="png or"):
        check_plot_path(Path("gain.pdf"))
    with pytest.raises(ParameterError, match="specedge"):
        method_names("fast")
    with pytest.raises(UsageError, match="at least one"):
        run_grid(Grid(RecordingSet((), {})))
    assert method_names("paceline") == ("server-alone", "paceline")


def test_flips_count_missing_and_wrong_tokens() -> None:
    recording = synthetic(1, 5).recordings[0]
    wanted = recording.output.tolist()
    assert count_flips(wanted, recording) == 0
    assert count_flips(wanted[:3], recording) == 2
    assert count_flips([*wanted[:4], wanted[4] + 1, 7], recording) == 2

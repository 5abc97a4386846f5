"""Stop-and-wait baselines against arithmetic that can be done by hand."""

import pytest

from paceline.bench.baselines.shapes import Chain
from paceline.bench.costs import DraftTime
from paceline.bench.link import LinkModel
from paceline.bench.methods import Cell, colocate, wait
from paceline.bench.synthetic import synthetic
from paceline.shared.messages import StepTime

NO_TIME = DraftTime(0.0, 0.0)
FREE_LINK = LinkModel(up_bytes_per_s=1e12, down_bytes_per_s=1e12)


def cell(top1: float, *, rtt_s: float = 0.0, draft: DraftTime = NO_TIME, prompts: int = 1, length: int = 41) -> Cell:
    made = synthetic(prompts, length, top1=top1, coverage=top1, spread=0.0, prompt_len=1)
    link = LinkModel(rtt_s, up_bytes_per_s=1e12, down_bytes_per_s=1e12)
    return Cell(made.recordings, 49_152, StepTime(0.030, 0.0), link, draft)


def test_an_always_right_chain_commits_its_length_and_one_per_round() -> None:
    here = cell(1.0, rtt_s=0.1, draft=DraftTime(0.005, 0.0))
    (served,) = wait(here, Chain(4))
    # The first token comes without a draft, then 40 in rounds of 5: 8 rounds of 4 calls, one round trip, one step.
    assert served.num_steps == 9
    assert served.total_s == pytest.approx(0.13 + 8 * (0.020 + 0.130), abs=1e-6)
    assert served.token_ids == here.recordings[0].output.tolist()


def test_an_always_wrong_chain_commits_one_token_per_round() -> None:
    (served,) = wait(cell(0.0, rtt_s=0.1), Chain(4))
    assert served.num_steps == 41
    assert served.num_accepted == 0
    assert served.total_s == pytest.approx(41 * 0.13, abs=1e-6)


def test_tokens_per_step_are_the_textbook_s() -> None:
    # (1 - a^(k+1)) / (1 - a), Leviathan et al. equation 1.
    served = wait(cell(0.7, prompts=16, length=201), Chain(4))
    measured = sum(one.num_tokens for one in served) / sum(one.num_steps for one in served)
    assert measured == pytest.approx((1 - 0.7**5) / 0.3, rel=0.06)


def test_a_right_guess_hides_the_drafting_and_a_wrong_one_costs_nothing() -> None:
    slow = DraftTime(0.010, 0.0)
    patient, proactive = (
        wait(cell(1.0, rtt_s=0.1, draft=slow), Chain(3), is_proactive=flag)[0] for flag in (False, True)
    )
    assert proactive.total_s == pytest.approx(patient.total_s - 9 * 0.030, abs=1e-6)
    wrong = [wait(cell(0.0, rtt_s=0.1, draft=slow), Chain(3), is_proactive=flag)[0].total_s for flag in (False, True)]
    assert wrong[0] == pytest.approx(wrong[1], abs=1e-9)


def test_waiting_clients_share_steps() -> None:
    made = synthetic(4, 20, top1=0.5, coverage=0.5, prompt_len=1)
    here = Cell(made.recordings, 49_152, StepTime(0.030, 0.0), FREE_LINK, DraftTime(0.0, 0.0), clients=4)
    served = wait(here, Chain(2))
    assert all(one.is_finished for one in served)
    alone = wait(Cell(made.recordings, 49_152, StepTime(0.030, 0.0), FREE_LINK, DraftTime(0.0, 0.0)), Chain(2))
    assert max(one.total_s for one in served) < 2.0 * max(one.total_s for one in alone)


def test_colocated_speculation_pays_for_its_drafts_and_not_for_the_link() -> None:
    here = cell(1.0, rtt_s=0.2, draft=DraftTime(0.005, 0.0))
    (served,) = colocate(here, Chain(4))
    # The draft model reads the prompt too.
    assert served.total_s == pytest.approx(0.2 + 0.030 + 0.005 + 8 * 0.050, abs=1e-6)
    assert served.token_ids == here.recordings[0].output.tolist()


def test_closed_loop_gives_every_recording_to_somebody() -> None:
    made = synthetic(7, 10, prompt_len=2)
    served = wait(Cell(made.recordings, 49_152, StepTime(0.01, 0.0), clients=3), Chain(1))
    assert sorted(one.token_ids for one in served) == sorted(r.output.tolist() for r in made.recordings)

"""The Triton kernel equals the SDPA oracle: windows, soft caps, grouped heads, scattered blocks, big trees, splits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernel_check.py")


def worst_difference(device: str) -> float:
    run = subprocess.run([sys.executable, str(SCRIPT), device], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return float(run.stdout)


def test_kernel_equals_sdpa_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert worst_difference("cpu") < 1e-5


@pytest.mark.gpu
def test_kernel_equals_sdpa_on_the_device() -> None:
    assert worst_difference("cuda") < 1e-4

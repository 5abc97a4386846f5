"""What several of the bench's tests run on."""

from __future__ import annotations

import pytest

from paceline.models.tiny import save_tiny_target
from paceline.server.loading import load_target
from paceline.server.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny random Llama in float32."""
    return load_target(str(save_tiny_target(tmp_path_factory.mktemp("target"), "llama")), dtype="float32")

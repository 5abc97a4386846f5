"""Tiny targets, saved once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.models.tiny import save_tiny_target


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a saved tiny target of a family."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_target(tmp_path_factory.mktemp(f"tiny-{family}"), family)
        return made[family]

    return make

"""Prompts from files: JSON lines with ``turns`` (as in Spec-Bench) or ``prompt``, or plain text, one prompt a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.shared.errors import UsageError

SHIPPED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: what to complete, or the first user message if ``is_chat``. category: for breakdowns, may be empty."""

    text: str
    is_chat: bool = False
    category: str = ""


def load_prompts(path: Path) -> list[Prompt]:
    """Raises ``UsageError`` for a file that is missing, empty, or has a line that is no prompt; the line is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected a text file of prompts at {path}, got {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UsageError(f"expected at least one prompt in {path}, got none")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Prompt(line) for _, line in numbered]
    return [_from_json(line, f"{path}, line {number}") for number, line in numbered]


def _from_json(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"expected one JSON object a line, got something else at {where}") from error
    if not isinstance(entry, dict):
        raise UsageError(f"expected a JSON object with turns or prompt, got {type(entry).__name__} at {where}")
    category = str(entry.get("category", ""))
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return Prompt(turns[0], is_chat=True, category=category)
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return Prompt(entry["prompt"], category=category)
    raise UsageError(f"expected turns (a list of text) or prompt (text) at {where}")

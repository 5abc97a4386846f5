"""Files of prompts."""

from pathlib import Path

import pytest

from paceline.bench import recording
from paceline.bench.prompts import SHIPPED, Prompt, load_prompts
from paceline.shared.errors import UsageError


def write(folder: Path, text: str) -> Path:
    path = folder / "prompts"
    path.write_text(text, encoding="utf-8")
    return path


def test_json_lines_with_turns_or_prompt(tmp_path: Path) -> None:
    path = write(tmp_path, '{"turns": ["hi", "more"], "category": "chat"}\n\n{"prompt": "Once"}\n')
    assert load_prompts(path) == [Prompt("hi", is_chat=True, category="chat"), Prompt("Once")]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, "one\n\ntwo {\n")) == [Prompt("one"), Prompt("two {")]


@pytest.mark.parametrize("text", ["", "\n\n", '{"turns": []}', '{"prompt": 3}', '{"prompt": "a"}\nnot json', '{"a"'])
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        load_prompts(write(tmp_path, text))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_prompts(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        load_prompts(tmp_path / "binary")


def test_shipped_prompts_load() -> None:
    assert len(load_prompts(SHIPPED)) >= 40
    assert len(load_prompts(recording.SHIPPED.with_name("prompts.jsonl"))) >= 10

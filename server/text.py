"""The target's tokenizer and chat template, for the server's own OpenAI endpoints and for stop strings.

What a user writes stays text: the name of a control token inside a message is tokenised as plain characters, so that
nobody can end their own turn and speak as the system. Not thread-bound; encoding long texts belongs in a worker thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from paceline.models.tokenizer_hash import tokenizer_hash
from paceline.shared.errors import ContextError, ModelError, ParameterError
from paceline.shared.unicode import check_unicode

_MARKS = "\ue0f0\ue0f1"
"""Frame the place of a control token's name in a message; private characters, taken out of messages first."""
_NO_MARKS = {ord(mark): None for mark in _MARKS}


class TargetText:
    """Text to ids and back, and messages to a prompt."""

    def __init__(self, tokenizer_path: Path, chat_template_path: Path | None) -> None:
        """Raises ``ModelError`` if the files cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_path))
        except Exception as error:
            raise ModelError(f"cannot read the tokenizer {tokenizer_path}: {error}") from error
        self._path = tokenizer_path
        self.hash = tokenizer_hash(tokenizer_path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest = max(len(piece) for piece in vocabulary)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: number for number, token in added.items() if token.special}
        names = sorted(self._special_ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(name) for name in names)) if names else None
        self._names = _special_names(tokenizer_path.with_name("tokenizer_config.json"))
        self._template = _template(chat_template_path, tokenizer_path.with_name("tokenizer_config.json"))

    @cached_property
    def _literal(self) -> Tokenizer:
        """Reads control tokens as plain text. Made for the first message that spells one: few do, loading is slow."""
        tokenizer = Tokenizer.from_file(str(self._path))
        tokenizer.encode_special_tokens = True
        return tokenizer

    @property
    def has_template(self) -> bool:
        """Whether messages can be made into a prompt."""
        return self._template is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; control tokens add none."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def piece(self, token: int) -> str:
        """One token as text, control tokens by their name: for log-probabilities."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """A raw prompt, with the one start token that the tokenizer wants, if any.

        Raises ``ContextError``, without tokenising, for a text that cannot fit ``max_tokens`` ids, ``ParameterError``
        for half characters.
        """
        self._check_len(text, max_tokens)
        ids: list[int] = self._tokenizer.encode(check_unicode("prompt", text), add_special_tokens=True).ids
        first = self._special_ids.get(self._names.get("bos_token", ""))
        return ids[1:] if first is not None and ids[:2] == [first, first] else ids  # spelled in the text and added

    def encode_chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> list[int]:
        """Messages in the model's own chat format, up to where the answer begins.

        Raises ``ParameterError`` if there is no template or it refuses the messages, ``ContextError`` as ``encode``.
        """
        if self._template is None:
            raise ParameterError("messages", "expected a model with a chat template; use /v1/completions with this one")
        self._check_len("".join(message["content"] for message in messages), max_tokens)
        hidden: list[str] = []
        marked = [{**message, "content": self._hide(message["content"], hidden)} for message in messages]
        try:
            text = self._template.render(messages=marked, add_generation_prompt=True, **self._names)
        except (TemplateError, TypeError, ValueError) as error:
            raise ParameterError("messages", f"expected messages that the chat template takes: {error}") from error
        check_unicode("messages", text)
        if not hidden:
            plain: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return plain
        return self._encode_pieces(text, hidden)

    def _hide(self, content: str, hidden: list[str]) -> str:
        """``content`` with every spelled control token replaced by a mark that the template cannot confuse."""
        if self._pattern is None:
            return content

        def mark(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{_MARKS[0]}{len(hidden) - 1}{_MARKS[1]}"

        return self._pattern.sub(mark, content.translate(_NO_MARKS))

    def _encode_pieces(self, rendered: str, hidden: Sequence[str]) -> list[int]:
        """The template's control tokens by their ids; all between them as plain text, marks turned back first."""
        assert self._pattern is not None
        ids: list[int] = []
        place = 0
        for match in [*self._pattern.finditer(rendered), None]:
            piece = rendered[place : match.start() if match else len(rendered)]
            plain = re.sub(f"{_MARKS[0]}(\\d+){_MARKS[1]}", lambda found: hidden[int(found.group(1))], piece)
            ids += self._literal.encode(plain, add_special_tokens=False).ids if plain else []
            if match is not None:
                ids.append(self._special_ids[match.group()])
                place = match.end()
        return ids

    def _check_len(self, text: str, max_tokens: int) -> None:
        if len(text) > max_tokens * self._longest:
            got = f"a prompt of {len(text)} characters"
            raise ContextError(f"expected a prompt that fits max_context={max_tokens} tokens, got {got}")


def _special_names(config: Path) -> dict[str, str]:
    """bos_token and its like, as templates name them."""
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    names: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = values.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names


def _template(path: Path | None, config: Path) -> Any:
    source = path.read_text(encoding="utf-8") if path is not None else None
    if source is None and config.is_file():
        source = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if not isinstance(source, str):
        return None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"cannot read the chat template: {error}") from error

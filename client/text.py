"""Text to token ids and back, as the target's own tokenizer does it: completions, chats, and the text of tokens.

Two rules that are easy to get wrong. A chat template writes its own beginning-of-text token, so nothing is added to it;
a plain prompt gets the one that the tokenizer wants, never two (U035). And what a *person* writes in a chat stays plain
text, even if it spells a control token (U036, U069).

Not here: incremental decoding (``paceline.shared.detokenize``), finding the files (``bundles``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from paceline.models.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME
from paceline.models.tokenizer_hash import tokenizer_hash
from paceline.shared.errors import ModelError, ParameterError, UsageError
from paceline.shared.unicode import check_unicode

CONFIG_NAME = "tokenizer_config.json"
ChatMessage = Mapping[str, Any]
"""At least ``role`` and ``content`` (text, or a list of text parts)."""
_MARK_OPEN, _MARK_CLOSE = "\ue0f0", "\ue0f1"
_NO_MARKS = {ord(mark): None for mark in (_MARK_OPEN, _MARK_CLOSE)}


class TextCodec:
    """A tokenizer with its chat template. Safe to share between threads: nothing changes after construction."""

    def __init__(self, tokenizer_json: str, *, config: Mapping[str, Any], template: str | None, file_hash: str) -> None:
        """tokenizer_json: the file's text. config: of tokenizer_config.json, may be empty. template: Jinja, or None.

        Raises ``ModelError`` for a text that is no tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
            self._plain = Tokenizer.from_str(tokenizer_json)
        except Exception as error:
            raise ModelError(f"expected a tokenizer.json, got: {error}") from error
        self._plain.encode_special_tokens = True
        self.hash = file_hash
        self._template = template
        self._config = config
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        ordered = sorted(self._special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(re.escape(text) for text in ordered)) if ordered else None

    @classmethod
    def load(cls, path: str | Path) -> TextCodec:
        """From a folder with tokenizer.json (and a chat template), or that file. Raises ``ModelError``."""
        given = Path(path).expanduser()
        file = given / TOKENIZER_NAME if given.is_dir() else given
        config = _read_config(file.with_name(CONFIG_NAME))
        template_file = file.with_name(CHAT_TEMPLATE_NAME)
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        file_hash = tokenizer_hash(file)
        return cls(
            file.read_text(encoding="utf-8"),
            config=config,
            template=template if isinstance(template, str) else None,
            file_hash=file_hash,
        )

    def encode(self, text: str) -> NDArray[np.int32]:
        """int32 ids of a plain prompt, control tokens in it included, with the beginning that the tokenizer wants.

        Raises ``ParameterError`` for half characters.
        """
        ids = self._tokenizer.encode(check_unicode("prompt", text)).ids
        first = self._token("bos_token")
        if first is not None and ids[:2] == [first, first]:
            ids = ids[1:]  # the prompt spelled it and the tokenizer added it
        return np.array(ids, np.int32)

    def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> NDArray[np.int32]:
        """int32 ids of a conversation in the model's template, ready for the answer.

        Raises ``UsageError`` if the model has no template, ``ParameterError`` if the template refuses the messages.
        """
        if self._template is None:
            raise UsageError("expected a model with a chat template, got one without: complete a plain prompt instead")
        texts: list[str] = []
        hidden = [{**message, "content": self._hide(_content(message), texts)} for message in messages]
        rendered = check_unicode("messages", self._render(hidden, add_generation_prompt))
        if not texts:
            return np.array(self._tokenizer.encode(rendered, add_special_tokens=False).ids, np.int32)
        return np.array(self._encode_pieces(rendered, texts), np.int32)

    def _hide(self, content: str, texts: list[str]) -> str:
        """``content`` with every spelled control token replaced by a mark that the template cannot confuse."""
        if self._special_pattern is None:
            return content

        def mark(match: re.Match[str]) -> str:
            texts.append(match.group())
            return f"{_MARK_OPEN}{len(texts) - 1}{_MARK_CLOSE}"

        return self._special_pattern.sub(mark, content.translate(_NO_MARKS))

    def _encode_pieces(self, rendered: str, texts: Sequence[str]) -> list[int]:
        """Real control tokens by their ids; everything between them as plain text, marks turned back first."""
        assert self._special_pattern is not None
        ids: list[int] = []
        place = 0
        for match in [*self._special_pattern.finditer(rendered), None]:
            piece = rendered[place : match.start() if match else len(rendered)]
            plain = re.sub(f"{_MARK_OPEN}(\\d+){_MARK_CLOSE}", lambda found: texts[int(found.group(1))], piece)
            if plain:
                ids += self._plain.encode(plain, add_special_tokens=False).ids
            if match is not None:
                ids.append(self._special[match.group()])
                place = match.end()
        return ids

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        tokens = {name: self._spelling(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            template = environment.from_string(self._template or "")
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **tokens)
        except (TemplateError, TypeError, ValueError) as error:
            raise ParameterError("messages", f"expected messages that fit the chat template, got: {error}") from error

    def _spelling(self, name: str) -> str:
        value = self._config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    def _token(self, name: str) -> int | None:
        spelling = self._spelling(name)
        return self._tokenizer.token_to_id(spelling) if spelling else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out: the function that incremental decoding wants."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _content(message: ChatMessage) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return "\n".join(str(part) for part in parts)
    raise ParameterError("messages", f"expected content that is text or text parts, got {type(content).__name__}")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return values if isinstance(values, dict) else {}

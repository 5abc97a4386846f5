"""One document of a corpus while it is being written: whose words come next, which are forced, and when it ends.

A document is a conversation in the target's chat template: the target writes the user's words behind an opener, then
the answer, sometimes a second turn. Not for: running the target (`corpus`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.models.openers import FOLLOW_UPS, LONG, SHORT

KIND_FORCED, KIND_USER, KIND_GREEDY, KIND_SAMPLED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """What a corpus depends on. Lengths in tokens."""

    seed: int = 0
    num_rows: int = 192
    num_slots: int = 416
    top_k: int = 32
    nucleus: float = 0.95
    max_user_len: int = 80
    max_long_user_len: int = 200
    max_answer_len: int = 192
    min_room: int = 96
    long_share: float = 0.15
    greedy_share: float = 0.5
    second_turn_share: float = 0.3


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The template cut open: prefix USER answer_head ANSWER turn_join USER answer_head ..."""

    prefix: tuple[int, ...]
    answer_head: tuple[int, ...]
    turn_join: tuple[int, ...]
    stop_ids: frozenset[int]


def chat_frame(tokenizer: Any, stop_ids: frozenset[int]) -> ChatFrame:
    """Cuts the chat template at the user's and the assistant's words; a base model gets its BOS and bare text."""
    if tokenizer.chat_template is None:
        bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
        return ChatFrame(tuple(bos or sorted(stop_ids)[:1]), (), (), stop_ids)
    user, answer, second = "USERWORDS", "ANSWERWORDS", "SECONDWORDS"
    turns = [{"role": "user", "content": user}]
    opening = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prefix, answer_head = opening.split(user)
    turn_join = whole.split(answer)[1].split(second)[0]

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return ChatFrame(ids(prefix), ids(answer_head), ids(turn_join), stop_ids)


class Document:
    """One row's document while it is being written: what to force next, and how the free tokens are chosen."""

    def __init__(
        self, frame: ChatFrame, rng: np.random.Generator, settings: CorpusSettings, encode: Callable[[str], list[int]]
    ):
        self.frame, self.rng, self.settings, self.encode = frame, rng, settings, encode
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.done = False
        self.forced: list[int] = []
        self.budget = 0
        self.in_user = False
        if frame.answer_head:
            is_long = rng.random() < settings.long_share
            openers = LONG if is_long else SHORT
            self._start_user(openers[int(rng.integers(len(openers)))], is_long)
        else:
            self._start_answer()

    def _start_user(self, opener: str, is_long: bool) -> None:
        self.in_user = True
        longest = self.settings.max_long_user_len if is_long else self.settings.max_user_len
        self.budget = int(self.rng.integers(longest // 2, longest + 1))
        self.forced = self.encode(opener) if opener else []

    def _start_answer(self) -> None:
        self.in_user = False
        self.budget = self.settings.max_answer_len
        self.answer_kind = KIND_GREEDY if self.rng.random() < self.settings.greedy_share else KIND_SAMPLED

    @property
    def next_kind(self) -> int:
        if self.forced:
            return KIND_FORCED
        return KIND_USER if self.in_user else self.answer_kind

    def push(self, choice: int) -> int:
        """Takes the target's choice for the next token; returns the token that is really fed."""
        kind = self.next_kind
        token = self.forced.pop(0) if self.forced else choice
        if kind != KIND_FORCED:
            self.budget -= 1
            if self.in_user:
                token = self._end_user(token)
            else:
                self._end_answer(token)
        self.tokens.append(token)
        self.kinds.append(kind)
        return token

    def _end_user(self, token: int) -> int:
        head = self.frame.answer_head
        if token != head[0] and token not in self.frame.stop_ids and self.budget > 0:
            return token
        self._start_answer()
        self.forced = list(head[1:])
        return head[0]

    def _end_answer(self, token: int) -> None:
        if token not in self.frame.stop_ids and self.budget > 0:
            return
        join = self.frame.turn_join
        may_go_on = token in self.frame.stop_ids and bool(join) and join[0] == token
        if may_go_on and self.rng.random() < self.settings.second_turn_share:
            self._start_user(FOLLOW_UPS[int(self.rng.integers(len(FOLLOW_UPS)))], False)
            self.forced = list(join[1:]) + self.forced
        else:
            self.done = True

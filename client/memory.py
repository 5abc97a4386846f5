"""Earlier conversations in use: what was kept is given to the n-gram drafter, and what ends is kept.

A disk that refuses costs a warning, never an answer. Not here: the file (``history``), looking things up
(``drafting.history_index``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.client.drafting.drafter import Drafter
from paceline.client.drafting.history_index import HistoryIndex
from paceline.client.drafting.ngram import NGramDrafter
from paceline.client.history import History

_LOG = logging.getLogger("paceline.client")


class Memory:
    """Used by one thread at a time; drafters read what it built while it builds anew."""

    def __init__(self, history: History, vocab_size: int, drafters: Sequence[Drafter]) -> None:
        self._history = history
        self._vocab_size = vocab_size
        self._drafters = [drafter for drafter in drafters if isinstance(drafter, NGramDrafter)]
        self._share(history.load())

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Keep a conversation (int32 ids, prompt and output) that has ended."""
        try:
            self._share(self._history.add(tokens))
        except OSError as error:  # TimeoutError is one
            _LOG.warning("this conversation is not remembered: %s", error)

    def _share(self, conversations: Sequence[NDArray[np.int32]]) -> None:
        if self._drafters:
            index = HistoryIndex(conversations, self._vocab_size)
            for drafter in self._drafters:
                drafter.earlier = index

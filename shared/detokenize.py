"""Token ids to text, a run at a time: never half a character, never any part of a stop string.

Two stages. ``Detokenizer`` turns runs of ids into text that only ever grows; ``StopMatcher`` holds back what could be
the beginning of a stop string and cuts the text before the first one. ``TextStream`` is both in a row. The tokenizer
itself comes from outside, as a function from ids to text.

Cost per token does not grow with the answer: only a short window of ids is decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from paceline.shared.sampling import SamplingParams

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
_WINDOW = 8
"""Ids that stay in front of the window as context: decoders that join words look back over a few tokens at the most."""
_MAX_HELD = 32
"""Ids held back for an unfinished character at the most; beyond that the text really holds a replacement character."""


class Detokenizer:
    """Incremental decoding of one text.

    The text of the first ``read`` ids of the window has been delivered; decoding the whole window and taking what comes
    after it keeps the spaces that a decoder puts between words. A trailing replacement character means an unfinished
    character: it is held back until the ids that finish it arrive, or until ``finish``.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        self._prefix = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add, as far as it can be shown."""
        return "".join(self._push_one(int(token)) for token in ids)

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        unfinished = text.endswith(REPLACEMENT)
        if unfinished and len(self._ids) - self._read < _MAX_HELD:
            return ""
        return self._deliver(text, restart=unfinished)

    def _deliver(self, text: str, *, restart: bool) -> str:
        """What ``text``, the window decoded, adds to what was delivered of it; then move the window on.

        After a forced replacement character the window starts afresh: later ids must not turn it into something else.
        """
        delta = text[len(self._prefix) :]
        if restart:
            self._ids.clear()
            self._prefix = ""
        elif len(self._ids) > 2 * _WINDOW:
            del self._ids[:-_WINDOW]
            self._prefix = self._decode(self._ids)
        else:
            self._prefix = text
        self._read = len(self._ids)
        return delta

    def finish(self) -> str:
        """What was held back, as the decoder shows it. The detokenizer is done afterwards."""
        if self._read == len(self._ids):
            return ""
        return self._deliver(self._decode(self._ids), restart=True)


class StopMatcher:
    """Lets text through up to the first stop string.

    Of several stop strings that end at different places the one that is complete first counts; of those that are
    complete at the same character the one that begins first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show. ``stopped`` is the stop string that was met, if any; nothing follows it.

        may_stop: whether a stop string that ends in this text counts; one that does not is text, and the search begins
        afresh behind it.
        """
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        pending, shown = self._held + text, ""
        found = self._first(pending)
        while found is not None and not may_stop:
            end = found[0] + len(found[1])
            shown, pending = shown + pending[:end], pending[end:]
            found = self._first(pending)
        if found is not None:
            begin, self.stopped = found
            self._held = ""
            return shown + pending[:begin]
        keep = self._possible(pending)
        self._held = pending[len(pending) - keep :]
        return shown + pending[: len(pending) - keep]

    def _first(self, text: str) -> tuple[int, str] | None:
        hits = [(text.find(stop), stop) for stop in self._stops]
        ends = [(begin + len(stop), begin, stop) for begin, stop in hits if begin >= 0]
        if not ends:
            return None
        _, begin, stop = min(ends)
        return begin, stop

    def _possible(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins some stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return "" if self.stopped is not None else held


class TextStream:
    """Ids in, text out, cut before the first stop string. Both sides make text with it, so both cut at the same token.

    min_tokens: stop strings and stop ids count from this many ids on. stop_ids: ids that end the text and add none.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), *, min_tokens: int = 0, stop_ids: Collection[int] = ()
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._stop_ids = frozenset(stop_ids)
        self._num_ids = 0
        self._has_stop_id = False

    @classmethod
    def of(cls, decode: Decode, sampling: SamplingParams, eos_ids: Collection[int]) -> TextStream:
        """As the parameters want it, for a target with these ends of text."""
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        return cls(decode, sampling.stop, min_tokens=sampling.min_tokens, stop_ids=stop_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string or a stop id was met."""
        return self._has_stop_id or self._matcher.stopped is not None

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """The text that the ids add, and how many of them were used: all, or up to the one that completed a stop."""
        parts: list[str] = []
        for used, token in enumerate(ids, start=1):
            if self.stopped:
                return "".join(parts), used - 1
            parts.append(self._push_one(int(token)))
        return "".join(parts), len(ids)

    def _push_one(self, token: int) -> str:
        self._num_ids += 1
        may_stop = self._num_ids >= self._min_tokens
        if may_stop and token in self._stop_ids:
            self._has_stop_id = True
            return ""
        return self._matcher.push(self._detokenizer.push((token,)), may_stop=may_stop)

    def finish(self) -> str:
        """The rest of the text; call once, when no more ids come."""
        tail = self._matcher.push(self._detokenizer.finish(), may_stop=self._num_ids >= self._min_tokens)
        return tail + self._matcher.finish()

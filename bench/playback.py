"""Plays a recording to a session as if its drafter were there: real proposals, no model, no time.

Not here: what the calls cost (``costs``), the target's side (``target``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.bench.recording import Recording, Rows
from paceline.client.drafting.drafter import ANCHOR_KEY, Candidates, DraftRequest
from paceline.shared.tree import ANCHOR

if TYPE_CHECKING:
    from paceline.bench.baselines.shapes import Draft

OFF_PATH = -1


class Oracle:
    """Answers for every context that can come up while a recorded output is drafted."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.prompt_len = len(recording.prompt)
        self.output: list[int] = recording.output.tolist()

    def step(self, place: int, token: int) -> int:
        """The place (index into the output) behind ``token``, if it is right at ``place``; else ``OFF_PATH``."""
        on_path = 0 <= place < len(self.output) and self.output[place] == token
        return place + 1 if on_path else OFF_PATH

    def row(self, place: int, token: int, position: int) -> tuple[Rows, int]:
        """The drafter's answer: at a place of the output, or below a wrong token at a position."""
        on_path, off_path = self._recording.on_path, self._recording.off_path
        if 0 <= place < len(on_path):
            return on_path, place
        if not len(off_path):
            return on_path, (position * 31 + token * 7) % len(on_path)
        return off_path, (position * 1_000_003 + token * 7_919) % len(off_path)

    def below(self, draft: Draft, level: Sequence[int], width: int) -> list[list[tuple[int, float]]]:
        """The drafter's first candidates below each node of a level (or the anchor), with their summed scores."""
        return [self._children(draft, node, width) for node in level]

    def _children(self, draft: Draft, node: int, width: int) -> list[tuple[int, float]]:
        place = draft.place if node == ANCHOR else draft.places[node]
        token = 0 if node == ANCHOR else draft.tokens[node]
        above = 0.0 if node == ANCHOR else draft.scores[node]
        position = draft.place + (0 if node == ANCHOR else draft.depth(node))
        rows, index = self.row(place, token, position)
        ids, logprobs = rows.token_ids[index, :width].tolist(), rows.logprobs[index, :width].tolist()
        return [(token, above + logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -1e30]


class PlaybackSequence:
    """One generation of ``PlaybackDrafter``: follows which nodes are on the recorded path."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._places: dict[int, int] = {}
        self._num_held = 0

    def expand(self, request: DraftRequest) -> Candidates:
        """Takes over the committed tokens, then answers the request's rows from the recording."""
        self._num_held = request.committed_len
        anchor_place = self._num_held - self._oracle.prompt_len
        alive = set(request.alive_keys.tolist())
        self._places = {key: place for key, place in self._places.items() if key in alive}
        rows: list[tuple[int, int, int]] = []
        if request.wants_anchor:
            rows.append((anchor_place, 0, self._num_held))
        nodes = zip(
            request.keys.tolist(),
            request.tokens.tolist(),
            request.parent_keys.tolist(),
            request.depths.tolist(),
            strict=True,
        )
        for key, token, parent, depth in nodes:
            parent_place = anchor_place if parent == ANCHOR_KEY else self._places.get(parent, OFF_PATH)
            place = self._oracle.step(parent_place, token)
            self._places[key] = place
            rows.append((place, token, self._num_held + depth))
        return self._answer(rows, request.width)

    def _answer(self, rows: list[tuple[int, int, int]], width: int) -> Candidates:
        if not rows:
            return Candidates.empty(0)
        token_ids: list[NDArray[np.int32]] = []
        logprobs: list[NDArray[np.float32]] = []
        for place, token, position in rows:
            source, index = self._oracle.row(place, token, position)
            token_ids.append(source.token_ids[index, :width])
            logprobs.append(source.logprobs[index, :width])
        return Candidates(np.stack(token_ids), np.stack(logprobs))

    def close(self) -> None:
        """Nothing to give back."""


class PlaybackDrafter:
    """A drafter that plays one recording, whatever generation asks."""

    name = "playback"
    is_instant = False
    max_context = 1 << 20
    chunk_len = 256

    def __init__(self, recording: Recording) -> None:
        self._oracle = Oracle(recording)

    def start(self) -> PlaybackSequence:
        """A fresh sequence."""
        return PlaybackSequence(self._oracle)

    def close(self) -> None:
        """Nothing to free."""

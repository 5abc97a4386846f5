"""One generation on the server, sans-IO: committed tokens, the live tree, and when the output ends.

What ends it, and what counts: a token that ends the output (end of text or a stop token id) is committed, counted in
usage and part of the token ids, but adds no text. The token that completes a stop string is the last one committed;
the text ends before the stop string. Nothing behind the end is committed, however much of a run was accepted. So text,
token ids, log-probabilities, usage and finish reason agree to the token.

Not here: KV (``engine``), which nodes a step scores (``scheduler``), and what the target chose (``choose``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.server.livetree import Growth, LaidOut, LiveTree
from paceline.shared.detokenize import Decode, TextStream
from paceline.shared.errors import ContextError, ParameterError
from paceline.shared.messages import FinishReason, Grow, Limits, Open
from paceline.shared.sampling import Verifier


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What the target says about its output: its vocabulary, its ends of text, its context, its decoder."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    decode: Decode | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What one step added. tokens: int32; num_drafted of them were accepted nodes; num_died: nodes off the path."""

    at: int
    tokens: NDArray[np.int32]
    num_drafted: int
    num_died: int
    finish: FinishReason | None


class Generation:
    """See the module's text. Positions count from the first prompt token; ``length`` tokens are final."""

    def __init__(self, request: Open, rules: OutputRules, limits: Limits) -> None:
        """Raises ``ParameterError``, ``ContextError`` or ``LimitError`` for a request that cannot be served."""
        _check(request, rules)
        self.request = request
        self.sampling = request.sampling
        self.prompt_len = len(request.prompt)
        self.finish: FinishReason | None = None
        self.num_given = len(request.committed)
        room = rules.max_context - self.prompt_len
        wanted = self.sampling.max_tokens
        self.end = self.prompt_len + (room if wanted is None else min(wanted, room))
        self._tokens = np.zeros(self.end, np.int32)
        self._tokens[: self.prompt_len] = request.prompt
        self._output: list[int] = []
        self.live = LiveTree(limits, rules.vocab_size, aliases=request.verifier is not Verifier.MSS)
        stop_ids = set(self.sampling.stop_token_ids)
        self._stop_ids = frozenset(stop_ids if self.sampling.ignore_eos else stop_ids | set(rules.eos_ids))
        decode = rules.decode if self.sampling.stop else None
        self._text = None if decode is None else TextStream.of(decode, self.sampling, rules.eos_ids)
        self._take_over(request)

    @property
    def length(self) -> int:
        """Number of final tokens, prompt included."""
        return self.prompt_len + len(self._output)

    @property
    def num_output(self) -> int:
        """Number of final output tokens, those that the client brought along included."""
        return len(self._output)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32[length]: prompt and committed output. A view: do not write."""
        return self._tokens[: self.length]

    @property
    def output(self) -> Sequence[int]:
        """The committed output."""
        return self._output

    def grow(self, frame: Grow) -> Growth:
        """Aligns a frame with what is committed.

        Raises ``ProtocolError``, ``LimitError`` or ``TreeError``: the generation must then be ended.
        """
        return self.live.grow(frame, self._output, self.prompt_len)

    def lay_out(self, max_nodes: int) -> LaidOut:
        """The nodes that a step scores: the first to arrive, at positions where output may still stand."""
        return self.live.lay_out(max_nodes, self.end)

    def commit(self, accepted: Sequence[int], bonus: int, laid_out: LaidOut) -> Committed:
        """Commits the accepted nodes' tokens (indices into ``laid_out``, root-down) and the bonus token, up to the end.

        Nodes off the path die; those that were not in the step live on where they hang below the new anchor.
        """
        at = self.length
        run: list[tuple[int, int | None]] = [(int(laid_out.tree.tokens[i]), laid_out.ids[i]) for i in accepted]
        run.append((bonus, None))
        num_before = len(self._output)
        num_drafted = num_died = 0
        for token, node_id in run:
            num_died += self.live.advance(token, self.length, node_id)
            num_drafted += node_id is not None
            self.finish = self._append(token)
            if self.finish is not None:
                break
        if self.finish is not None:
            self.live.clear()
        tokens = np.array(self._output[num_before:], np.int32)
        return Committed(at, tokens, num_drafted, num_died, self.finish)

    def _append(self, token: int) -> FinishReason | None:
        """Adds one token and says whether the output ends with it."""
        self._tokens[self.length] = token
        self._output.append(token)
        may_stop = len(self._output) >= self.sampling.min_tokens
        if token in self._stop_ids and may_stop:
            return FinishReason.STOP
        if self._text is not None:
            self._text.push((token,))
            if self._text.stopped:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.end else None

    def _take_over(self, request: Open) -> None:
        """Replays the output that a resuming client holds. Raises ``ParameterError`` if it already ended."""
        for index, token in enumerate(request.committed.tolist()):
            if self._append(token) is not None:
                raise ParameterError("committed", f"expected output that goes on, got one that ended at token {index}")


def _check(request: Open, rules: OutputRules) -> None:
    if not len(request.prompt):
        raise ParameterError("prompt", "expected a prompt of at least one token, got none")
    for param, ids in (("prompt", request.prompt), ("committed", request.committed)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rules.vocab_size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ParameterError(param, f"expected token ids in 0..{rules.vocab_size - 1} in {param}, got {wrong}")
    if len(request.prompt) >= rules.max_context:
        got = f"a prompt of {len(request.prompt)} tokens"
        raise ContextError(f"expected fewer than max_context={rules.max_context} tokens, got {got}")
    request.sampling.check_vocabulary(rules.vocab_size)
    if request.sampling.stop and rules.decode is None:
        raise ParameterError("stop", "expected no stop strings: this target has no tokenizer")
    if request.sampling.n > 1 and request.choice >= request.sampling.n:
        raise ParameterError("choice", f"expected a choice below n={request.sampling.n}, got {request.choice}")
    random = not request.sampling.is_greedy and request.verifier is not Verifier.GREEDY
    if random and request.sampling.seed is None:
        raise ParameterError("seed", "expected a seed: the client draws one if its user gives none")

"""Writing to terminals: text as it streams, drafted tokens in colour, nothing that a legacy console chokes on.

Answers go to stdout, everything else to stderr. Colour only on a terminal, and not if NO_COLOR is set (U089).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from paceline.client.result import Piece, Stats

_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def wants_color(stream: TextIO) -> bool:
    """Whether escape sequences belong on this stream."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def write(text: str, stream: TextIO | None = None) -> None:
    """Write and flush; characters that the stream cannot show become replacements."""
    target = stream or sys.stdout
    encoding = target.encoding or "utf-8"
    target.write(text.encode(encoding, "replace").decode(encoding, "replace"))
    target.flush()


def write_pieces(pieces: Sequence[Piece], stream: TextIO | None = None) -> None:
    """Write streamed text; what was drafted is green where colour is wanted."""
    target = stream or sys.stdout
    if not wants_color(target):
        write("".join(piece.text for piece in pieces), target)
        return
    parts = [f"{_GREEN}{piece.text}{_RESET}" if piece.drafted and piece.text else piece.text for piece in pieces]
    write("".join(parts), target)


def write_note(text: str) -> None:
    """A line on stderr, dim where colour is wanted."""
    write(f"{_DIM}{text}{_RESET}\n" if wants_color(sys.stderr) else f"{text}\n", sys.stderr)


def describe(stats: Stats, num_tokens: int) -> str:
    """One line of figures for people."""
    rate = num_tokens / stats.total_s if stats.total_s > 0 else 0.0
    share = stats.accepted / stats.drafted if stats.drafted else 0.0
    return (
        f"{num_tokens} tokens, {rate:.1f} tok/s, {stats.tokens_per_step:.2f} tokens per step, "
        f"{stats.accepted} of {stats.drafted} drafted nodes accepted ({share:.0%}), "
        f"first token {stats.ttft_s * 1e3:.0f} ms, rtt {stats.rtt_s * 1e3:.0f} ms"
    )

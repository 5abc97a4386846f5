"""``paceline demo``: a server process with the embedded pair, a client in this one, and what drafting gained.

Not here: how anything works; this only starts the two, streams, and counts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench.processes import ServerProcess, divide_cores, pin
from paceline.client.api import Client
from paceline.client.completion import CompletionStream
from paceline.client.result import Completion
from paceline.client.settings import make_settings
from paceline.models.catalogue import EMBEDDED, find_bundle, find_target
from paceline.shared.errors import ParameterError
from paceline.shared.sampling import SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DEFAULT_PROMPT = "Write a short letter to a friend about a trip to the mountains."
DRAFTED_STYLE = "green"
_EXAMPLES = """
Examples:

  paceline demo

  paceline demo "Write a short poem about rain." --max-tokens 200
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer and its speed."""

    name: str
    completion: Completion

    @property
    def tok_s(self) -> float:
        """Tokens per second of the whole answer, the first token's delay included."""
        return len(self.completion.token_ids) / max(self.completion.stats.total_s, 1e-9)


@app.command(
    help="Stream a completion with the embedded pair, and show the gain over the server alone.", epilog=_EXAMPLES
)
def demo(
    prompt: Annotated[str, typer.Argument(help="one user message")] = DEFAULT_PROMPT,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=4096, help="tokens of output at most", envvar="PACELINE_MAX_TOKENS")
    ] = 128,
    model: Annotated[str, typer.Option(help="the pair to show", envvar="PACELINE_MODEL")] = EMBEDDED,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="complete the prompt as it is, without the chat template", envvar="PACELINE_RAW"),
    ] = False,
) -> None:
    if not prompt:
        raise ParameterError("prompt", "expected a prompt of at least one token, got an empty one")
    find_target(model)
    find_bundle(model)
    console = Console()
    cores = divide_cores()
    pin(cores.client)
    started = time.perf_counter()
    console.print(f"starting a server with {model} ...", style="dim", highlight=False)
    with ServerProcess(model, cores) as server:
        seconds = time.perf_counter() - started
        console.print(f"ready after {seconds:.1f} s at {server.url}\n", style="dim", highlight=False)
        shown = asyncio.run(_show_both(server.url, prompt, max_tokens, is_chat=not raw, console=console))
    console.print(gain_table(shown))


async def _show_both(url: str, prompt: str, max_tokens: int, *, is_chat: bool, console: Console) -> list[Shown]:
    """The same prompt with and without drafts. A first token is thrown away, so that neither pays for the prompt."""
    asked: str | list[dict[str, str]] = [{"role": "user", "content": prompt}] if is_chat else prompt
    sampling = SamplingParams(max_tokens=max_tokens)
    settings = make_settings(server=url)
    shown: list[Shown] = []
    async with Client(url, drafter="none", settings=settings) as alone:
        await alone.complete(asked, SamplingParams(max_tokens=1))
        async with Client(url, drafter="auto", settings=settings) as client:
            names = ", ".join(client.drafter_names) or "none"
            console.print(
                f"paceline (drafters: {names}; drafted tokens are {DRAFTED_STYLE})", style="bold", highlight=False
            )
            shown.append(Shown("paceline", await _stream(client.stream(asked, sampling), console)))
        console.print("server alone", style="bold")
        shown.append(Shown("server alone", await _stream(alone.stream(asked, sampling), console)))
    return shown[::-1]


async def _stream(stream: CompletionStream, console: Console) -> Completion:
    async for chunk in stream:
        for piece in chunk.pieces:
            style = DRAFTED_STYLE if piece.drafted else ""
            console.print(Text(piece.text, style=style), end="", soft_wrap=True, highlight=False)
    console.print("\n")
    return stream.completion


def gain_table(shown: list[Shown]) -> Table:
    """The figures side by side; the first one is the baseline."""
    made = Table(title_justify="left")
    made.add_column("")
    for one in shown:
        made.add_column(one.name, justify="right")
    baseline = shown[0]

    def line(name: str, values: list[str]) -> None:
        made.add_row(name, *values)

    line("tokens per second", [f"{one.tok_s:.1f}" for one in shown])
    line("speed", [f"{one.tok_s / baseline.tok_s:.2f}x" for one in shown])
    line("tokens per verification step", [f"{one.completion.stats.tokens_per_step:.2f}" for one in shown])
    line("drafted / accepted", [f"{one.completion.stats.drafted} / {one.completion.stats.accepted}" for one in shown])
    line("time to first token", [f"{one.completion.stats.ttft_s:.2f} s" for one in shown])
    same = [one.completion.token_ids == baseline.completion.token_ids for one in shown]
    line(
        "same tokens", ["" if one is baseline else ("yes" if ok else "no") for one, ok in zip(shown, same, strict=True)]
    )
    return made

"""``paceline complete`` and ``paceline chat``: the client in a terminal.

Not here: how anything is drafted or sent (``api``), and how it looks (``console``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, TypeVar

import typer

from paceline.client.api import Client, Prompt
from paceline.client.completion import CompletionStream
from paceline.client.console import describe, write, write_note, write_pieces
from paceline.client.history import forget as forget_histories
from paceline.client.history import history_folder
from paceline.client.result import Completion
from paceline.client.settings import ClientSettings, make_settings
from paceline.client.verifier import pick_verifier
from paceline.shared.errors import PacelineError, ParameterError
from paceline.shared.sampling import SamplingParams

Result = TypeVar("Result")


def _app(help_text: str) -> typer.Typer:
    return typer.Typer(help=help_text, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


complete_app = _app("One completion, streamed.")
chat_app = _app("A conversation in the terminal.")
forget_app = _app("Delete what --remember kept.")

Server = Annotated[str, typer.Option(envvar="PACELINE_SERVER", help="Server URL; several, separated by commas.")]
ApiKey = Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="Key that the server asks for.")]
MaxTokens = Annotated[int, typer.Option(envvar="PACELINE_MAX_TOKENS", help="Tokens of output at most.")]
Temperature = Annotated[float, typer.Option(envvar="PACELINE_TEMPERATURE", help="0 is greedy.")]
TopP = Annotated[float, typer.Option(envvar="PACELINE_TOP_P", help="Smallest set of likeliest tokens with this mass.")]
TopK = Annotated[int, typer.Option(envvar="PACELINE_TOP_K", help="This many likeliest tokens; 0 is all.")]
MinP = Annotated[float, typer.Option(envvar="PACELINE_MIN_P", help="Drop tokens below this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(envvar="PACELINE_SEED", help="Same seed, same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(envvar="PACELINE_STOP", help="End before this text; repeatable.")]
Verify = Annotated[str | None, typer.Option(envvar="PACELINE_VERIFY", help="greedy, coupled, mss or naive.")]
DrafterName = Annotated[
    str, typer.Option("--drafter", envvar="PACELINE_DRAFTER", help="auto, none, ssm, ngram, wrong, or a bundle.")
]
Tokenizer = Annotated[
    str | None, typer.Option(envvar="PACELINE_TOKENIZER", help="tokenizer.json, where no bundle has it.")
]
Threads = Annotated[
    int | None, typer.Option("--draft-threads", envvar="PACELINE_DRAFT_THREADS", help="For the draft model.")
]
Remember = Annotated[
    bool,
    typer.Option(
        "--remember",
        envvar="PACELINE_REMEMBER",
        help="Keep conversations on this machine, to draft from in later ones; `paceline forget` deletes them.",
    ),
]
Padding = Annotated[
    int, typer.Option(envvar="PACELINE_PADDING", help="Pad frames to N, 2N, 4N, ... bytes, both ways; 0 is off.")
]
Compression = Annotated[
    bool, typer.Option("--compression", envvar="PACELINE_COMPRESSION", help="Compress frames where the server agrees.")
]
Explain = Annotated[
    bool, typer.Option("--explain", envvar="PACELINE_EXPLAIN", help="Say what speculation chose, and why.")
]
Verbose = Annotated[bool, typer.Option("--verbose", envvar="PACELINE_VERBOSE", help="Log to stderr.")]

_COMPLETE_EXAMPLES = """
examples:

  paceline complete "The capital of France is" --server http://127.0.0.1:8765

  paceline complete "Write a haiku" --chat --temperature 0.7 --seed 1 --json
"""

_CHAT_EXAMPLES = """
examples:

  paceline chat --server http://127.0.0.1:8765

  paceline chat --system "Answer in one sentence." --temperature 0.7 --remember
"""

_FORGET_EXAMPLES = """
example:

  paceline forget
"""


def _run(coroutine: Coroutine[Any, Any, Result], verbose: bool) -> Result:
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, stream=sys.stderr, format="%(message)s")
    if not verbose:  # what the person should know of, but nothing of the libraries'
        logging.getLogger("paceline").setLevel(logging.WARNING)
    return asyncio.run(coroutine)


def _read(options: dict[str, Any]) -> tuple[ClientSettings, SamplingParams]:
    """From a command's options to the settings and the sampling parameters of the same names."""
    settings = make_settings(**{name: options[name] for name in options.keys() & ClientSettings.model_fields.keys()})
    wanted = {one.name: options[one.name] for one in fields(SamplingParams) if one.name in options}
    return settings, SamplingParams(**{**wanted, "stop": tuple(wanted.get("stop") or ())})


@complete_app.command(epilog=_COMPLETE_EXAMPLES)
def complete(
    prompt: Annotated[str, typer.Argument(help="Goes as it is; --chat wraps it as one user message.")],
    server: Server = "http://127.0.0.1:8765",
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    verify: Verify = None,
    drafter: DrafterName = "auto",
    chat: Annotated[bool, typer.Option("--chat", envvar="PACELINE_CHAT", help="Use the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="PACELINE_JSON", help="Print one JSON object.")] = False,
    tokenizer: Tokenizer = None,
    draft_threads: Threads = None,
    remember: Remember = False,
    padding: Padding = 0,
    compression: Compression = False,
    explain: Explain = False,
    verbose: Verbose = False,
) -> None:
    """One completion, streamed. What was drafted is green on a terminal."""
    settings, sampling = _read(dict(locals()))
    verifier = pick_verifier(verify, sampling)
    if not prompt:
        raise ParameterError("prompt", "expected a prompt of at least one token, got an empty one")
    asked: Prompt = [{"role": "user", "content": prompt}] if chat else prompt

    async def answer() -> Completion:
        async with Client(settings.server, settings=settings) as client:
            return await _show(client.stream(asked, sampling, verifier=verifier), is_quiet=as_json)

    completion = _run(answer(), verbose)
    if as_json:
        write(json.dumps(as_object(completion), ensure_ascii=True) + "\n")
    else:
        write("\n")
        write_note(describe(completion.stats, len(completion.token_ids)))
    if explain:
        write_note(completion.explanation)


async def _show(stream: CompletionStream, *, is_quiet: bool) -> Completion:
    """Print an answer as it comes. Leaving early (Ctrl-C, a closed pipe) cancels it on the server."""
    async with aclosing(stream.chunks()) as chunks:
        async for chunk in chunks:
            if not is_quiet:
                write_pieces(chunk.pieces)
    return stream.completion


def as_object(completion: Completion) -> dict[str, Any]:
    """What ``complete --json`` prints (DESIGN.md section 9)."""
    return {
        "text": completion.text,
        "prompt_tokens": list(completion.prompt_tokens),
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {
            "prompt_tokens": len(completion.prompt_tokens),
            "completion_tokens": len(completion.token_ids),
        },
        "stats": asdict(completion.stats),
    }


@chat_app.command(epilog=_CHAT_EXAMPLES)
def chat(
    server: Server = "http://127.0.0.1:8765",
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    verify: Verify = None,
    drafter: DrafterName = "auto",
    tokenizer: Tokenizer = None,
    draft_threads: Threads = None,
    remember: Remember = False,
    padding: Padding = 0,
    compression: Compression = False,
    system: Annotated[str | None, typer.Option(envvar="PACELINE_SYSTEM", help="System message.")] = None,
    verbose: Verbose = False,
) -> None:
    """A conversation. An empty line or the end of input leaves it; /new starts afresh; Ctrl-C stops an answer."""
    settings, sampling = _read(dict(locals()))
    pick_verifier(verify, sampling)
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="surrogateescape")  # bytes that are no text are refused with the message that holds them
    _run(_converse(settings, sampling, verify, system), verbose)


async def _converse(settings: ClientSettings, sampling: SamplingParams, verify: str | None, system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    async with Client(settings.server, settings=settings) as client:
        write_note(
            f"{client.welcome.model} at {settings.server}; drafters: {', '.join(client.drafter_names) or 'none'}"
        )
        while line := await asyncio.to_thread(_read_line):
            if line == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            try:
                stream = client.stream(messages, replace(sampling), verifier=verify)
                completion = await _show(stream, is_quiet=False)
            except PacelineError as error:
                write_note(f"error: {error}")
                messages.pop()
                continue
            write("\n")
            write_note(describe(completion.stats, len(completion.token_ids)))
            messages.append({"role": "assistant", "content": completion.text})


def _read_line() -> str:
    try:
        if sys.stdin.isatty():
            write("> ", sys.stderr)
        return sys.stdin.readline().strip()
    except (EOFError, KeyboardInterrupt):
        return ""


@forget_app.command(epilog=_FORGET_EXAMPLES)
def forget() -> None:
    """Delete every conversation that --remember kept on this machine."""
    try:
        count = forget_histories()
    except OSError as error:
        raise PacelineError(f"cannot delete what is in {history_folder()}: {error}") from error
    write_note(f"deleted the conversations of {count} {'server' if count == 1 else 'servers'}")

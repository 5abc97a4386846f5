"""The command ``paceline``: finds its subcommands by entry point, so that each installation has what its extras bring.

Not here: any option of any subcommand. Those live in their rooms, which this module imports only when asked to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Protocol, runtime_checkable

from paceline.shared.errors import EXIT_FAILURE, EXIT_USAGE, PacelineError

GROUP = "paceline.commands"
SUMMARIES = {
    "demo": ("demo", "stream a completion with the embedded pair and show the gain"),
    "serve": ("server", "serve a target model to clients that draft"),
    "complete": ("client", "one completion, streamed"),
    "chat": ("client", "a conversation in the terminal"),
    "forget": ("client", "delete the conversations that --remember kept"),
    "gateway": ("client", "a local OpenAI-compatible endpoint that drafts here"),
    "desktop": ("desktop", "the window"),
    "bench": ("demo", "measure a pair, simulated or real"),
    "models": ("models", "build, make and evaluate drafts"),
    "doctor": ("client", "check the installation, the link and the pair"),
}


def _commands() -> dict[str, EntryPoint]:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return {name: found[name] for name in [*SUMMARIES, *sorted(found.keys() - SUMMARIES.keys())] if name in found}


def _version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _help(commands: dict[str, EntryPoint]) -> str:
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {SUMMARIES.get(name, ('', ''))[1]}" for name in commands]
    example = 'paceline complete "The capital of France is" --server http://127.0.0.1:8765'
    head = ["usage: paceline COMMAND [OPTIONS]", "", "commands:"]
    tail = ["", "'paceline COMMAND --help' shows a command's options.", "", "example:", f"  {example}"]
    return "\n".join([*head, *lines, *tail])


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 0 success, 1 runtime failure, 2 usage."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = _commands()
    if not words or words[0] in {"--help", "-h", "help"}:
        print(_help(commands))  # noqa: T201
        return 0 if words else EXIT_USAGE
    if words[0] in {"--version", "-V"}:
        print(f"paceline {_version()}")  # noqa: T201
        return 0
    name, rest = words[0], words[1:]
    if name not in commands:
        return _fail(f"expected one of {', '.join(commands)}, got {name!r}", EXIT_USAGE)
    try:
        command: Callable[..., object] = commands[name].load()
    except ImportError as error:
        return _fail(_missing(name, error), EXIT_USAGE)
    return _run(command, name, rest)


def _missing(name: str, error: ImportError) -> str:
    extra = SUMMARIES.get(name, (name, ""))[0]
    if "DLL" in str(error):
        return f"{error}; install the Microsoft Visual C++ redistributable (2019 or newer, x64)"
    return f"paceline {name} needs the extra [{extra}]: pip install 'paceline[{extra}]' ({error})"


@runtime_checkable
class _UsageMistake(Protocol):
    """What the libraries that parse options raise, none of which this room may import."""

    exit_code: int

    def format_message(self) -> str: ...


def _refuse(mistake: _UsageMistake, name: str) -> int:
    message = mistake.format_message().strip()
    if not message or "\n" in message:  # a group of commands without one: its help says all
        print(message, file=sys.stderr)  # noqa: T201
        return mistake.exit_code
    typed = getattr(getattr(mistake, "ctx", None), "command_path", f"paceline {name}")
    sentence = message[:1].lower() + message[1:].rstrip(".")
    return _fail(f"{sentence}; `{typed} --help` shows what there is", mistake.exit_code)


def _run(command: Callable[..., object], name: str, rest: list[str]) -> int:
    try:
        result = command(args=rest, prog_name=f"paceline {name}", standalone_mode=False)
    except PacelineError as error:
        return _fail(str(error), error.exit_code)
    except ImportError as error:
        return _fail(_missing(name, error), EXIT_USAGE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return EXIT_FAILURE
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else (EXIT_FAILURE if exit_.code else 0)
    except Exception as error:
        if isinstance(error, _UsageMistake):
            return _refuse(error, name)
        raise
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())

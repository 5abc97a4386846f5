"""``paceline serve``: options to settings, settings to a server. Messages for people; nothing else is here."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from paceline.shared.errors import PacelineError, UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_LEVELS = ("debug", "info", "warning", "error")
_EPILOG = """examples:

  paceline serve --model smollm2

  paceline serve --model Qwen/Qwen3-8B --draft my-draft --host 0.0.0.0 --api-key-file keys.txt

  PACELINE_PORT=9000 paceline serve --model ./my-model --dtype bfloat16"""


def _option(name: str, text: str, *others: str) -> typer.models.OptionInfo:
    """An option with its environment twin."""
    twin = "PACELINE_" + name.removeprefix("--").replace("-", "_").upper()
    option: typer.models.OptionInfo = typer.Option(name, *others, help=text, envvar=twin, show_default=False)
    return option


@app.command(epilog=_EPILOG)
def serve(
    model: Annotated[str, _option("--model", "smollm2, a Hugging Face id or folder, or a .gguf file")] = "smollm2",
    draft: Annotated[
        list[str] | None, _option("--draft", "a draft bundle to offer; repeatable [the model's own]")
    ] = None,
    host: Annotated[str, _option("--host", "address to listen on [127.0.0.1]")] = "127.0.0.1",
    port: Annotated[int, _option("--port", "port to listen on, 0 picks a free one [8765]")] = 8765,
    device: Annotated[str, _option("--device", "auto, cpu, cuda, cuda:1, mps")] = "auto",
    dtype: Annotated[str, _option("--dtype", "auto, float32, bfloat16, float16")] = "auto",
    quantize: Annotated[str | None, _option("--quantize", "int8 or int4: weight-only quantisation")] = None,
    attention: Annotated[str, _option("--attention", "attention backend: auto, or one by name")] = "auto",
    kv_memory: Annotated[str | None, _option("--kv-memory", "size of the KV pool, such as 4GiB")] = None,
    max_context: Annotated[int | None, _option("--max-context", "tokens of prompt and output at most")] = None,
    api_key_file: Annotated[str | None, _option("--api-key-file", "file with one name:key a line")] = None,
    max_running: Annotated[int | None, _option("--max-running", "generations that share steps [64]")] = None,
    max_queue: Annotated[int | None, _option("--max-queue", "generations that may wait [256]")] = None,
    max_connections: Annotated[int | None, _option("--max-connections", "open websockets [1024]")] = None,
    max_step_rows: Annotated[int | None, _option("--max-step-rows", "packed rows of a step [1024]")] = None,
    max_nodes: Annotated[int | None, _option("--max-nodes", "nodes scored per generation and step [128]")] = None,
    patience: Annotated[str | None, _option("--patience", "seconds to wait for a draft: auto, or 0..2 [auto]")] = None,
    log_level: Annotated[str, _option("--log-level", "debug, info, warning or error [info]")] = "info",
    cors_origins: Annotated[
        str | None, _option("--cors-origins", "web origins that may call, comma-separated; localhost, or *")
    ] = None,
    allowed_hosts: Annotated[
        str | None, _option("--allowed-hosts", "names in the Host header, comma-separated, or *")
    ] = None,
    max_body: Annotated[str | None, _option("--max-body", "size of an HTTP body at most [8MiB]")] = None,
    grace: Annotated[float | None, _option("--grace", "seconds that generations have to end on shutdown [20]")] = None,
    stall_timeout: Annotated[float | None, _option("--stall-timeout", "not ready if a step takes longer [120]")] = None,
    ping_interval: Annotated[float | None, _option("--ping-interval", "seconds between websocket pings [20]")] = None,
    ping_timeout: Annotated[float | None, _option("--ping-timeout", "seconds a pong may take [90]")] = None,
    padding: Annotated[
        int | None, _option("--padding", "pad frames to N, 2N, 4N, ... bytes, so that sizes tell nothing [0: off]")
    ] = None,
    compression: Annotated[bool, _option("--compression", "compress frames for clients that offer it [off]")] = False,
    ssl_certfile: Annotated[str | None, _option("--ssl-certfile", "TLS certificate")] = None,
    ssl_keyfile: Annotated[str | None, _option("--ssl-keyfile", "TLS key")] = None,
) -> None:
    """Serve a target model to clients that draft, and to any OpenAI client without drafts."""
    # Every parameter is a setting of the same name.
    values = dict(locals())
    from paceline.server.settings import make_settings

    _set_up_logging(log_level)
    try:
        settings = make_settings(**{name: value for name, value in values.items() if value not in (None, [])})
        from paceline.server.serving import serve as run  # imports torch: seconds that a wrong option need not wait

        code = run(settings)
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _set_up_logging(level: str) -> None:
    """Our own lines on stderr. Nothing at any level holds a prompt, a token or a key."""
    if level.lower() not in _LEVELS:
        raise UsageError(f"expected --log-level {', '.join(_LEVELS)}, got {level}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("paceline")
    ours.handlers[:] = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False
    # uvicorn's lines name addresses of clients at info level and add nothing that ours do not say.
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.handlers[:] = [handler]
    uvicorn.setLevel(logging.INFO if level.lower() == "debug" else logging.WARNING)
    uvicorn.propagate = False

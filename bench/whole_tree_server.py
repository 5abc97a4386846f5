"""The baselines' server as a process: ours, but it scores every node that it is sent, as the published systems do.

    python -m paceline.bench.whole_tree_server --model smollm2 --port 8766

Ours scores the nodes that pay; a baseline whose trees were cut down for it would be another method. With a wish for
patience (``real_waiting``) it also waits for every tree.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from paceline.bench.whole_trees import WholeTreeEngine
from paceline.server.app import ServerState
from paceline.server.driver import EngineDriver, Served
from paceline.server.serving import bind, load, run_server
from paceline.server.settings import ServerSettings, make_settings
from paceline.shared.errors import PacelineError


def _load(settings: ServerSettings) -> Served:
    served = load(settings)
    decode = None if served.text is None else served.text.decode
    return Served(
        WholeTreeEngine(served.engine.target, served.engine.settings, decode), served.fingerprint, served.text
    )


def serve(settings: ServerSettings) -> int:
    """Serve until told to stop. Returns the exit code."""
    state = ServerState(settings, EngineDriver(lambda: _load(settings), stall_s=settings.stall_timeout))
    listener = bind(settings)
    try:
        return asyncio.run(run_server(settings, state, listener))
    finally:
        listener.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.whole_tree_server", description="for baselines")
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    wishes = parser.parse_args(arguments)
    try:
        sys.exit(serve(make_settings(model=wishes.model, port=wishes.port)))
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

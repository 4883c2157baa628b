"""`python -m streamdiff.server.web_process`: the web server of a running engine, started by the engine process
(`engine.process.rank0_server`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from streamdiff.config import ModelConfig
from streamdiff.engine.process import private_folder
from streamdiff.engine.process.fetching import Progress
from streamdiff.engine.process.parent_engine import ParentEngine
from streamdiff.server import main as server


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m streamdiff.server.web_process", description="a running engine's web side"
    )
    parser.add_argument("--address", type=Path, required=True, help="private folder: IPC socket, configuration")
    options = parser.parse_args()
    config = private_folder.read_config(options.address)
    # The engine is this process's parent, and takes it along: whoever started the engine starts both again.
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"max_restarts": 0})})
    return server.run(config, supervise=lambda _: ParentEngine(options.address), fetch=_fetch_nothing)


async def _fetch_nothing(config: ModelConfig, report: Callable[[Progress], None]) -> None:
    """The engine fetches what it needs by itself."""


if __name__ == "__main__":
    raise SystemExit(main())

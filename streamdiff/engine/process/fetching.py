"""Fetches what a model needs and is not on disk, before an engine starts, in a process of its own
(`models.download`).

Not in the engine, which is given up when it is silent for too long while it loads. Torch-free, asyncio.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from streamdiff import child_process
from streamdiff.config import ModelConfig
from streamdiff.engine.process.engine_process import name_exit
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.models import resolve
from streamdiff.models.download import LEAVE_S, DownloadProgress

__all__ = ["DownloadProgress", "fetch"]


async def fetch(config: ModelConfig, tell: Callable[[DownloadProgress], None]) -> None:
    """Download missing files of a model, in a process of its own; `tell` is called with the progress several times a
    second. Starts nothing for a model without published files. Ends the process when cancelled.

    Raises:
        ConfigError: no such model, or something cannot be had.
        EngineFailure: the process ended without a message.
    """
    if not resolve.to_fetch(config):
        return
    # In a session of its own: Ctrl-C is for the web process, which then ends this one.
    process = await child_process.start("streamdiff.models.download", start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        await process.stdin.drain()
        while line := await process.stdout.readline():
            report = json.loads(line)
            if "error" in report:
                raise ConfigError(report["error"])
            tell(DownloadProgress(**report))
        if code := await process.wait():
            raise EngineFailure(f"the process that fetches the model's files ended {name_exit(code)}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # it removes partial files, which are not resumed
        await child_process.end(process, LEAVE_S)

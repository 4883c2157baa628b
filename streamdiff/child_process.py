"""The Python child processes that the package starts: their environment, start and end."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any


def environment() -> dict[str, str]:
    """This process's variables, and what a child needs to import this very package and no module of the current folder:
    `python -m` would look there first."""
    root = Path(__file__).resolve().parents[1]
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if str(root) not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables


async def start(module: str, *arguments: str, **options: Any) -> Process:
    """Start `python -m module`, with its standard input and output as pipes. `options` are those of asyncio."""
    command = (sys.executable, "-m", module, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment(), **options)


async def end(process: Process, limit_s: float) -> None:
    """Wait until a process has ended; one that has not after `limit_s` is killed."""
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()

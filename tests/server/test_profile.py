"""`serve --profile`: a trace of a stream that plays."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from streamdiff.pipeline.profiler import TRACE
from tests.server.test_restart import LIMIT_S, ROOT, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`serve` with both outputs in one, and its address; ended as by Ctrl-C. No spare takes the engine's time."""
    (folder / "alone.yaml").write_text("serve: {warm_standby: false}")
    command = [sys.executable, "-m", "streamdiff", "serve", "--no-browser", "--port", "0", *options]
    command += ["--config", str(folder / "alone.yaml")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, re.findall(r"http://\S+/", until(process, "http://"))[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], text: str) -> str:
    """What the process writes up to a line with `text`."""
    assert process.stdout is not None
    written = ""
    for line in process.stdout:
        written += line
        if text in line:
            return written
    raise AssertionError(written)


def watched_until(process: subprocess.Popen[str], url: str, text: str) -> None:
    """Let a viewer watch until the server says `text`."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http, watching(http):
            async with asyncio.timeout(LIMIT_S):
                await asyncio.to_thread(until, process, text)

    asyncio.run(main())


def written(folder: Path) -> set[str]:
    """Names of the events in the trace; nothing else is in the folder."""
    assert [path.name for path in folder.iterdir()] == [TRACE]
    with gzip.open(folder / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events}


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_stream_that_is_watched_is_traced(tmp_path: Path, stages: int) -> None:
    ring = ("--stages", "2", "--kv-context", "staircase") if stages == 2 else ()
    with serving(tmp_path, "--profile", str(tmp_path / "costs"), *ring) as (process, url):
        watched_until(process, url, "streamdiff: trace of 4 chunks")
        names = written(tmp_path / "costs")
    assert {"aten::scaled_dot_product_attention", "aten::addmm"} <= names
    assert sum(name.startswith("ProfilerStep#") for name in names) == 4

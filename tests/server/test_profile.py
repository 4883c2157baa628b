"""`serve --profile`: a trace of a stream that plays."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from streamdiff.pipeline.profiler import TRACE
from tests.server.test_restart import LIMIT_S, MODEL, serving, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_a_stream_that_is_watched_is_traced(tmp_path: Path, stages: int) -> None:
    (tmp_path / "alone.yaml").write_text("serve: {warm_standby: false}")  # no spare takes the engine's time
    options = ("--config", str(tmp_path / "alone.yaml"), "--profile", str(tmp_path / "costs"))
    ring = ("--stages", "2", "--kv-context", "staircase") if stages == 2 else ()
    async with serving(*options, *ring, program=MODEL) as (server, http), watching(http), asyncio.timeout(LIMIT_S):
        while "streamdiff: trace of 4 chunks" not in server.complaints:
            await asyncio.sleep(0.05)
    assert [path.name for path in (tmp_path / "costs").iterdir()] == [TRACE]
    with gzip.open(tmp_path / "costs" / TRACE, "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::scaled_dot_product_attention", "aten::addmm"} <= names
    assert sum(name.startswith("ProfilerStep#") for name in names) == 4

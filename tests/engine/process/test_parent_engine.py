from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamdiff.engine.process.parent_engine import ParentEngine
from streamdiff.errors import EngineFailure


@pytest.fixture
def engine_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.BufferedWriter]:
    """The end of this process's standard input that its parent, the engine, would hold."""
    reads, writes = os.pipe()
    with os.fdopen(reads) as standard_input, os.fdopen(writes, "wb") as end:
        monkeypatch.setattr("sys.stdin", standard_input)
        yield end


def test_an_engine_that_ends_before_it_is_ready_is_told(tmp_path: Path, engine_end: io.BufferedWriter) -> None:
    async def scene() -> None:
        engine = ParentEngine(tmp_path)
        engine_end.close()
        with pytest.raises(EngineFailure, match="the engine ended without a word"):
            await engine.start()
        await engine.stop()

    asyncio.run(scene())

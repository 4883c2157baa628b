"""An engine that is killed while video feeds a session: the next one goes on from the frames that come then."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.sessions.test_video_input import video
from tests.server.test_restart import LIMIT_S, MODEL, serving, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


async def figures(http: httpx.AsyncClient, wanted: Any) -> dict[str, Any]:
    """The state when `wanted` holds of how many frames were used."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = (await http.get("/api/state")).json()
            if "stats" in found and found["stats"]["input"] and wanted(found["stats"]["input"]["used"]):
                return dict(found)
            await asyncio.sleep(0.05)


async def test_the_next_engine_is_fed_with_the_frames_that_come_then(tmp_path: Path) -> None:
    options = ("--input", video(tmp_path / "long.mp4", 3000), "--device", "cpu")
    async with serving(*options, program=MODEL) as (server, http), watching(http) as viewer:
        await figures(http, lambda used: used >= 36)
        said = len(viewer.messages)
        server.engine.send_signal(signal.SIGKILL)
        await viewer.after(said, {"type": "state", "engine": "restarting"})
        before = (await figures(http, lambda used: True))["stats"]["input"]["used"]
        after = await figures(http, lambda used: used not in (0, before))
        assert after["state"]["input"] == {"kind": "file", "strength": 0.4, "fault": ""}
        assert after["state"]["engine"] == "running"
        await viewer.until_frame(lambda pts, colour: True)
    assert "Traceback" not in server.complaints

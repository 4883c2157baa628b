"""A third-party WHEP viewer: libwebrtc in Node. `tools/interop.sh` installs it; see there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import open_site

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.node]

VIEWER = Path(__file__).with_name("whep_viewer.js")


RED = (93, 102, 201)
"""The scripted picture's red in BT.601's Y, U and V."""


async def _play(url: str) -> tuple[dict[str, Any], str]:
    """What the viewer saw, and what it complained about."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", str(VIEWER), url, "80", stdout=pipe, stderr=pipe)
    out, complaints = await process.communicate()
    return json.loads(out or "{}"), complaints.decode()


async def test_libwebrtc_plays_the_stream_and_speaks_on_the_channel() -> None:
    async with open_site() as site:
        # This build of libwebrtc has no H.264: the server goes on to what both have, or says so.
        _, complaints = await _play(f"{site.base}/whep?codec=h264")
        assert complaints.startswith("422") and '"code":"codec"' in complaints
        found, complaints = await _play(f"{site.base}/whep/default")
        assert not complaints
        assert found["codec"] == "VP8"
        assert found["frames"] >= 80
        assert (found["width"], found["height"]) == (128, 128)
        assert (found["y"], found["u"], found["v"]) == pytest.approx(RED, abs=8)
        assert found["patches"]
        assert set(found["patches"]) == {204}
        assert found["messages"] >= 2
        assert found["deleted"] == 200
        assert site.state.viewers.count == 0

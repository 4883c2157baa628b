"""A third-party WHEP viewer and WHIP sender: GStreamer's webrtcbin. `tools/interop.sh` installs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.browser import Server, running_server
from tests.browser.looking import painted_server
from tests.server.routes.test_whip import fed, served, state, used

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.gstreamer]

VIEWER, SENDER = (
    ("/usr/bin/python3", "-Es", str(Path(__file__).with_name(name))) for name in ("gst_viewer.py", "gst_sender.py")
)
"""The system's Python: GStreamer's bindings belong to it, and no package index has them."""

SEEN = {
    "h264": {"red": (88, 112, 201), "blue": (86, 194, 105)},
    "vp8": {"red": (100, 104, 201), "blue": (88, 195, 100)},
}
"""Y, U and V of what the painter paints: by BT.709 in H.264, which says so, by BT.601 in VP8, which knows no other."""


@dataclass(eq=False)
class Viewer:
    """A running viewer and what it tells."""

    process: subprocess.Popen[str]

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next fact that is wanted. The viewer ends by itself when nothing comes of it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if wanted(fact := json.loads(line)):
                return fact
        raise AssertionError(f"the viewer has ended: {self.complaint()}")

    def say(self, **message: Any) -> None:
        """Send a message on the control channel."""
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def complaint(self) -> str:
        """What it says went wrong, when it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def viewer(url: str, codec: str) -> Iterator[Viewer]:
    """A viewer of one session that offers one codec."""
    pipe = subprocess.PIPE
    with subprocess.Popen((*VIEWER, url, codec), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Viewer(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(painted_server()) as server:
        yield server


@pytest.mark.parametrize("codec", ["h264", "vp8"])
def test_webrtcbin_plays_the_stream_and_steers_it(server: Server, codec: str) -> None:
    def shows(colour: str) -> Callable[[dict[str, Any]], bool]:
        return lambda fact: "frame" in fact and fact["yuv"] == pytest.approx(SEEN[codec][colour], abs=4)

    with viewer(server.url + "whep", codec) as playing:
        assert playing.until(lambda fact: "status" in fact) == {"status": 201, "codec": codec.upper()}
        playing.until(lambda fact: "message" in fact and fact["message"]["type"] == "hello")
        for colour in ("red", "blue"):
            playing.say(type="prompt", id=colour, prompt=f"a {colour} circle")
            frame = playing.until(shows(colour))
            assert (frame["width"], frame["height"]) == (128, 128)
            later = playing.until(lambda fact, since=frame: fact.get("frame", 0) >= since["frame"] + 40)  # type: ignore[misc]
            assert shows(colour)(later)
            assert later["pts_s"] > frame["pts_s"]
        assert playing.process.stdin is not None
        playing.process.stdin.close()
        assert playing.until(lambda fact: "deleted" in fact) == {"deleted": 200}
        assert playing.process.wait() == 0, playing.complaint()
    assert httpx.get(server.url + "api/state", timeout=20).json()["viewers"] == 0


def test_a_codec_that_webrtcbin_did_not_offer_is_named(server: Server) -> None:
    with viewer(server.url + "whep?codec=vp8", "h264") as refused:
        assert refused.process.wait() == 1
        complaint = refused.complaint()
    assert complaint.startswith("422")
    assert "offer VP8" in complaint


@pytest.mark.parametrize("codec", ["h264", "vp8"])
async def test_webrtcbin_feeds_a_session_and_takes_its_leave(codec: str) -> None:
    async with served() as site:
        await (await site.watch()).frame()
        pipe = asyncio.subprocess.PIPE
        sender = await asyncio.create_subprocess_exec(*SENDER, f"{site.base}/whip", codec, stdin=pipe, stderr=pipe)
        try:
            figures = await used(site)
            assert figures["size"] == [320, 240]
            assert np.abs(np.median(fed(site)[-1].reshape(-1, 3), axis=0) - (0, 255, 0)).max() < 40
            assert (await state(site))["input"]["kind"] == "WHIP sender"
            _, complaint = await sender.communicate(b"")
            assert sender.returncode == 0, complaint
            assert (await state(site))["input"] is None and not site.state.feeders._peers
        finally:
            with contextlib.suppress(ProcessLookupError):
                sender.kill()

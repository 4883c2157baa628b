"""Control, state, health and metrics over HTTP and over a viewer's data channel, against a running server."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from streamdiff.engine.messages import Refused
from streamdiff.server import app as app_module
from streamdiff.server.app import STATIC
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES
from streamdiff.server.sessions.live_session import OPENING
from tests.server.conftest import open_site
from tests.server.scripted import Painter
from tests.server.webrtc.test_viewers import _colour, _is, _until_colour

pytestmark = pytest.mark.slow


async def test_the_page_comes_with_all_it_needs_from_here_only() -> None:
    async with open_site() as site:
        page = await site.http.get("/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "<script>" not in page.text and "style=" not in page.text and "onclick" not in page.text
        assert "http://" not in page.text and "https://" not in page.text
        scripts = sorted(path.name for path in STATIC.iterdir() if path.name.endswith(".js"))
        names = (*scripts, "style.css", "icon.svg")
        for name in names:
            response = await site.http.get(f"/static/{name}")
            assert response.status_code == 200
            assert set(re.findall(r'from "\./([^"]+)"', response.text)) <= set(names), f"{name} imports these"
            assert response.content == (Path(str(app_module.STATIC)) / name).read_bytes()
        assert (await site.http.get("/static/../app.py")).status_code == 404


async def test_bad_requests_over_http() -> None:
    """What each message is refused for is asked in `test_control`."""
    async with open_site() as site:
        table: list[tuple[bytes, int, str]] = [
            (b"", 400, ""),
            (b'{"type":"prompt","prompt":"\\ud800"}', 400, ""),
            (b'{"type":"pause","\\ud800":1,"id":"\\udfff"}', 400, ""),
            (b'{"type":"prompt","prompt":"' + b"x" * 100_000 + b'"}', 422, "prompt"),
            (b'{"type":"reset","seed":1e999}', 422, "seed"),
            (b'{"type":"prompt","prompt":"' + b"x" * 300_000 + b'"}', 413, ""),
        ]
        headers = {"Content-Type": "application/json"}
        before = (await site.http.get("/api/state")).json()["state"]
        for body, status, field in table:
            response = await site.http.post("/api/control", content=body, headers=headers)
            assert response.status_code == status, (body[:60], response.text)
            assert response.json().get("field", "") == field
        assert (await site.http.post("/api/control", content=b"type=pause")).status_code == 415
        assert (await site.http.post("/api/control?session=x", json={"type": "pause"})).status_code == 404
        assert (await site.http.get("/api/control")).status_code == 405
        assert (await site.http.get("/api/state")).json()["state"] == before


async def test_a_flood_of_messages_is_cut_and_the_video_goes_on() -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        assert peer.pc.sctp._remote_max_message_size == MAX_MESSAGE_BYTES
        for number in range(400):
            peer.channel.send(json.dumps({"type": "prompt", "prompt": "purple", "id": number}))
        assert await peer.message({"type": "error", "code": "rate_limited"})
        await _until_colour(peer, "purple")
        assert sum(message.get("code") == "rate_limited" for message in peer.messages) < 20


class PlanesPainter(Painter):
    """Hands out YUV420, as an engine on a GPU does."""

    def _paint(self, *given: Any) -> np.ndarray:
        frame = av.VideoFrame.from_ndarray(super()._paint(*given), format="rgb24")
        return frame.reformat(format="yuv420p", dst_colorspace="ITU709").to_ndarray()


async def test_pictures_in_yuv420_are_seen_in_their_colours_live_and_as_a_picture() -> None:
    async with open_site(painter=PlanesPainter()) as site:
        peer = await site.watch()
        assert _is(_colour(await peer.frame()), "red")
        await site.http.post("/api/control", json={"type": "prompt", "prompt": "blue"})
        await _until_colour(peer, "blue")
        picture = np.asarray(Image.open(BytesIO((await site.http.get("/frame.jpg")).content)))
        assert picture.shape == (128, 128, 3)
        assert _is(tuple(int(c) for c in picture[40, 40]), "blue")


async def test_a_clip_shows_what_its_viewers_saw_last() -> None:
    async with open_site() as site:
        assert (await site.http.get("/api/sessions/default/clip")).status_code == 409, "nobody has seen anything"
        peer = await site.watch()
        await _until_colour(peer, "red")
        await site.http.post("/api/control", json={"type": "prompt", "prompt": "blue"})
        await _until_colour(peer, "blue")
        answer = await site.http.get("/api/sessions/default/clip?seconds=30")
        assert answer.headers["content-type"].startswith("video/")
        with av.open(BytesIO(answer.content)) as video:
            pictures = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        first, last = (tuple(int(c) for c in pictures[at][40, 40]) for at in (0, -1))
        assert _is(first, "red") and _is(last, "blue")
        assert (await site.http.get("/api/sessions/default/clip?seconds=31")).status_code == 400
        await peer.pc.close()
        await site.until(lambda: not site.live.watched)
        assert (await site.http.get("/api/sessions/default/clip")).status_code == 409, "and nothing is kept"


async def test_a_session_that_cannot_open_is_no_silent_black_page() -> None:
    async with open_site() as site:
        site.live.place = "none"
        await site.client.inject(Refused("default", OPENING, "prompt", "the prompt is silly"))
        await site.state.manager.ended.wait()
        assert "silly" in (await site.http.get("/readyz")).json()["detail"]

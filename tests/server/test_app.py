"""Control, state, health and metrics over HTTP and over a viewer's data channel, against a running server."""

from __future__ import annotations

import asyncio
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from streamdiff.config import Config, ServeConfig
from streamdiff.engine.messages import Ready, Refused
from streamdiff.errors import ConfigError
from streamdiff.server import app as app_module
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES
from streamdiff.server.sessions.live_session import OPENING
from tests.server.conftest import Site, open_site, run_scene
from tests.server.scripted import CHUNK_FRAMES, COLOURS, Painter
from tests.server.webrtc.test_viewers import _colour, _is, _until_colour

pytestmark = pytest.mark.slow


def test_the_page_comes_with_all_it_needs_from_here_only() -> None:
    async def scene(site: Site) -> None:
        page = await site.http.get("/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "<script>" not in page.text and "style=" not in page.text and "onclick" not in page.text
        assert "http://" not in page.text and "https://" not in page.text
        scripts = ("app", "camera", "client", "dom", "fold", "picture", "share", "stats", "suggestions")
        names = (*(f"{name}.js" for name in scripts), "style.css", "icon.svg")
        for name in names:
            response = await site.http.get(f"/static/{name}")
            assert response.status_code == 200
            assert set(re.findall(r'from "\./([^"]+)"', response.text)) <= set(names), f"{name} imports these"
            assert response.content == (Path(str(app_module.STATIC)) / name).read_bytes()
        assert (await site.http.get("/static/../app.py")).status_code == 404

    run_scene(scene)


def test_a_prompt_over_http_changes_the_pixels() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        assert _is(_colour(await peer.frame()), "red")
        response = await site.http.post("/api/control", json={"type": "prompt", "prompt": "all  blue", "id": 9})
        receipt = response.json()
        assert (response.status_code, receipt["stage"], receipt["id"], receipt["text"]) == (
            200,
            "accepted",
            9,
            "all blue",
        )
        await _until_colour(peer, "blue")
        state = (await site.http.get("/api/state")).json()
        assert state["state"]["prompt"] == "all blue"
        assert state["engine"]["examples"]
        assert state["viewers"] == 1

    run_scene(scene)


def test_unknown_words_bring_a_notice_and_the_stream_goes_on() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.frame()
        peer.channel.send(json.dumps({"type": "prompt", "prompt": "a dragon", "id": 1}))
        accepted = await peer.message({"type": "receipt", "stage": "accepted"})
        assert "red, green, blue" in accepted["notice"]
        state = await peer.message({"type": "state", "notice": accepted["notice"]})
        assert state["prompt"] == "a dragon"
        assert state["text"] != "a dragon"
        assert _is(_colour(await peer.frame()), "red")

    run_scene(scene)


def test_reset_takes_a_seed_and_drops_what_was_made_before() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.frame()
        await site.http.post("/api/control", json={"type": "pause"})
        response = await site.http.post("/api/control", json={"type": "reset", "seed": 77})
        assert response.json()["kind"] == "reset"
        state = (await site.http.get("/api/state")).json()
        assert state["state"]["seed"] == 77
        assert state["state"]["paused"] is False, "a reset plays"
        live = site.state.manager.get("default")
        assert live is not None
        await site.until(lambda: live.stats()["dropped"] > 0)
        frame = live.stats()["frame"]
        await site.until(lambda: live.stats()["frame"] > frame + 8)

    run_scene(scene)


def test_bad_requests_over_http() -> None:
    async def scene(site: Site) -> None:
        table: list[tuple[bytes, int, str]] = [
            (b"", 400, ""),
            (b"{", 400, ""),
            (b"[1]", 400, ""),
            (b'{"type":"prompt","prompt":NaN}', 400, ""),
            (b'{"type":"explode"}', 422, "type"),
            (b'{"type":"prompt","prompt":""}', 422, "prompt"),
            (b'{"type":"prompt","prompt":"  "}', 422, "prompt"),
            (b'{"type":"prompt","prompt":"a\\u0000"}', 422, "prompt"),
            (b'{"type":"prompt","prompt":"\\ud800"}', 400, ""),
            (b'{"type":"pause","id":true}', 422, "id"),
            (b'{"type":"pause","id":1.5}', 422, "id"),
            (b'{"type":"prompt","prompt":"' + b"x" * 100_000 + b'"}', 422, "prompt"),
            (b'{"type":"prompt","prompt":"a","strength":1}', 422, "strength"),
            (b'{"type":"pause","\\ud800":1,"id":"\\udfff"}', 400, ""),
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

    run_scene(scene)


def test_garbage_on_the_data_channel_is_answered_and_nothing_changes() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        assert peer.pc.sctp._remote_max_message_size == MAX_MESSAGE_BYTES
        peer.pc.sctp._remote_max_message_size = 0  # it sends more than it was told that it may
        for text, code in [
            ("[" * 10_000, "bad_json"),
            ('{"type":"pause","later":true,"id":"\\ud800"}', "bad_json"),
            ('{"type":"pause","id":{"deep":["er"]}}', "out_of_range"),
            (json.dumps({"type": "prompt", "prompt": "x" * 20_000}), "too_large"),
        ]:
            peer.channel.send(text)
            assert (await peer.message({"type": "error", "code": code}))["message"]
        peer.channel.send(b"\x00\xff")
        assert await peer.message({"type": "error", "code": "binary"})
        peer.channel.send('{"type":"ping","id":5}')
        assert await peer.message({"type": "pong", "id": 5})
        await peer.frame()

    run_scene(scene)


def test_a_flood_of_messages_is_cut_and_the_video_goes_on() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        for number in range(400):
            peer.channel.send(json.dumps({"type": "prompt", "prompt": "purple", "id": number}))
        assert await peer.message({"type": "error", "code": "rate_limited"})
        await _until_colour(peer, "purple")
        assert sum(message.get("code") == "rate_limited" for message in peer.messages) < 20

    run_scene(scene)


def test_of_many_prompts_the_latest_wins() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        names = [*list(COLOURS), "yellow"]
        for number, name in enumerate(names):
            peer.channel.send(json.dumps({"type": "prompt", "prompt": name, "id": number}))
        assert await peer.message({"type": "receipt", "id": len(names) - 1, "stage": "shown"})
        await _until_colour(peer, "yellow")
        ends = {message["id"]: message["stage"] for message in peer.messages if message["type"] == "receipt"}
        assert set(ends) == set(range(len(names)))
        assert set(ends.values()) <= {"shown", "superseded"}, "every request was told its end"

    run_scene(scene)


def test_channels_that_are_not_for_control_are_closed() -> None:
    async def scene(site: Site) -> None:
        peer = await site.offer()
        other = peer.pc.createDataChannel("gossip")
        await site.post(peer)
        await peer.message({"type": "hello"})
        await site.until(lambda: other.readyState == "closed")
        assert peer.channel.readyState == "open"

    run_scene(scene)


def test_everybody_hears_of_a_change_and_only_the_asker_gets_receipts() -> None:
    async def scene(site: Site) -> None:
        asks, hears = await site.watch(), await site.watch()
        await asyncio.gather(asks.message({"type": "hello"}), hears.message({"type": "hello"}))
        asks.channel.send(json.dumps({"type": "pause", "id": 1}))
        await asks.message({"type": "receipt", "id": 1, "stage": "accepted"})
        assert await hears.message({"type": "state", "paused": True})
        assert not [message for message in hears.messages if message["type"] == "receipt"]

    run_scene(scene)


def test_viewers_hear_how_busy_each_rank_of_a_ring_is() -> None:
    async def scene(painter: Painter) -> dict[str, object]:
        async with open_site(painter=painter) as site:
            peer = await site.watch()
            for _ in range(2 * CHUNK_FRAMES):
                await peer.frame()
            peer.messages.clear()
            return await peer.message({"type": "stats"})

    assert asyncio.run(scene(Painter(chunk_s=0.02, shares=(0.75, 0.5))))["occupancy"] == [0.75, 0.5]
    assert asyncio.run(scene(Painter(chunk_s=0.02)))["occupancy"] == []


def test_a_frame_is_encoded_once_however_many_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    save = Image.Image.save

    def counted(self: Image.Image, *given: Any, **named: Any) -> None:
        encoded.append(self.size)
        save(self, *given, **named)

    monkeypatch.setattr(Image.Image, "save", counted)

    async def ask(site: Site, times: int) -> set[bytes]:
        answers = await asyncio.gather(*(site.http.get("/frame.jpg") for _ in range(times)))
        assert {answer.status_code for answer in answers} == {200}
        return {answer.content for answer in answers}

    async def scene(site: Site) -> None:
        live = site.state.manager.get("default")
        assert live is not None
        # Nobody watches: it stays.
        await site.until(lambda: live.playback.pacer.picture() is not None and not site.client.busy)
        [first] = await ask(site, 20)
        assert await ask(site, 20) == {first}
        assert len(encoded) == 1
        before = live.playback.pacer.picture()
        await site.http.post("/api/control", json={"type": "prompt", "prompt": "blue"})
        await site.http.post("/api/control", json={"type": "reset"})
        await site.until(lambda: live.playback.pacer.picture() is not before and not site.client.busy)
        [second] = await ask(site, 20)
        assert len(encoded) == 2
        for jpeg, colour in ((first, "red"), (second, "blue")):
            assert _is(tuple(int(c) for c in np.asarray(Image.open(BytesIO(jpeg)))[40, 40]), colour)

    run_scene(scene)


class PlanesPainter(Painter):
    """Hands out YUV420, as an engine on a GPU does."""

    def _paint(self, *given: Any) -> np.ndarray:
        frame = av.VideoFrame.from_ndarray(super()._paint(*given), format="rgb24")
        return frame.reformat(format="yuv420p", dst_colorspace="ITU709").to_ndarray()


def test_pictures_in_yuv420_are_seen_in_their_colours_live_and_as_a_picture() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        assert _is(_colour(await peer.frame()), "red")
        await site.http.post("/api/control", json={"type": "prompt", "prompt": "blue"})
        await _until_colour(peer, "blue")
        picture = np.asarray(Image.open(BytesIO((await site.http.get("/frame.jpg")).content)))
        assert picture.shape == (128, 128, 3)
        assert _is(tuple(int(c) for c in picture[40, 40]), "blue")

    run_scene(scene, painter=PlanesPainter())


def test_viewers_hear_that_the_server_ends() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        await site.state.viewers.stop()
        assert (await peer.message({"type": "bye"}))["reason"] == "shutdown"
        assert site.state.viewers.count == 0

    run_scene(scene)


def test_a_session_that_cannot_open_is_no_silent_black_page() -> None:
    async def scene(site: Site) -> None:
        live = site.state.manager.get("default")
        assert live is not None
        live.opened = False
        await site.client.inject(Refused("default", OPENING, "prompt", "the prompt is silly"))
        await site.state.manager.ended.wait()
        assert "silly" in (await site.http.get("/readyz")).json()["detail"]

    run_scene(scene)


def test_a_size_that_cannot_be_encoded_is_refused_at_once() -> None:
    config = Config(serve=ServeConfig(upscale=1))
    ready = Ready("m", "cpu", 127, 128, 40.0, 8, 4, "clean")

    async def attach() -> None:
        app = app_module.create_app(config)
        async with app_module.attach_engine(app, config, None, ready):  # type: ignore[arg-type]
            pass

    with pytest.raises(ConfigError):
        asyncio.run(attach())

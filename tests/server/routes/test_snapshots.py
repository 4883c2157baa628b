"""A session saved over HTTP goes on from its file on another server, with other stages; others are refused."""

from __future__ import annotations

import base64
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save

from streamdiff.config import Config, PlaybackConfig, ServeConfig, SessionConfig
from streamdiff.engine.messages import Event, FrameBatch, Save, Shown
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.model import Model
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.server import http_server
from streamdiff.server.app_state import MAX_SNAPSHOTS
from streamdiff.server.routes import sessions
from streamdiff.snapshot_header import read_saved_session
from tests.server.conftest import Site, bearer, open_site
from tests.server.routes.test_pictures import png
from tests.small import BLUE, CPU, RED, small_encoder, small_model

pytestmark = pytest.mark.slow
MODEL = small_model(4, layers=4, sink=2)
CHUNK = MODEL.spec.chunk_frames
LEAD = PlaybackConfig(max_ahead_s=4.0)
IMAGE = "data:image/png;base64," + base64.b64encode(png("green")).decode()


def pipeline(stages: int, model: Model = MODEL) -> Any:
    pictures = ImageEncoder(lambda: small_encoder(4), model.spec)
    return StreamingPipeline(model, CPU, parts=local_parts(model, CPU, stages), pictures=pictures)


class Frames:
    """What the engine of a site has made, by session and number."""

    def __init__(self, site: Site) -> None:
        self.made: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        site.state.manager.on_event = self._take

    def _take(self, event: Event | Any) -> None:
        if isinstance(event, FrameBatch):
            self.made[event.session].update(enumerate(event.pictures, event.first))


async def saved(site: Site, session: str, headers: dict[str, str]) -> bytes:
    answer = await site.http.get(f"/api/sessions/{session}/snapshot", headers=headers)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return answer.content


async def told_size(site: Site, session: str, headers: dict[str, str]) -> int:
    answer = await site.http.head(f"/api/sessions/{session}/snapshot", headers=headers)
    assert (answer.status_code, answer.content) == (200, b""), answer.text
    return int(answer.headers["content-length"])


async def opened(site: Site, snapshot: bytes, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
    files = {"snapshot": ("a.safetensors", snapshot, "application/octet-stream")}
    return await site.http.post("/api/sessions", files=files, data=fields, headers=headers)


async def test_a_session_goes_on_to_the_bit_on_another_server_with_other_stages() -> None:
    async with open_site(Config(playback=LEAD), pipeline(1)) as site:
        frames = Frames(site)
        session = (await site.http.post("/api/sessions", json={"prompt": RED, "seed": 3, "image": IMAGE})).json()
        assert session["image"] is True
        made, steer = frames.made[session["id"]], bearer(session["control_token"])
        await site.until(lambda: len(made) >= 2 * CHUNK)
        told = await told_size(site, session["id"], steer)
        snapshot = await saved(site, session["id"], steer)
        assert abs(len(snapshot) - told) < 0.1 * told, "it plays on in between"
        begin = read_saved_session(snapshot).made_frames
        await site.until(lambda: len(made) >= begin + 2 * CHUNK)
        url = f"/api/sessions/{session['id']}/snapshot"
        assert (await site.http.get(url)).status_code == (await site.http.head(url)).status_code == 401
        assert (await site.http.get(url, headers=bearer(session["view_token"]))).status_code == 403
    async with open_site(Config(playback=LEAD, serve=ServeConfig(max_utilization=10.0)), pipeline(4)) as site:
        frames = Frames(site)
        answer = await opened(site, snapshot)
        assert answer.status_code == 201, answer.text
        told = answer.json()
        assert (told["seed"], told["prompt"], told["kv_context"], told["image"]) == (3, RED, "clean", True)
        again = frames.made[told["id"]]
        await site.until(lambda: len(again) >= 2 * CHUNK)
        both = sorted(made.keys() & again.keys())
        assert min(again) == begin
        assert len(both) >= 2 * CHUNK
        assert all(np.array_equal(made[number], again[number]) for number in both)
        other = await opened(site, snapshot, prompt=BLUE)
        assert other.status_code == 201, other.text
        assert other.json()["prompt"] == BLUE


async def test_the_default_stream_goes_on_from_a_file_with_its_own_prompt_or_another(tmp_path: Path) -> None:
    file = tmp_path / "saved.safetensors"
    first = SessionConfig(prompt=RED, seed=3)
    async with open_site(Config(playback=LEAD, session=first), pipeline(1)) as site:
        made = Frames(site).made["default"]
        await site.until(lambda: len(made) >= 2 * CHUNK)
        file.write_bytes(await saved(site, "default", {}))
        begin = read_saved_session(file.read_bytes()).made_frames
        await site.client.send(Shown("default", begin))  # nobody watches, and all that may be ahead could be made
        await site.until(lambda: max(made) >= begin + 6 * CHUNK)
    for given, prompt in (({}, RED), ({"prompt": BLUE}, BLUE)):
        again = Config(playback=LEAD, session=SessionConfig(snapshot=str(file), **given))
        async with open_site(again, pipeline(4)) as site:
            more = Frames(site).made["default"]
            await site.until(lambda more=more: len(more) >= 2 * CHUNK)
            state = (await site.http.get("/api/sessions/default")).json()
            assert (state["seed"], state["prompt"]) == (3, prompt)
            assert min(more) >= begin, "some may have come before anybody looked"
            if not given:
                both = made.keys() & more.keys()
                assert both and all(np.array_equal(made[number], more[number]) for number in both)
    other = Config(session=SessionConfig(snapshot=str(file)))
    async with open_site(other, pipeline(1, small_model(5, layers=4, sink=2))) as site:
        await site.until(lambda: site.state.manager.ended.is_set())
        assert "name is small-4 in the snapshot" in site.state.manager.engine.reason


async def test_what_does_not_fit_is_refused_by_name_and_others_play_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LARGEST_SNAPSHOT_BYTES", 1 << 20)
    monkeypatch.setattr(sessions, "LARGEST_SNAPSHOT_BYTES", 1 << 20)
    other = small_model(5, layers=4, sink=2)
    async with open_site(Config(), pipeline(1)) as site:
        snapshot = await saved(site, "default", {})
    async with open_site(Config(), pipeline(1, other)) as site:

        async def refusal(data: bytes, **fields: str) -> tuple[int, str, str]:
            answer = await opened(site, data, **fields)
            assert answer.headers["content-type"] == "application/problem+json"
            return answer.status_code, answer.json().get("field", ""), answer.json()["detail"]

        status, field, why = await refusal(snapshot)
        assert (status, field) == (422, "snapshot")
        assert "name is small-4 in the snapshot, but small-5 here" in why
        for name, value in (("seed", "3"), ("kv_context", "clean")):
            assert (await refusal(snapshot, **{name: value}))[:2] == (422, name)
        for hostile in (
            b"", b"\x80\x04" * 40, snapshot[:-5], snapshot[:200], save({"a": torch.ones(1)}),
            save({"a": torch.ones(1)}, {"kind": "streamdiff session", "format": "3", "header": "[" * 99_999}),
        ):  # fmt: skip
            assert (await refusal(hostile))[:2] == (422, "snapshot")
        assert (await refusal(bytes(2**20 + 1)))[:2] == (413, "snapshot")
        assert (await refusal(bytes(2**24 + 2**20 + 1)))[0] == 413
        text = await site.http.post("/api/sessions", files={"snapshot": (None, "words")})
        assert (text.status_code, text.json()["field"]) == (422, "snapshot")
        assert len((await site.http.get("/api/sessions")).json()["sessions"]) == 1
        assert (await site.http.post("/api/sessions", json={"prompt": RED})).status_code == 201


async def test_who_takes_nothing_of_a_file_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SEND_LIMIT_S", 2.0)
    monkeypatch.setattr(sessions, "_taken", as_large_as(64 << 20))
    async with open_site(Config(playback=LEAD), pipeline(1)) as site:
        ends = []
        for _ in range(MAX_SNAPSHOTS):
            end = socket.create_connection(("127.0.0.1", httpx.URL(site.base).port))
            end.sendall(b"GET /api/sessions/default/snapshot HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            ends.append(end)
        await site.until(site.state.snapshots.locked)
        assert (await site.http.get("/api/sessions/default/snapshot")).json()["code"] == "busy"
        await site.until(lambda: not site.state.snapshots.locked())
        assert len(await saved(site, "default", {})) > 64 << 20, "whoever reads has all of it"
        for end in ends:
            end.close()


def as_large_as(size: int) -> Callable[..., Awaitable[bytes]]:
    async def taken(*given: object) -> bytes:
        return save({"a": torch.zeros(size, dtype=torch.uint8)}, {"header": "{}"})

    return taken


async def test_a_file_is_taken_from_servers_with_the_same_key_alone_unless_others_are_trusted(tmp_path: Path) -> None:
    def server(key: str, trust: bool = False) -> Config:
        return Config(
            serve=ServeConfig(max_utilization=10.0, snapshot_key_file=str(tmp_path / key), trust_snapshots=trust)
        )

    async with open_site(server("one"), pipeline(1)) as site:
        signed = await saved(site, "default", {})
        assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600
        unsigned = await site.state.manager.get("default").ask(Save("default"), 60.0)
        assert (await opened(site, signed)).status_code == 201
        refused = [(await opened(site, data)).json() for data in (unsigned, signed[:-1] + b"\x55")]
        assert [(each["field"], each["code"]) for each in refused] == [
            ("snapshot", "unsigned"), ("snapshot", "signature"),
        ]  # fmt: skip
    async with open_site(server("two"), pipeline(1)) as site:
        assert (await opened(site, signed)).json()["code"] == "signature"
    async with open_site(server("two", trust=True), pipeline(1)) as site:
        assert (await opened(site, signed)).status_code == 201
        assert (await opened(site, unsigned)).status_code == 201


async def test_so_many_files_lie_in_memory_and_no_more() -> None:
    async with open_site() as site:
        form = {"files": {"snapshot": ("s.safetensors", bytes(17 << 20))}, "data": {"prompt": "blue"}}
        assert (await site.http.post("/api/sessions", **form)).json()["code"] != "busy"
        for _ in range(MAX_SNAPSHOTS):
            await site.state.snapshots.acquire()
        answer = await site.http.post("/api/sessions", **form)
        assert (answer.status_code, answer.json()["code"]) == (503, "busy")
        assert (await site.http.post("/api/sessions", data={"prompt": "blue"}, files={"image": b""})).status_code != 503

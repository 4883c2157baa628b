"""`streamdiff.client` against a running server: sessions, prompts, controls, events, frames, files, refusals."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamdiff import client as client_module
from streamdiff.client import AsyncClient, Client
from streamdiff.errors import ConfigError, RequestError, StreamdiffError
from tests.server.conftest import CONTROL, VIEW, Site, locked, run_scene
from tests.server.scripted import COLOURS, CONTROLS, INFO, SIZE, Painter

pytestmark = pytest.mark.slow


def is_of(frame: np.ndarray, colour: str) -> bool:
    return bool(np.abs(frame[:16, :16].reshape(-1, 3).mean(0) - COLOURS[colour]).max() < 40)


def test_a_session_is_opened_watched_and_steered_and_ends_with_its_stream(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        async with AsyncClient(site.base, CONTROL) as client, await client.open("a red circle", fps=40) as stream:
            frames = stream.frames()
            assert is_of(first := await anext(frames), "red") and first.shape == (SIZE, SIZE, 3)
            events = stream.events()
            told = asyncio.ensure_future(anext(events))
            receipt = await stream.prompt("a blue star", switch="keep", until="shown")
            assert receipt["stage"] == "shown" and receipt["pts"] > 0 and (await told)["type"]
            while not is_of(await anext(frames), "blue"):
                pass
            with Image.open(io.BytesIO(await stream.picture())) as picture:
                assert is_of(np.asarray(picture), "blue")
            assert (await stream.request("GET", "/log")).headers["content-type"] == "application/jsonl"
            assert (await stream.ask("pause"))["stage"] == "accepted" and stream.state["paused"]
            await frames.aclose()
            await events.aclose()
        assert site.state.manager.get(stream.id) is None

    run_scene(scene, locked(tmp_path))


def test_what_is_held_stays_held_until_it_is_let_go_or_the_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SAY_AGAIN_S", 0.05)

    async def scene(site: Site) -> None:
        async with AsyncClient(site.base) as client, await client.session() as stream:
            await stream.control(move_x=1, jump=1)
            before = dict(site.live.steering._held.heard_s)
            await site.until(lambda: site.live.steering._held.heard_s != before)
            await stream.control(jump=0)
            assert site.live.steering._held.holders.keys() == {"move_x"}
            with pytest.raises(RequestError) as refused:
                await stream.control(fly=1)
            assert refused.value.code == "control"
        await site.until(lambda: not site.live.steering._held.holders)
        assert site.state.manager.get("default") is not None, "others' sessions go on"

    run_scene(scene, painter=Painter(chunk_s=0.001, info=replace(INFO, controls=CONTROLS)))


async def refusal(asked: Awaitable[object]) -> str:
    """The code of the error that it is."""
    with pytest.raises(StreamdiffError) as refused:
        await asked
    return refused.value.code


def test_what_cannot_be_had_is_an_error_with_field_and_code(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        async with AsyncClient(site.base, VIEW) as client, await client.session() as stream:
            assert await refusal(client.open("a red circle")) == "forbidden"
            assert await refusal(stream.prompt("a blue star")) == "forbidden"
        async with AsyncClient(site.base, CONTROL) as client, await client.session() as stream:
            with pytest.raises(RequestError) as refused:
                await stream.prompt("a blue star", switch="sideways")
            assert (refused.value.code, refused.value.field) == ("out_of_range", "switch")
            waiting = asyncio.create_task(stream.prompt("a blue star", until="shown"))  # nobody watches
            await site.until(lambda: stream.state.get("prompt") == "a blue star")
            await site.state.manager.end("default", "deleted")
            assert await refusal(waiting) == "ended"
        for url, code in ((site.base, "token"), ("http://127.0.0.1:9", "unreachable")):
            async with AsyncClient(url) as client:
                assert await refusal(client.open()) == code

    run_scene(scene, locked(tmp_path))


def test_the_same_without_asyncio_and_the_command_that_brings_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocking(base: str) -> None:
        with Client(base) as client, client.open("a red circle") as stream:
            for number, frame in enumerate(stream.frames()):
                if number == 0:
                    assert is_of(frame, "red")
                    assert stream.prompt("a yellow star")["stage"] == "accepted"
                if is_of(frame, "yellow"):
                    break
            assert next(iter(stream.events()))["type"]
            with pytest.raises(RequestError):
                client.session("s-unknown")
        monkeypatch.setitem(sys.modules, "websockets", None)
        with Client(base) as client, client.open() as stream, pytest.raises(ConfigError) as missing:
            stream.prompt("a yellow star")
        assert "pip install 'streamdiff[client]'" in str(missing.value)

    async def scene(site: Site) -> None:
        await asyncio.to_thread(blocking, site.base)
        assert [session.id for session in site.state.manager.sessions] == ["default"]

    run_scene(scene)

"""Sessions that outlive their engine, or their server: the same stream goes on, from a snapshot that was kept."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.engine.messages import SetPrompt
from streamdiff.errors import RequestError
from streamdiff.server.sessions.keeper import SavedFolder
from tests.server.conftest import open_site
from tests.server.scripted import Painter, Text
from tests.server.test_restart import FEWER_STEPS, GREEN, Gate, Watching, change, near, serving, start, stats, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
LIMIT_S = 240.0
SETTINGS = {"prompt": "green", "seed": 5, "fps": 20.0, "steps": 2, "paused": False}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


async def opened(http: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, str]]:
    made = (await http.post("/api/sessions", json=fields)).json()
    return made["id"], {"Authorization": f"Bearer {made['control_token']}"}


@asynccontextmanager
async def steering(http: httpx.AsyncClient, name: str, key: dict[str, str]) -> AsyncIterator[Watching]:
    """A viewer who may steer."""
    async with httpx.AsyncClient(base_url=http.base_url, headers=key, timeout=60) as own, watching(own, name) as viewer:
        yield viewer


async def shown_past(viewer: Watching, frame: int) -> int:
    """Wait until a frame above this number is on show."""
    return int((await stats(viewer, lambda told: told["frame"] > frame))["frame"])


async def kept(folder: Path, id: str) -> None:
    """Wait until a session's file is there, and was written anew."""
    path = folder / f"{id}.session"
    await until(path.exists)
    first = path.stat().st_ino
    await until(lambda: path.stat().st_ino != first)


async def applied_prompt(viewer: Watching, prompt: str) -> dict[str, Any]:
    """Change the prompt; returns the receipt that says from which frame, and which chunk, it holds."""
    said = len(viewer.messages)
    viewer.channel.send('{"type": "prompt", "prompt": "%s", "id": "next"}' % prompt)  # noqa: UP031
    return await viewer.after(said, {"type": "receipt", "stage": "applied", "id": "next"})


async def test_an_engine_that_is_killed_goes_on_with_the_same_stream(tmp_path: Path) -> None:
    """Not a new beginning: its chunks and frames go on being counted, and connections and time stamps too."""
    folder = tmp_path / "state"
    async with serving("--keep-s", "0.3", "--state-dir", str(folder)) as (server, http):
        name, key = await opened(http, prompt="green", seed=5)
        async with watching(http) as viewer, steering(http, name, key) as other:
            frame = await shown_past(other, 100)
            await kept(folder, name)
            files = list(folder.iterdir())
            assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            await change(http, type="reset", seed=7)
            said = len(other.messages), len(viewer.messages)
            server.engine.send_signal(signal.SIGKILL)
            await other.after(said[0], {"type": "state", "engine": "restarting"})
            await other.after(said[0], {"type": "state", "engine": "running"})
            await viewer.after(said[1], {"type": "state", "engine": "running"})
            await shown_past(other, frame)
            applied = await applied_prompt(other, "blue")
            assert applied["chunk"] > frame // 8, "chunks are counted from the stream's beginning"
            assert applied["frame"] >= frame
            times = [pts for pts, _ in other.frames]
            assert times == sorted(set(times))
            assert {other.pc.connectionState, viewer.pc.connectionState} == {"connected"}
            assert (await http.delete(f"/api/sessions/{name}", headers=key)).status_code == 200
            assert not (folder / f"{name}.session").exists()
    assert "continues from a snapshot" in server.complaints
    assert list(folder.iterdir()) == [], "a server that ends as it was asked to leaves nothing"


async def test_what_the_new_engine_refuses_begins_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REFUSES", "1")
    async with (
        serving("--keep-s", "0.2", "--state-dir", str(tmp_path / "state")) as (server, http),
        watching(http) as viewer,
    ):
        await change(http, type="prompt", prompt="green")
        frame = await shown_past(viewer, 120)
        await kept(tmp_path / "state", "default")
        server.engine.send_signal(signal.SIGKILL)
        await viewer.after(len(viewer.messages), {"type": "state", "engine": "restarting"})
        await shown_past(viewer, frame + 40)
        applied = await applied_prompt(viewer, "blue")
        assert applied["chunk"] < frame // 8
        assert near(GREEN)(*viewer.frames[-1]) or near((40, 80, 220))(*viewer.frames[-1])
    assert "restarts instead of resuming: the painter does not know this hand" in server.complaints


async def test_a_server_that_is_killed_leaves_its_sessions_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    options = ("--keep-s", "0.3", "--state-dir", str(folder), "--server-name", "a")
    async with serving(*options, code=-signal.SIGKILL) as (first, http):
        name, key = await opened(http, prompt="green", seed=5)
        async with watching(http, name) as viewer:
            await shown_past(viewer, 60)
            await kept(folder, name)
            first.process.kill()
    (folder / ".streamdiff-0123456789ab.part").write_bytes(b"half")
    (folder / "s-a-damaged.session").write_bytes(b"{}")
    async with serving(*options) as (second, http):
        there = await http.get(f"/api/sessions/{name}", headers=key)
        assert (there.status_code, there.json()["prompt"], there.json()["seed"]) == (200, "green", 5)
        async with watching(http, name) as viewer:
            assert await shown_past(viewer, 0) >= 60 - 20
            await viewer.until_frame(near(GREEN))
    assert [path.name for path in folder.iterdir()] == ["s-a-damaged.session.refused"]
    assert "Session s-a-damaged is not opened again" in second.complaints


async def test_sessions_are_handed_over_at_sigterm(tmp_path: Path) -> None:
    """With ids, tokens and settings; a page's connection is told to come back. Files are gone once they are opened."""
    folder = tmp_path / "handover"
    options = ("--handover", str(folder), "--server-name", "a")
    async with serving(*options) as (first, http):
        name, key = await opened(http, prompt="green", seed=5, fps=20, steps=2)
        held, held_key = await opened(http, prompt="blue")
        async with watching(http, name) as viewer, watching(http) as page:
            await change(http, type="prompt", prompt="blue")
            frame = await shown_past(viewer, 40)
            assert (await http.post(f"/api/sessions/{held}/pause", headers=held_key)).status_code == 200
            said = len(page.messages)
            first.process.send_signal(signal.SIGTERM)
            await page.after(said, {"type": "bye"})
        await asyncio.to_thread(first.process.wait, LIMIT_S)
        assert first.process.stdout is not None and f"sessions are in {folder}: " in first.process.stdout.read()
    assert {path.stem for path in folder.iterdir()} == {"default", name, held}
    other = (folder / f"{name}.session").read_bytes().replace(name.encode(), b"s-a-other", 1)
    (folder / "s-a-other.session").write_bytes(other.replace(b"scripted", b"somebody"))
    async with serving(*options) as (second, http):
        there = (await http.get(f"/api/sessions/{name}", headers=key)).json()
        assert there.items() >= SETTINGS.items()
        there = (await http.get(f"/api/sessions/{held}", headers=held_key)).json()
        assert (there["prompt"], there["paused"]) == ("blue", True)
        assert (await http.get("/api/state")).json()["state"]["prompt"] == "blue"
        refused = await http.post(f"/api/sessions/{name}/pause", headers=held_key)
        assert refused.status_code in (401, 403)
        async with steering(http, name, key) as viewer:
            assert await shown_past(viewer, 0) >= frame - 20
            assert (await applied_prompt(viewer, "red"))["chunk"] >= frame // 8
        await until(lambda: [path.name for path in folder.iterdir()] == ["s-a-other.session.refused"])
        assert (await http.get("/api/sessions/s-a-other")).status_code == 410
    assert "Session s-a-other is not opened again" in second.complaints
    assert os.listdir(folder) == ["s-a-other.session.refused"], "Ctrl-C hands nothing over"


async def test_a_session_whose_prompt_is_being_encoded_is_handed_over_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    class Slow(Text):
        def encode(self, text: str) -> Any:
            if "blue" in text:
                may_go_on.wait(LIMIT_S)
            return super().encode(text)

    painter = Painter(chunk_s=0.02)
    painter.text = Slow(slow=True)
    async with open_site(Config(serve=ServeConfig(handover=str(tmp_path))), painter) as site:
        live = site.live
        await site.until(lambda: live.playback.made_frames > 0)
        plain, refused = live.ask, 0

        async def save(command: Any, timeout_s: float) -> Any:
            nonlocal refused
            try:
                return await plain(command, timeout_s)
            except RequestError:
                refused += 1
                may_go_on.set()
                raise

        monkeypatch.setattr(live, "ask", save)
        changing = asyncio.create_task(site.http.post("/api/control", json={"type": "prompt", "prompt": "blue"}))
        await site.until(lambda: any(isinstance(each, SetPrompt) for each in site.client.sent))
        await site.state.manager.keeper.hand_over(site.state.manager.sessions)
        assert refused and (tmp_path / "default.session").exists()
        await changing


@pytest.mark.parametrize("given_up", [False, True])
async def test_what_no_engine_can_save_is_handed_over_and_begins_afresh(given_up: bool, tmp_path: Path) -> None:
    """At SIGTERM while the engine is started again, and after the last restart has failed."""
    folder, gate = tmp_path / "handover", Gate(tmp_path / "gate")
    options = ("--handover", str(folder), "--server-name", "a")
    first = start(*options, "--restarts", "1", gate=gate)
    await gate.open()
    async with first.client() as http:
        name, key = await opened(http, prompt="green", seed=5, fps=20, steps=2)
        async with watching(http, name) as viewer:
            frame = await shown_past(viewer, 0)
        first.engine.send_signal(signal.SIGKILL)
        await until(lambda: "is started again in" in first.complaints)
        if given_up:
            first.engine.send_signal(signal.SIGKILL)
            await until(lambda: "/readyz answers 503" in first.complaints)
        first.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(first.process.wait, LIMIT_S)
    first.close()
    assert {path.stem for path in folder.iterdir()} == {"default", name}
    async with serving(*options) as (second, http):
        there = (await http.get(f"/api/sessions/{name}", headers=key)).json()
        assert there.items() >= SETTINGS.items()
        async with steering(http, name, key) as viewer:
            await viewer.until_frame(near(FEWER_STEPS))
            assert await shown_past(viewer, frame) > frame, "frames go on being counted"
            assert (await applied_prompt(viewer, "red"))["epoch"] > 0
        await until(lambda: not list(folder.iterdir()))
    for complaints in (first.complaints, second.complaints):
        assert name in complaints, "the log says of which session the stream is lost"


@pytest.mark.parametrize("options", [("--keep-s", "0.2", "--state-dir"), ("--handover",)])
def test_a_second_server_does_not_take_the_folder_of_one_that_lives(options: tuple[str, ...], tmp_path: Path) -> None:
    first = start(*options, str(tmp_path))
    try:
        first.address()
        second = start(*options, str(tmp_path))
        assert second.process.wait(LIMIT_S) == 2
        second.close()
        assert str(tmp_path) in second.complaints and len(second.complaints.splitlines()) == 1
        first.process.kill()
        first.process.wait(LIMIT_S)
        third = start(*options, str(tmp_path))
        third.address()
        assert third.close() == 0, third.complaints
    finally:
        first.close()


def test_a_file_that_cannot_be_removed_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = SavedFolder(tmp_path, "serve.state_dir")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        folder.remove("s-1")
    assert "What was kept of session s-1 cannot be removed" in caplog.text

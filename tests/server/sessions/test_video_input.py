"""Video that feeds a session: frames in pieces, a file at its own pace, and what happens at its end; so with WHIP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from streamdiff.config import Config, PlaybackConfig, SessionConfig
from streamdiff.engine.messages import InputFrames, Pictures, SetInput
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.server.sessions import video_input
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.video_input import VideoInput, check_video, fit_frame, play
from streamdiff.video.files import open_clip
from tests.server.conftest import bearer, open_site
from tests.server.routes.test_whip import Colour, sending, served, state
from tests.server.scripted import Painter

GREEN = (20, 200, 30)


def video(path: Path, frames: int, fps: int = 50, size: tuple[int, int] = (320, 180)) -> str:
    """A file of one colour."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.bit_rate = 2_000_000
        picture = np.broadcast_to(np.array(GREEN, np.uint8), (size[1], size[0], 3))
        container.start_encoding()  # also where no frame follows
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")))
        container.mux(stream.encode())
    return str(path)


def with_file(path: str, **session: Any) -> Config:
    return Config(playback=PlaybackConfig(max_ahead_s=1.0), session=SessionConfig(input=path, **session))


@pytest.mark.slow
async def test_the_stream_follows_the_file_and_goes_on_from_its_prompt_at_the_end(tmp_path: Path) -> None:
    async with served(with_file(video(tmp_path / "a.mp4", 30))) as site:
        assert (await state(site))["input"] == {"kind": "file", "strength": 0.4, "fault": ""}
        assert not [each for each in site.client.sent if isinstance(each, InputFrames)], "nobody watches yet"
        viewer = await site.watch()
        await site.until(lambda: site.live.input is None)
        assert (await state(site))["input"] is None
        [first, *_] = [each for each in site.client.sent if isinstance(each, InputFrames)]
        assert np.abs(np.median(first.pictures.reshape(-1, 3), axis=0) - GREEN).max() < 30
        assert [each.strength for each in site.client.sent if isinstance(each, SetInput)] == [0.4, None]
        shown = site.client.shown
        while site.client.shown < shown + 8:
            await viewer.frame()
        again = await site.http.post("/whip", content="v=0", headers={"Content-Type": "application/sdp"})
        assert again.status_code == 400, "another may feed it now"


@pytest.mark.slow
async def test_a_sender_s_session_ends_with_it_where_that_was_asked_for() -> None:
    async with served() as site:
        for on_end, status in (("end", 410), ("text", 200)):
            opened = (await site.http.post("/api/sessions", json={"prompt": "a red circle"})).json()
            where, own = f"/api/sessions/{opened['id']}", bearer(opened["control_token"])
            path = f"/whip/{opened['id']}?on_end={on_end}"
            async with sending(site, Colour(GREEN), path, own) as sender:
                assert (await site.http.get(where, headers=own)).json()["input"]["kind"] == "WHIP sender"
                assert (await site.http.delete(sender.location, headers=own)).status_code == 200
            found = await site.http.get(where, headers=own)
            assert found.status_code == status, on_end
            assert status == 200 or found.json()["reason"] == "input_ended"
        odd = await site.http.post("/whip?on_end=stop", content="v=0", headers={"Content-Type": "application/sdp"})
        assert odd.status_code == 400 and "on_end" in odd.text


async def test_a_model_that_takes_no_video_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        async with open_site(with_file(video(tmp_path / "a.mp4", 3)), Painter()):
            pass


def test_what_is_no_video_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_text("no video")
    empty = tmp_path / "b.mp4"
    empty.write_bytes(Path(video(tmp_path / "c.mp4", 3)).read_bytes()[:60])
    none = video(tmp_path / "d.avi", 0)
    for path in (text, empty, tmp_path, none):
        with pytest.raises(ConfigError):
            check_video(str(path))
    check_video(str(tmp_path / "c.mp4"))
    monkeypatch.setattr(video_input, "MAX_PIXELS", 4)
    with pytest.raises(ConfigError):
        check_video(str(tmp_path / "c.mp4"))


def test_a_title_that_is_no_utf_8_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "TITLE"
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height = 64, 48
        container.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        container.mux(stream.encode())
    path.write_bytes(path.read_bytes().replace(b"TITLE", b"T\xeftre"))
    check_video(str(path))
    assert open_clip(path).frames == 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes where a file waits."""
    now = [100.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("streamdiff.server.sessions.video_input.asyncio.sleep", sleep)
    monkeypatch.setattr("streamdiff.server.sessions.video_input.clock.monotonic_s", lambda: now[0])
    return now


@pytest.mark.parametrize("fps", [1000, 7])
async def test_frames_come_when_the_file_says(tmp_path: Path, fps: int, now: list[float]) -> None:
    """Whatever the rate: what is waited for is the time between frames."""
    path, came = video(tmp_path / "a.mp4", 12, fps, (64, 48)), list[float]()
    await play(path, push=lambda frame: came.append(now[0]), wanted=lambda: True)
    assert len(came) == 12
    assert np.allclose(np.diff(came), 1 / fps, atol=1e-3)
    assert np.isclose(now[0] - came[-1], 1 / fps, atol=1e-3), "the last one has its time too"


async def test_a_damaged_packet_is_left_out_and_the_file_plays_on(tmp_path: Path, now: list[float]) -> None:
    path, came = tmp_path / "a.mp4", list[float]()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.gop_size = 64, 48, 1
        for _ in range(10):
            container.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    at, length = places[5]
    data = path.read_bytes()
    path.write_bytes(data[:at] + b"\xff" * length + data[at + length :])
    await play(str(path), push=lambda frame: came.append(now[0]), wanted=lambda: True)
    assert len(came) == 9 and came[-1] - came[0] == pytest.approx(9 / 25), "each in its own time"


async def test_an_engine_that_ends_at_the_start_is_no_error_of_the_file_and_the_next_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(*asked: Any) -> None:
        raise EngineFailure("it ended")

    monkeypatch.setattr(LiveSession, "control", ends)

    async with open_site(with_file(video(tmp_path / "a.mp4", 3)), Painter()) as site:
        await site.state.manager.sessions[0].ask_open()
        assert site.client.sent[-1] == SetInput("default", 0.4)


@pytest.mark.slow
async def test_a_session_that_is_ended_is_fed_no_more(tmp_path: Path) -> None:
    async with served(with_file(video(tmp_path / "a.mp4", 500))) as site:
        assert [task for task in asyncio.all_tasks() if task.get_name() == "input"]
        assert (await site.http.delete("/api/sessions/default")).status_code == 200
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "input"]


# ---- frames ---------------------------------------------------------------------------------------------------------


def frame(width: int, height: int, value: int = 90) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.full((height, width, 3), value, np.uint8), "rgb24")


async def test_the_newest_frame_goes_on_in_pieces_whatever_its_size_and_only_while_it_is_wanted() -> None:
    handed: asyncio.Queue[Pictures] = asyncio.Queue()
    wanted = False

    async def end(reason: str) -> None: ...

    source = VideoInput("camera", (48, 32), lambda: 100.0, handed.put, lambda: wanted, end)
    source.begin()
    source.push(frame(8000, 4000))
    assert source.figures()["left_out"] == 1
    for _ in range(20):
        source.push(frame(32, 32))
        await asyncio.sleep(0)
    assert handed.empty()
    wanted = True
    for size in ((640, 480), (33, 71), (1920, 1080)):
        for value in (10, 200, 90):
            source.push(frame(*size, value))
        pictures = await asyncio.wait_for(handed.get(), 30)
        assert pictures.shape == (4, 32, 48, 3) and np.abs(pictures.astype(int) - 90).max() <= 2
    await source.close()


@pytest.mark.parametrize("size", [(1, 1), (2001, 1), (17, 4000)])
def test_odd_sizes_are_fitted_and_what_would_be_huge_is_refused(size: tuple[int, int]) -> None:
    made = fit_frame(frame(*size), 48, 32)
    assert made.shape == (32, 48, 3) and np.abs(made.astype(int) - 90).max() <= 2
    with pytest.raises(ValueError):
        fit_frame(frame(2, 5400), 256, 160)
